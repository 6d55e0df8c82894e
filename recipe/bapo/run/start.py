# SPDX-License-Identifier: Apache-2.0
"""The command that starts a run, and then becomes its parent; ``run_bapo_example.sh`` calls it.

    python -m recipe.bapo.run.start [--preflight] [key=value ...]

``main`` looks at the machine, names the experiment, size and platform that the command leaves out, and sets the
environment variables that the yaml files read. It makes the language model where that is trained. Then it becomes
preflight, the run, or the command that submits the run to a Ray cluster.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from recipe.bapo.config.errors import explain
from recipe.bapo.host.files import names_folder, output_folder
from recipe.bapo.run import bapo_run
from recipe.bapo.run.machine import has_flash_attn, system_variables, visible_gpus

ROOT = Path(__file__).parents[3]
FILES = {"MODEL_PATH": "model", "TRAIN_FILE": "train.parquet", "TEST_FILE": "test.parquet"}
# The size of an experiment on a CPU with the example's data. Experiments that are not listed are for GPUs.
ON_A_CPU = {
    "example": "cpu_example",
    "replay": "cpu",
    "partial_rollout": "cpu_long",
    "separate_async": "cpu",
    "evaluate": "cpu",
    "language_model": "language_model_cpu",
}


def choose(
    given: Mapping[str, Any], environment: Mapping[str, str], gpus: int
) -> tuple[dict[str, str], dict[str, str | None], bool]:
    """Choose by what the command gives and what the machine has.

    Args:
        given: the values of the command's ``key=value`` arguments.
        environment: a variable that is empty counts as none.
        gpus: the number of GPUs that a run could use here.

    Returns:
        The files of the groups experiment, size and platform; environment variables, where None removes one; and
        whether to train the language model that we make.

    Raises:
        ValueError: the run would train something else than it says.
    """
    experiment = _experiment(given)
    nodes, address = given.get("trainer.nnodes", environment.get("NNODES", 1)), environment.get("RAY_ADDRESS")
    several = str(nodes) != "1" or address not in (None, "", "local")
    platform = str(given.get("platform") or environment.get("VERL_PLATFORM") or "")  # Hydra refuses what is no name
    if not platform:  # a run for GPUs can be checked where there are none, such as on a login node
        platform = "gpu" if gpus or experiment not in (None, *ON_A_CPU) else "cpu"
        if platform == "cpu" and several:  # nobody should find a cluster of GPUs training on its CPUs
            where = f"RAY_ADDRESS={address}" if address else f"trainer.nnodes={nodes} (NNODES)"
            raise ValueError(f"{where}, but this machine has no GPU: start on one with GPUs, or set VERL_PLATFORM=cpu.")
    on_cpu = platform.startswith("cpu")
    own = {name for name in FILES if environment.get(name)}
    ours = not own and not several  # the model and the data
    if experiment is None:
        experiment = "language_model" if ours and not on_cpu else "example"
    if experiment == "language_model" and not ours:
        raise ValueError(
            "experiment=language_model makes its own model and data, on this machine alone: leave MODEL_PATH, "
            "TRAIN_FILE, TEST_FILE, NNODES and RAY_ADDRESS unset, or give another experiment."
        )
    on_gpus = not on_cpu and experiment in ON_A_CPU and experiment != "evaluate"
    language_model = ours and (on_gpus or experiment == "language_model")
    if language_model:
        gpus = max((number for number in (1, 2, 4, 8) if number <= gpus), default=0)  # these divide its batches
    few = given.get("trainer.n_gpus_per_node", gpus) in (1, 2)

    if on_cpu:
        platform = "cpu_all_cores" if language_model else "cpu"
        size = "cpu_own_data" if own & {"TRAIN_FILE", "TEST_FILE"} else ON_A_CPU.get(experiment, "cpu")
    else:
        if gpus and platform in ("gpu", "nvidia") and "platform" not in given and not has_flash_attn():
            platform = "gpu_varlen"
        if language_model:
            size = "language_model_gpu" if few else "language_model_node"
        else:
            size = "gpu_few" if few and not several else "gpu"
    groups = {"experiment": experiment, "size": size, "platform": platform}
    return groups, _variables(on_cpu, gpus, several), language_model


def _experiment(given):
    """Return the experiment by which to choose; for ``[paper_7b,evaluate]``, which evaluates as that one, evaluate."""
    name = given.get("experiment") or None
    if isinstance(name, list):
        name = name[-1]
    return name if isinstance(name, str) else None  # Hydra refuses what is neither


def _variables(on_cpu, gpus, several):
    """Return the environment variables that a machine needs, where None removes one."""
    variables = {"VERL_PLATFORM": None, "BAPO_GPUS": str(gpus) if gpus else None}  # verl finds GPUs by itself
    if on_cpu:  # Ray would compare CUDA_VISIBLE_DEVICES with its logical slots, which it calls GPUs
        variables = {"VERL_PLATFORM": "cpu", "BAPO_GPUS": None, "CUDA_VISIBLE_DEVICES": None}
    if not several:
        # Have Ray, its dashboard and vLLM's servers listen only on the loopback interface. (Ray does this by default on
        # Windows and macOS, where it cannot form clusters; this variable makes it do the same here.)
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def values_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values that ``key=value`` arguments give, by key. Of two, Hydra takes the last one."""
    pairs = [one for one in arguments if "=" in one and not one.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(pairs)
    return {override.key_or_group: override.value() for override in overrides}


def main(arguments: list[str]) -> int:
    """Fill in what the command leaves out, and replace this process by preflight, the run, or its submission."""
    for name in (*FILES, "OUTPUT_DIR", "BAPO_CACHE", "RAY_TMPDIR", "NNODES"):
        value = os.environ.get(name)
        if not value:  # the yaml files have a default only for a variable that is unset
            os.environ.pop(name, None)
        elif name != "NNODES" and (name != "MODEL_PATH" or Path(value).exists()):  # else it is a name on the hub
            os.environ[name] = os.path.abspath(value)  # relative to where the command was given
    try:
        given = values_of(arguments)
        chosen, variables, language_model = choose(given, os.environ, visible_gpus(os.environ))
        variables |= system_variables(os.environ)
        variables["OUTPUT_DIR"] = str(output_folder(arguments, os.environ, chosen["experiment"], ROOT))
    except (ValueError, OverrideParseException) as error:
        print(f"Error: {error if isinstance(error, ValueError) else explain(error)}", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    groups = [f"{group}={name}" for group, name in chosen.items() if group not in given]
    # OUTPUT_DIR has replaced run_dir=, which was relative to the folder that has just been left.
    keys = [one for one in arguments if one != "--preflight" and not names_folder(one)]
    command = ["--config-dir", "configs", *groups, *keys]
    checks = [sys.executable, "-m", "recipe.bapo.preflight", "--config-name", bapo_run.CONFIG_NAME, *command]
    if language_model:
        from recipe.bapo.language_model.__main__ import obtain

        folder = obtain(warmed_up="--preflight" not in arguments)
        os.environ.update({name: f"{folder}/{file}" for name, file in FILES.items()})
    if "--preflight" in arguments:
        os.execv(sys.executable, checks)
    train = [sys.executable, "-m", "recipe.bapo.run", *command]
    if os.environ.get("RAY_ADDRESS", "").startswith("http"):
        token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        if token.is_file() and token.stat().st_size:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        name = f"{Path(os.environ['OUTPUT_DIR']).name}-{time.strftime('%H%M%S')}"
        train = [sys.executable, "scripts/cluster/job.py", "submit", name, *train]
    os.execv(sys.executable, train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
