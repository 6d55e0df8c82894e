# SPDX-License-Identifier: Apache-2.0
"""The run script names what is missing or wrong in its environment in a line, before it sets anything up."""

import os
import shutil
import subprocess

import pytest
from support.commands import ROOT, run_script
from support.gpus import DRIVER_FILES, write_driver_file, write_nvidia_smi

MODEL_MISSING = "Error: MODEL_PATH is not set: Hugging Face folder or hub name."
ASYNC = {"CONFIG": "separate_async"}


@pytest.mark.parametrize(
    "gpus, environment, message",
    [
        (0, {"TRAIN_FILE": "/no/such.parquet"}, "Error: TRAIN_FILE=/no/such.parquet does not exist"),
        (
            0,
            {"TRAIN_FILE": __file__},
            f"Error: TRAIN_FILE={__file__} and TEST_FILE= are not usable together: give both",
        ),
        (0, {"MODEL_PATH": "/no/such"}, "Error: MODEL_PATH=/no/such is not a folder"),
        (0, {"CONFIG": "../size/cpu"}, "Error: CONFIG=../size/cpu is not usable: choose from"),
        (0, {"CONFIG": "paper_7b"}, "Error: CONFIG=paper_7b is for GPUs"),
        # The CPU path does not use other machines. On a machine with AMD GPUs it has to be asked for.
        (0, {"NNODES": "2"}, "Error: NNODES=2 but this machine has no GPU"),
        (0, {"RAY_ADDRESS": "http://h:1"}, "Error: RAY_ADDRESS=http://h:1 but this machine has no GPU"),
        ("AMD", {}, "Error: this machine has AMD GPUs, which are not supported"),
        (0, {"VERL_PLATFORM": "huawei"}, "Error: VERL_PLATFORM=huawei is not usable: leave it unset"),
        (8, {"VERL_PLATFORM": "nvidia", "CONFIG": "evaluate"}, MODEL_MISSING),  # verl's name for CUDA
        (8, {"VERL_PLATFORM": "nvidia", "CUDA_VISIBLE_DEVICES": ""}, "VERL_PLATFORM=nvidia, but no GPU is visible"),
        # On a GPU the language model is the default only if no input is given, on one node, and not for these configs.
        (1, {"TEST_FILE": __file__}, MODEL_MISSING),
        (8, {"NNODES": "2"}, MODEL_MISSING),
        (
            1,
            {"CONFIG": "language_model", "TEST_FILE": __file__},
            "Error: CONFIG=language_model makes its own model and",
        ),
        (8, {"CONFIG": "language_model", "NNODES": "2"}, "Error: CONFIG=language_model is for this machine alone"),
        (1, ASYNC, "train on GPUS_PER_NODE=1 and sample on ROLLOUT_GPUS_PER_NODE=0 of this node's 1 GPUs: set both to"),
        # GPUs outside CUDA_VISIBLE_DEVICES are not counted. The GPUs of a cluster are not checked here.
        (8, {**ASYNC, "ROLLOUT_GPUS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "2,GPU-5a"}, "GPUS_PER_NODE=0 and"),
        (8, {**ASYNC, "GPUS_PER_NODE": "8", "ROLLOUT_GPUS_PER_NODE": "8", "RAY_ADDRESS": "http://h:1"}, MODEL_MISSING),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_a_line(gpus, environment, message, tmp_path):
    if gpus == "AMD":
        (tmp_path / "rocm-smi").write_text("#!/bin/sh\n")
        (tmp_path / "rocm-smi").chmod(0o755)
    write_nvidia_smi(tmp_path, 0 if gpus == "AMD" else gpus)
    default = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERL_PLATFORM": "", "OUTPUT_DIR": f"{tmp_path}/run"}
    default["BAPO_DEVICE_ROOT"] = str(tmp_path)  # a tree without a driver's files, whatever this machine has
    run = run_script(**default | environment)
    assert run.returncode == 1 and message in run.stderr, run.stdout + run.stderr
    assert len(run.stderr.splitlines()) == 1 and "Starting Ray" not in run.stdout


SCRIPTS = (
    "recipe/bapo/run_bapo_example.sh",
    "scripts/setup.sh",
    "scripts/cluster/ray.sh head",
    "scripts/gpu_check.sh",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_driver_beside_an_nvidia_smi_that_lists_no_gpu_ends_every_script(script, tmp_path):
    """Otherwise it would set up the CPU stack and train there, beside idle GPUs."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'; exit 255\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERL_PLATFORM": "", "OUTPUT_DIR": f"{tmp_path}/run"}
    for sign in DRIVER_FILES:
        root = write_driver_file(tmp_path / sign.name, sign)
        run = subprocess.run(
            ["bash", *script.split()],
            cwd=ROOT,
            env={**os.environ, **environment, "BAPO_DEVICE_ROOT": str(root)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        message = f"Error: /{sign} is here, and nvidia-smi lists no GPU (Failed to initialize NVML: Unknown Error)."
        assert run.returncode == 1 and message in run.stderr and not run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    "platform, tool, driver, said",
    [
        ("", None, True, "no GPU (nvidia-smi: command not found). Mend or install nvidia-smi (in a container"),
        ("cpu", None, True, "0 GPUs"),
        ("", None, False, "0 GPUs"),
        ("", 8, True, "8 GPUs"),
    ],
)
def test_gpus_are_counted_or_the_driver_is_named(platform, tool, driver, said, tmp_path):
    (tmp_path / "grep").symlink_to(shutil.which("grep"))
    if tool:
        write_nvidia_smi(tmp_path, tool)
        for name in ("sed", "tr", "cat", "cut"):
            (tmp_path / name).symlink_to(shutil.which(name))
    if driver:
        write_driver_file(tmp_path, DRIVER_FILES[0])
    code = 'fail() { echo "Error: $*"; exit 1; }; source scripts/gpus.sh; count_gpus; echo "$gpus GPUs"'
    environment = {"PATH": str(tmp_path), "VERL_PLATFORM": platform, "BAPO_DEVICE_ROOT": str(tmp_path)}
    run = subprocess.run(
        [shutil.which("bash"), "-euc", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert said in run.stdout and run.returncode == ("Error" in run.stdout), run.stdout + run.stderr


def test_nothing_in_the_environment_is_run(tmp_path):
    value = f"gpus[$(touch {tmp_path}/ran)]"
    run = run_script(CONFIG="separate_async", GPUS_PER_NODE=value, VERL_PLATFORM="cpu")
    assert run.returncode == 1 and f"Error: GPUS_PER_NODE={value} is not usable" in run.stderr
    assert not (tmp_path / "ran").exists()
    run = run_script("--preflight", OUTPUT_DIR="/tmp/${x}")
    assert run.returncode == 1 and "OUTPUT_DIR=/tmp/${x} is not usable: name a folder without ${" in run.stderr


def test_a_run_on_gpus_leaves_the_platform_to_verl_and_splits_the_gpus(tmp_path, task):
    write_nvidia_smi(tmp_path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "${VERL_PLATFORM-unset} $GPUS_PER_NODE $ROLLOUT_GPUS_PER_NODE $@"\n')
    python.chmod(0o755)
    files = {"MODEL_PATH": task / "model", "TRAIN_FILE": task / "train.parquet", "TEST_FILE": task / "test.parquet"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BAPO_VENV": tmp_path, "OUTPUT_DIR": tmp_path / "run"}
    for config, gpus in (({}, "8 1"), (ASYNC, "4 4"), ({**ASYNC, "ROLLOUT_GPUS_PER_NODE": "3"}, "5 3")):
        chosen = {name: str(value) for name, value in (files | environment | config).items()}
        run = run_script("trainer.total_epochs=1", VERL_PLATFORM="nvidia", **chosen)
        start = run.stdout.splitlines()[-1]
        assert run.returncode == 0 and start.startswith(f"unset {gpus} -m recipe.bapo.run"), run.stdout + run.stderr
        assert " size=gpu " in start and start.endswith(" trainer.total_epochs=1")


@pytest.mark.parametrize(
    "gpus, environment, size",
    [
        (1, {}, "gpu_few"),
        (2, ASYNC, "gpu_few"),
        (3, ASYNC, "gpu"),
        (8, {"GPUS_PER_NODE": "2"}, "gpu_few"),
        (1, {"NNODES": "2"}, "gpu"),
        (1, {"SIZE": "gpu"}, "gpu"),
    ],
)
def test_one_or_two_gpus_get_a_size_for_few_cpus(gpus, environment, size, tmp_path, task):
    write_nvidia_smi(tmp_path, gpus)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    files = {"MODEL_PATH": task / "model", "TRAIN_FILE": task / "train.parquet", "TEST_FILE": task / "test.parquet"}
    base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BAPO_VENV": tmp_path, "OUTPUT_DIR": tmp_path / "run"}
    base |= {"VERL_PLATFORM": "", "BAPO_DEVICE_ROOT": tmp_path}
    run = run_script(**{name: str(value) for name, value in (files | base | environment).items()})
    assert run.returncode == 0 and f" size={size} " in run.stdout.splitlines()[-1], run.stdout + run.stderr


def test_a_run_on_the_cpu_does_not_tell_ray_of_gpus(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "visible=${CUDA_VISIBLE_DEVICES-unset}"\n')
    python.chmod(0o755)
    environment = {"BAPO_VENV": str(tmp_path), "VERL_PLATFORM": "cpu", "OUTPUT_DIR": f"{tmp_path}/run"}
    run = run_script(**environment, CUDA_VISIBLE_DEVICES="0")
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "visible=unset", run.stdout + run.stderr


PYTHON = """#!/bin/sh
echo "$MODEL_PATH $*" >>"$CALLS"
case "$*" in
*language_model*--where) [ ! -e "$MADE" ] || echo "$MADE" ;;
*language_model*--converted*) echo "$MADE.converted" ;;
*"-m recipe.bapo.language_model") mkdir "$MADE"; echo "$MADE" ;;
*recipe.bapo.run.preflight*) echo "ok       values           usable"; [ -z "$WRONG" ] || { echo "$WRONG"; exit 1; } ;;
"-c import"*) exit 1 ;;
esac
"""


@pytest.fixture
def language_model(tmp_path):
    """Return a function that runs the script with stand-ins for Python and GPUs: the ended run and Python's calls."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    calls, made = tmp_path / "calls", tmp_path / "made"

    def run(*arguments, gpus=1, **environment):
        write_nvidia_smi(tmp_path, gpus)
        calls.write_text("")
        base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BAPO_VENV": str(tmp_path), "VERL_PLATFORM": ""}
        base |= {"OUTPUT_DIR": f"{tmp_path}/run", "CALLS": str(calls), "MADE": str(made), "WRONG": ""}
        done = run_script(*arguments, **base | environment)
        return done, [line for line in calls.read_text().splitlines() if " -c import" not in line]

    return run


