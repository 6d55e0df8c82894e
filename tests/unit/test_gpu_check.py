# SPDX-License-Identifier: Apache-2.0
"""What scripts/gpu_check.sh and tests/gpu say without a GPU, a rehearsal of stage 1, and the wheels of stage 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from support.commands import LIMIT, ROOT


def call(*arguments, folder, gpus=0, **variables):
    """Run scripts/gpu_check.sh with a fake ``nvidia-smi`` on the PATH that lists ``gpus`` GPUs."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + 'echo "GPU 0: NVIDIA H100"\n' * gpus)
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "BAPO_VENV": sys.prefix, **variables}
    command = ["bash", "scripts/gpu_check.sh", "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)


def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path):
    done = call(folder=tmp_path)
    assert done.returncode == 2 and "no GPU here, so nothing was checked" in done.stderr and not done.stdout
    # nvidia-smi lists it, but torch cannot use it: no machine has a GPU of this number.
    done = call("1", folder=tmp_path, gpus=1, CUDA_VISIBLE_DEVICES="99")
    assert done.returncode == 2 and "the driver is older" in done.stderr and not (tmp_path / "out").exists()
    done = call("4", folder=tmp_path)
    assert done.returncode == 1 and "bash scripts/gpu_check.sh [OPTIONS] [STAGE...]" in done.stderr


def test_the_first_stage_rehearsed_beside_one_whose_packages_are_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['verl'] = None\n")
    done = call("--rehearse", "1", "2", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ERROR collecting tests/gpu/test_2_worker.py" in done.stdout
    machine, *tests = map(json.loads, (tmp_path / "out/report.jsonl").read_text().splitlines())
    assert machine["rehearsal"] and f"PyTorch version: {torch.__version__}" in machine["machine"]
    tests = [test for test in tests if "test_1_torch" in test["test"]]
    assert {test["outcome"] for test in tests} == {"passed", "skipped"} and len(tests) > 8
    assert any("search and loss in multiples of vanilla" in test.get("told", {}) for test in tests)
    assert "<testsuite " in (tmp_path / "out" / "junit.xml").read_text()


def test_pytest_alone_skips_with_the_reason():
    # no:cacheprovider, because the tests that started this one have their own cache in the same folder.
    options = ["-m", "gpu", "-rs", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_1_torch.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and re.search(r"SKIPPED .* no GPU that torch \S+ .* can use", done.stdout), done.stdout


def test_the_first_stage_needs_torch_and_pytest_alone():
    absent = ("verl", "ray", "hydra", "tensordict", "hypothesis")
    code = f"import runpy, sys; sys.path.insert(0, '.'); sys.modules.update(dict.fromkeys({absent}))\n"
    code += "for name in ('conftest', 'test_1_torch'): runpy.run_path(f'tests/gpu/{name}.py')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0  # an import of these would raise


def test_wheels_are_installed_beside_what_is_there(tmp_path):
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH: $*" >>"$CALLS"\n')
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "tensordict-0.10.0-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    given = {"BAPO_VENV": "", "BAPO_PYTHON": str(python), "CALLS": str(tmp_path / "calls")}
    done = call("--wheels", str(wheels), "2", folder=tmp_path, gpus=1, **given)
    assert done.returncode == 0 and "Not in" in done.stderr and "tensordict" not in done.stderr
    install, *_, stage = (tmp_path / "calls").read_text().splitlines()
    assert "--no-index --no-deps" in install and f"{wheels}/tensordict-0.10.0-" in install
    target = re.search(r"--target (\S+)", install)[1]
    assert stage.startswith(target) and stage.endswith("tests/gpu/test_2_worker.py") and not Path(target).exists()
