# SPDX-License-Identifier: Apache-2.0
"""The run script, as far as it is a shell script: it finds the environment, and says where GPUs cannot be used."""

import os
import shutil
import subprocess

import pytest
from support.commands import LIMIT, ROOT
from support.gpus import DRIVER_FILES, write_driver_file

SCRIPTS = (
    "recipe/bapo/run_bapo_example.sh",
    "scripts/setup.sh",
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
            timeout=LIMIT,
        )
        message = f"Error: /{sign} is here, and nvidia-smi lists no GPU (Failed to initialize NVML: Unknown Error)."
        assert run.returncode == 1 and message in run.stderr and not run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_amd_gpus_end_every_script_unless_the_cpu_is_asked_for(script, tmp_path):
    root = write_driver_file(tmp_path, "dev/kfd")
    environment = {**os.environ, "VERL_PLATFORM": "", "BAPO_DEVICE_ROOT": str(root), "OUTPUT_DIR": f"{tmp_path}/run"}
    run = subprocess.run(
        ["bash", *script.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert run.returncode == 1 and not run.stdout, run.stdout + run.stderr
    assert run.stderr == (
        "Error: /dev/kfd is here: this machine has AMD GPUs, which are not supported. Set VERL_PLATFORM=cpu to use its "
        "CPU.\n"
    )
    source = 'fail() { exit 1; }; source scripts/gpus.sh; choose_device; echo "$device"'
    asked = subprocess.run(
        ["bash", "-c", source], cwd=ROOT, env={**environment, "VERL_PLATFORM": "cpu"}, capture_output=True, text=True
    )
    assert asked.stdout == "cpu\n"


@pytest.fixture
def copy(tmp_path):
    """Copy the run script into a tree with other scripts, such as verl's; stand-ins for Python say what they get."""
    for name in ("python3", "venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $@ from $PWD with $PYTHONPATH"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tree/recipe/bapo").mkdir(parents=True)
    (tmp_path / "tree/scripts").mkdir()
    return shutil.copy(ROOT / "recipe/bapo/run_bapo_example.sh", tmp_path / "tree/recipe/bapo")


def test_without_scripts_the_active_environment_is_used_and_overrides_come_last(copy, tmp_path):
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": ""}
    for venv, python in (("", "python3"), ("venv", "venv/bin/python")):
        run = subprocess.run(
            ["bash", copy, "a.key=1", "--preflight"],
            cwd=tmp_path,
            env={**environment, "BAPO_VENV": venv},
            capture_output=True,
            text=True,
        )
        said = f"{python} -m recipe.bapo.run.start trainer.project_name=bapo a.key=1 --preflight"
        assert run.stdout == f"{said} from {tmp_path} with {tmp_path}/tree\n", run.stdout + run.stderr


def test_an_environment_that_is_not_there_is_named(copy, tmp_path):
    run = subprocess.run(
        ["bash", copy], cwd=tmp_path, env={**os.environ, "BAPO_VENV": "nope"}, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert (
        run.stderr
        == "Error: nope/bin/python does not exist: set BAPO_VENV to a virtual environment with the requirements.\n"
    )
