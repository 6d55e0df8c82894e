# SPDX-License-Identifier: Apache-2.0
"""Fill in what a command leaves out: experiment and size, model and data, and the number of GPUs.

``choose`` does it for ``start``, before the parent exists: from the environment, the arguments, and what ``start``
finds on the machine. The variables are explained in the run script.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipe.bapo.host.files import output_folder

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "recipe" / "bapo" / "example" / "files"
INPUTS = ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")
FILES = {"MODEL_PATH": "model", "TRAIN_FILE": "train.parquet", "TEST_FILE": "test.parquet"}
FOR_GPUS = ("paper_", "gsm8k", "table_")  # experiments whose names begin like this do not run on a CPU
TRAIN_GPUS, ROLLOUT_GPUS = "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node"


@dataclass(frozen=True)
class Request:
    """What decides the size of a run."""

    experiment: str
    cpu: bool
    gpus: int  # of this node that train or sample
    several: bool  # it has several nodes, or is a job of a Ray cluster
    own_data: bool
    language_model: bool


# The first row that fits is the size, a file of configs/size, unless the command has size=.
SIZES: tuple[tuple[Callable[[Request], bool], str], ...] = (
    (lambda run: run.language_model and run.cpu, "language_model_cpu"),
    (lambda run: run.language_model and run.gpus <= 2, "language_model_gpu"),
    (lambda run: run.language_model, "language_model_node"),
    (lambda run: run.cpu and run.own_data, "cpu_own_data"),
    (lambda run: run.cpu and run.experiment == "example", "cpu_example"),
    (lambda run: run.cpu and run.experiment == "partial_rollout", "cpu_long"),
    (lambda run: run.cpu, "cpu"),
    (lambda run: run.several or run.gpus > 2, "gpu"),
    (lambda run: True, "gpu_few"),
)


@dataclass
class Choice:
    """What was chosen: environment variables, where None removes one, and the arguments of the run."""

    environment: dict[str, str | None] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    language_model: bool = False


def choose(
    given: Mapping[str, str],
    gpus: int,
    arguments: Sequence[str] = (),
    amd: bool = False,
    flash_attn: Callable[[], bool] = lambda: False,
    only_checks: bool = False,
) -> Choice:
    """Choose for the variables of an environment and the arguments of a command.

    Args:
        given: the environment. An empty variable counts as none; paths are absolute.
        gpus: number of NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` leaves here.
        arguments: those of the command, which go to the run after those that are chosen.
        amd: whether there are AMD GPUs.
        flash_attn: whether flash-attn can be imported; only asked on a GPU.
        only_checks: whether nothing is to train. A run for GPUs can be checked where there are none, such as on a login
            node.

    Raises:
        ValueError: names the variable or argument, its value and the fix.
    """
    given = {name: value for name, value in given.items() if value}
    given |= _settings(arguments)
    choice = Choice()
    if only_checks and not gpus and _is_for_gpus(given):
        if TRAIN_GPUS not in given:
            raise ValueError(f"no GPU is visible here: to check a run of another node, add {TRAIN_GPUS}=N.")
        gpus, flash_attn = _count(given, TRAIN_GPUS, 1), lambda: True  # that node is taken to have flash-attn
    nodes, several, cpu = _platform(given, choice, gpus, amd)
    own = any(name in given for name in INPUTS)
    experiment = _experiment(given)
    language_model = experiment == "language_model"
    if language_model and (own or several):
        raise ValueError(
            "experiment=language_model makes its own model and data, on this machine alone: leave MODEL_PATH, "
            "TRAIN_FILE, TEST_FILE, NNODES and RAY_ADDRESS unset, or give another experiment."
        )
    if not (own or several or cpu or experiment.startswith((*FOR_GPUS, "evaluate"))):  # a GPU, and nothing is given
        language_model, experiment = True, experiment or "language_model"
    choice.language_model, experiment = language_model, experiment or "example"

    here = 1 if cpu else gpus
    train, sample = _shares(given, here, experiment, cpu)
    if language_model and TRAIN_GPUS not in given:
        train = max(number for number in (1, 2, 4, 8) if number <= max(train, 1))  # these divide its batches
    used = train + sample * (experiment == "separate_async")
    run = Request(experiment, cpu, used, several, "TRAIN_FILE" in given or "TEST_FILE" in given, language_model)
    size = given.get("size") or next(size for fits, size in SIZES if fits(run))
    if experiment.startswith(FOR_GPUS) and "cpu" in size:
        raise ValueError(
            f"experiment={experiment} is for GPUs and size={size} for a CPU: choose another experiment. To check it "
            f"without GPUs, leave VERL_PLATFORM unset and size= out, and give {TRAIN_GPUS}=N and --preflight."
        )
    if not language_model:
        _inputs(given, choice, experiment, cpu)

    choice.environment["OUTPUT_DIR"] = str(output_folder(arguments, given, experiment, ROOT))
    chosen = {"experiment": experiment, "size": size, "trainer.nnodes": nodes, TRAIN_GPUS: train}
    if experiment == "separate_async":
        chosen[ROLLOUT_GPUS] = sample
    choice.arguments += [
        "--config-dir",
        "configs",
        *(f"{key}={value}" for key, value in chosen.items() if key not in given),
    ]
    if not cpu:
        # FlashInfer's sampler, which vLLM takes for top_p below 1, compiles with nvcc and ends the server without one.
        choice.environment["VLLM_USE_FLASHINFER_SAMPLER"] = given.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not cpu and not any(one.startswith("platform=") for one in arguments) and not flash_attn():
        choice.arguments.append("platform=gpu_varlen")
    if language_model and cpu:  # trainer and vLLM take turns, so each can use all cores
        threads = min(16, max(1, len(os.sched_getaffinity(0)) // train))
        variables = "ray_kwargs.ray_init.runtime_env.env_vars"
        choice.arguments += [f"{variables}.OMP_NUM_THREADS='{threads}'", f"+{variables}.OMP_WAIT_POLICY=PASSIVE"]
    return choice


def _settings(arguments):
    """Return those arguments of a command on which a choice depends, by key. Of two, Hydra takes the last one."""
    keys = ("experiment", "size", TRAIN_GPUS, ROLLOUT_GPUS)
    pairs = (argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    return {key: value for key, value in pairs if key in keys}


def _experiment(given):
    """Return the experiment by which to choose; for ``[paper_7b,evaluate]``, which evaluates as that one, evaluate."""
    return given.get("experiment", "").strip("[]").split(",")[-1].strip()


def _is_for_gpus(given):
    """Whether a run is for GPUs, wherever it is checked."""
    platform = given.get("VERL_PLATFORM")
    return platform == "nvidia" or (platform is None and _experiment(given).startswith(FOR_GPUS))


def _platform(given, choice, gpus, amd):
    """Return the number of nodes, whether the run is on several nodes or a cluster, and whether it is on the CPU."""
    nodes = _count(given, "NNODES", 1)
    cluster = given.get("RAY_ADDRESS", "local") != "local"
    platform = given.get("VERL_PLATFORM")
    if platform not in (None, "cpu", "nvidia"):
        raise ValueError(f"invalid VERL_PLATFORM={platform}: leave it unset on NVIDIA GPUs, or set cpu.")
    if platform == "nvidia" and gpus == 0:
        raise ValueError("VERL_PLATFORM=nvidia, but no GPU is visible here: leave it unset, or set cpu.")
    if gpus == 0 and platform is None:
        if amd:
            raise ValueError(
                "this machine has AMD GPUs, which are not supported: set VERL_PLATFORM=cpu to train on its CPU."
            )
        # The CPU path is for this machine: nobody should find a cluster of GPUs training on its CPUs.
        where = "but this machine has no GPU: submit from a node with GPUs, or set VERL_PLATFORM=cpu."
        if nodes > 1:
            raise ValueError(f"NNODES={nodes} {where}")
        if cluster:
            raise ValueError(f"RAY_ADDRESS={given['RAY_ADDRESS']} {where}")
    cpu = platform == "cpu" or gpus == 0
    if cpu:  # Ray would compare CUDA_VISIBLE_DEVICES with its logical slots, which it calls GPUs
        choice.environment |= {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": None}
    else:
        choice.environment["VERL_PLATFORM"] = None  # verl finds it by itself
    if nodes == 1 and not cluster:
        # Have Ray, its dashboard and vLLM's servers listen only on the loopback interface. (Ray does this by default on
        # Windows and macOS, where it cannot form clusters; this variable makes it do the same here.)
        choice.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return nodes, nodes > 1 or cluster, cpu


def _count(given, name, default):
    value = given.get(name, str(default))
    if not re.fullmatch("[1-9][0-9]{0,5}", value):
        raise ValueError(f"invalid {name}={value}: give a whole number of 1 or more.")
    return int(value)


def _shares(given, here, experiment, cpu):
    """Return how many GPUs of a node train, and how many sample if the two use separate GPUs."""
    if experiment != "separate_async" or cpu:
        return _count(given, TRAIN_GPUS, max(here, 1)), _count(given, ROLLOUT_GPUS, 1)
    half = here // 2
    train = _count(given, TRAIN_GPUS, 1) if TRAIN_GPUS in given else None
    sample = _count(given, ROLLOUT_GPUS, 1) if ROLLOUT_GPUS in given else None
    train = here - (half if sample is None else sample) if train is None else train
    sample = here - train if sample is None else sample
    if train < 1 or sample < 1:
        raise ValueError(
            f"experiment=separate_async would train with {TRAIN_GPUS}={train} and sample with {ROLLOUT_GPUS}={sample} "
            f"on this node's {here} GPUs: give both as 1 or more, or choose experiment=partial_rollout."
        )
    return train, sample


def _inputs(given, choice, experiment, cpu):
    """Take model and data as given and, on a CPU, the example's for what is not."""
    files = {name: given.get(name) for name in INPUTS}
    if experiment == "evaluate":
        files["TRAIN_FILE"] = files["TRAIN_FILE"] or files["TEST_FILE"]
    if cpu:
        if bool(files["TRAIN_FILE"]) != bool(files["TEST_FILE"]):
            one, other = ("TRAIN_FILE", "TEST_FILE") if files["TRAIN_FILE"] else ("TEST_FILE", "TRAIN_FILE")
            raise ValueError(f"{one} is set, and {other} is not: give both, or neither for the example's own.")
        if not all(files.values()):
            _check_example()
        files = {name: files[name] or str(EXAMPLE / FILES[name]) for name in INPUTS}
    for name, what in zip(
        INPUTS, ("a Hugging Face folder or hub name", *["a parquet file in verl's schema"] * 2), strict=True
    ):
        if not files[name]:
            raise ValueError(f"{name} is not set: give {what}.")
    choice.environment |= files


def _check_example():
    """Refuse files of the example that are not as they were published."""
    for expected, name in re.findall(r"^([0-9a-f]{64})  (.+)$", (EXAMPLE / "SHA256SUMS").read_text(), re.M):
        path = EXAMPLE / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise ValueError(
                f"recipe/bapo/example/files/{name} is not as it was published: git restore recipe/bapo/example/files"
            )
