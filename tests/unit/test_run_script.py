# SPDX-License-Identifier: Apache-2.0
"""The run script names what is missing or wrong in its environment in a line, before it sets anything up."""

import json
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
        (0, {"TRAIN_FILE": "/tmp"}, "Error: TRAIN_FILE=/tmp is a folder: give a parquet file"),
        (
            0,
            {"TRAIN_FILE": __file__},
            f"Error: TRAIN_FILE={__file__} and TEST_FILE= are not usable together: give both",
        ),
        (0, {"MODEL_PATH": "/no/such"}, "Error: MODEL_PATH=/no/such is not a folder"),
        (0, {"CONFIG": "../size/cpu"}, "Error: CONFIG=../size/cpu is not usable: choose from"),
        (0, {"SIZE": "nothing"}, "Error: SIZE=nothing is not usable: choose from cpu cpu_example"),
        (0, {"CONFIG": "paper_7b"}, "Error: CONFIG=paper_7b is for GPUs"),
        (0, {"CONFIG": "gsm8k"}, "Error: CONFIG=gsm8k is for GPUs"),
        (0, {"GPUS_PER_NODE": "many"}, "Error: GPUS_PER_NODE=many is not usable"),
        # The CPU path is for this machine alone, and for who asked for it where there are GPUs of another kind.
        (0, {"NNODES": "2"}, "Error: NNODES=2 but this machine has no GPU"),
        (0, {"RAY_ADDRESS": "http://h:1"}, "Error: RAY_ADDRESS=http://h:1 but this machine has no GPU"),
        ("AMD", {}, "Error: this machine has AMD GPUs, which are not supported"),
        (0, {"VERL_PLATFORM": "huawei"}, "Error: VERL_PLATFORM=huawei is not usable: leave it unset"),
        (8, {"VERL_PLATFORM": "nvidia", "CUDA_VISIBLE_DEVICES": "0"}, MODEL_MISSING),  # verl's own name of it
        (8, {"VERL_PLATFORM": "nvidia", "CUDA_VISIBLE_DEVICES": ""}, "VERL_PLATFORM=nvidia, but no GPU is visible"),
        (1, {}, MODEL_MISSING),
        (8, ASYNC, MODEL_MISSING),
        (1, ASYNC, "train on GPUS_PER_NODE=1 and sample on ROLLOUT_GPUS_PER_NODE=0 of this node's 1 GPUs: set both to"),
        (8, {**ASYNC, "GPUS_PER_NODE": "8"}, "on GPUS_PER_NODE=8 and sample on ROLLOUT_GPUS_PER_NODE=0 of"),
        # GPUs that CUDA is told to leave are not counted, and those of a cluster are its own to count.
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


def test_nothing_in_the_environment_is_run_and_json_stays_json(tmp_path):
    value = f"gpus[$(touch {tmp_path}/ran)]"
    for arguments in ((), ("--preflight", "--json")):
        run = run_script(*arguments, CONFIG="separate_async", GPUS_PER_NODE=value, VERL_PLATFORM="cpu")
        assert run.returncode == 1 and f"Error: GPUS_PER_NODE={value} is not usable" in run.stderr
    (line,) = json.loads(run.stdout)
    assert line["status"] == "failed" and value in line["detail"] and not (tmp_path / "ran").exists()
    run = run_script("--preflight", "--json", OUTPUT_DIR='/tmp/${x}\\ "quoted"')
    (line,) = json.loads(run.stdout)
    assert line["detail"].startswith('OUTPUT_DIR=/tmp/${x}\\ "quoted" is not usable: name a folder without ${')


def test_help_is_the_scripts_header():
    run = run_script("--help")
    assert run.returncode == 0 and "--preflight [--json]" in run.stdout and "GPUS_PER_NODE" in run.stdout


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
        assert run.returncode == 0 and start.startswith(f"unset {gpus} -m recipe.bapo.launch"), run.stdout + run.stderr
        assert " size=gpu " in start and start.endswith(" trainer.total_epochs=1")


def test_a_run_on_the_cpu_does_not_tell_ray_of_gpus(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "visible=${CUDA_VISIBLE_DEVICES-unset}"\n')
    python.chmod(0o755)
    environment = {"BAPO_VENV": str(tmp_path), "VERL_PLATFORM": "cpu", "OUTPUT_DIR": f"{tmp_path}/run"}
    run = run_script(**environment, CUDA_VISIBLE_DEVICES="0")
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "visible=unset", run.stdout + run.stderr
