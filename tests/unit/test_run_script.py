# SPDX-License-Identifier: Apache-2.0
"""The run script, as far as it is a shell script: it finds the environment, and says where GPUs cannot be used."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.commands import LIMIT, ROOT
from support.gpus import DRIVER_FILES, write_driver_file

SCRIPTS = ("recipe/bapo/run_bapo_example.sh", "scripts/setup.sh", "scripts/gpu_check.sh")
NO_NVML = "Failed to initialize NVML: Unknown Error"


def bash(*command, cwd=ROOT, **variables):
    """Run bash with these variables besides those of the tests."""
    environment = os.environ | variables
    return subprocess.run(["bash", *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_gpus_that_cannot_be_used_end_every_script(script, tmp_path):
    """Otherwise it would set up the CPU stack and train there, beside idle GPUs."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{NO_NVML}'; exit 255\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERL_PLATFORM": "", "OUTPUT_DIR": f"{tmp_path}/run"}
    said = dict.fromkeys(DRIVER_FILES, f"nvidia-smi lists no GPU ({NO_NVML})") | {Path("dev/kfd"): "VERL_PLATFORM=cpu"}
    for sign, text in said.items():
        root = write_driver_file(tmp_path / sign.name, sign)
        run = bash(script, **environment, BAPO_DEVICE_ROOT=str(root))
        assert run.returncode == 1 and not run.stdout, run.stdout + run.stderr
        assert f"Error: /{sign} is here" in run.stderr and text in run.stderr


def test_amd_gpus_end_nothing_where_the_cpu_is_asked_for(tmp_path):
    root = write_driver_file(tmp_path, "dev/kfd")
    source = 'fail() { exit 1; }; source scripts/gpus.sh; choose_device; echo "$device"'
    assert bash("-c", source, VERL_PLATFORM="cpu", BAPO_DEVICE_ROOT=str(root)).stdout == "cpu\n"


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
    path = f"{tmp_path}:{os.environ['PATH']}"
    for venv, python in (("", "python3"), ("venv", "venv/bin/python")):
        run = bash(copy, "a.key=1", "--preflight", cwd=tmp_path, PATH=path, PYTHONPATH="", BAPO_VENV=venv)
        said = f"{python} -m recipe.bapo.run.start trainer.project_name=bapo a.key=1 --preflight"
        assert run.stdout == f"{said} from {tmp_path} with {tmp_path}/tree\n", run.stdout + run.stderr


def test_an_environment_that_is_not_there_is_named(copy, tmp_path):
    run = bash(copy, cwd=tmp_path, BAPO_VENV="nope")
    assert run.returncode == 1 and "Error: nope/bin/python does not exist" in run.stderr