def test_a_small_gpu_machine_with_no_variable_set_makes_the_language_model_once_and_trains_it(language_model, tmp_path):
    made = tmp_path / "made"
    run, calls = language_model()
    assert run.returncode == 0, run.stderr
    where, converted, checks, make, launch = calls
    assert where.endswith("-m recipe.bapo.language_model --where")
    assert converted.endswith("-m recipe.bapo.language_model --converted")
    assert checks.startswith(f"{made}.converted/model -m recipe.bapo.run.preflight ")
    assert make.split()[-1] == "recipe.bapo.language_model"
    assert launch.startswith(f"{made}/model -m recipe.bapo.run ")
    for argument in ("experiment=language_model", "size=language_model_gpu", "trainer.n_gpus_per_node=1"):
        assert argument in launch.split()
    # Without flash-attn a micro-batch would be one sequence, and these are short.
    assert "platform=gpu_without_flash_attn actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096" in launch
    assert "OMP_NUM_THREADS" not in launch
    run, calls = language_model()  # it is there
    modules = [call.partition("-m recipe.bapo.")[2].split()[0] for call in calls]
    assert modules == ["language_model", "run"], run.stderr


@pytest.mark.parametrize(
    "gpus, config, used, size",
    [
        (3, "", 2, "gpu"),  # batches can be divided among two, and not among three
        (7, "", 4, "8gpus"),
        (8, "replay", 8, "8gpus"),
        (8, "separate_async", 4, "8gpus"),
    ],
)
def test_the_language_models_size_is_that_of_the_machine(language_model, gpus, config, used, size):
    run, calls = language_model(gpus=gpus, CONFIG=config)
    assert run.returncode == 0, run.stderr
    assert f"experiment={config or 'language_model'} size=language_model_{size} " in calls[-1]
    assert f"trainer.n_gpus_per_node={used} " in calls[-1]


def test_on_a_cpu_the_language_model_has_to_be_asked_for_and_gets_all_cores(language_model):
    cores = int(subprocess.run(["nproc"], capture_output=True, text=True).stdout)
    run, calls = language_model(gpus=0, CONFIG="language_model")
    assert run.returncode == 0, run.stderr
    assert "experiment=language_model size=language_model_cpu" in calls[-1]
    assert f"env_vars.OMP_NUM_THREADS='{min(cores, 16)}'" in calls[-1] and "flash_attn" not in calls[-1]
    run, calls = language_model(gpus=0)
    assert "size=cpu_example" in calls[-1] and len(calls) == 1 and "OMP_NUM_THREADS" not in calls[-1]


def test_what_preflight_finds_is_found_before_the_model_is_made(language_model, tmp_path):
    wrong = "failed   verl's rules     some.key=7 is not usable: set it to 8."
    for arguments in (("--preflight",), ()):
        run, calls = language_model(*arguments, WRONG=wrong)
        assert run.returncode == 1 and "recipe.bapo.run.preflight" in calls[-1] and not (tmp_path / "made").exists()
        assert (wrong in run.stdout) == bool(arguments)
    assert run.stderr.splitlines()[-1] == "Error: some.key=7 is not usable: set it to 8."
