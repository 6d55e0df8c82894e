# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh without a GPU: the rehearsal of its first stage, and that it sees what is wrong."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from bapo import BAPOConfig
from scripts.gpu_check import one_update, torch_alone
from scripts.gpu_check.table import Table, main

ROOT = Path(__file__).parents[2]


def call(*arguments, folder, gpus=0, **environment):
    """The script on a machine whose ``nvidia-smi`` lists ``gpus``."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + 'echo "GPU 0: NVIDIA H100"\n' * gpus)
    tool.chmod(0o755)
    given = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "BAPO_VENV": sys.prefix, **environment}
    command = ["bash", "scripts/gpu_check.sh", "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=600)


def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path):
    done = call(folder=tmp_path)
    assert done.returncode == 2 and "no GPU here, so nothing was checked" in done.stderr and not done.stdout
    done = call("1", folder=tmp_path, gpus=1)  # listed, and torch cannot use it
    assert done.returncode == 2 and "the driver is older" in done.stderr and not (tmp_path / "out").exists()
    done = call("4", folder=tmp_path)
    assert done.returncode == 1 and "bash scripts/gpu_check.sh [OPTIONS] [STAGE...]" in done.stderr


def test_the_first_stage_rehearsed(tmp_path):
    done = call("--rehearse", "1", folder=tmp_path)
    assert done.returncode == 0 and "nothing here was run on a GPU" in done.stdout, done.stderr
    found = json.loads((tmp_path / "out" / "stage1.json").read_text())
    assert found["rehearsal"] and found["stage"] == "1" and found["commit"] and found["date"]
    assert {row["ok"] for row in found["rows"]} == {True, None} and len(found["rows"]) > 10
    assert f"| {found['rows'][1]['what']} |" in done.stdout


def test_the_first_stage_needs_torch_alone():
    code = (
        "import sys; from scripts.gpu_check import torch_alone; "
        "print([name for name in ('verl', 'ray', 'hydra', 'tensordict', 'pandas') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_a_wrong_bound_and_a_wrong_gradient_are_seen(monkeypatch, capsys):
    right, calls = torch_alone.search, []

    def wrong_every_other_time(batch, config=None):
        calls.append(batch)
        return right(batch, config if len(calls) % 2 else BAPOConfig(positive_contribution_target=0.01))

    monkeypatch.setattr(torch_alone, "search", wrong_every_other_time)
    assert main("1", [torch_alone.the_bounds_are_those_of_the_cpu], ["--rehearse"]) == 1
    gradients = []

    def wrong_gradient(batch, low, high):
        gradients.append(batch[1] * (1 + 0.1 * len(gradients)))
        return torch.zeros(()), gradients[-1]

    monkeypatch.setattr(torch_alone, "loss_and_gradient", wrong_gradient)
    assert main("1", [torch_alone.the_loss_and_its_gradient_are_those_of_the_cpu], ["--rehearse"]) == 1
    assert capsys.readouterr().out.count("| NO |") >= 4


def test_a_check_that_raises_fails_and_the_others_run(tmp_path):
    def breaks(table):
        raise RuntimeError("an illegal memory access")

    def tells(table):
        table.tell("after it", "told")

    assert main("1", [breaks, tells], ["--rehearse", "--json", str(tmp_path / "table.json")]) == 1
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert rows[-2]["seen"] == "RuntimeError: an illegal memory access" and rows[-2]["ok"] is False
    assert rows[-1]["what"] == "after it"


def test_whose_code_waits_for_the_gpu():
    message = "called a synchronizing CUDA operation"
    found = {}
    for name, file in (("ours", ROOT / "bapo" / "search.py"), ("verls", "/site-packages/verl/trainer.py")):
        code = f"def {name}(then): then()"
        exec(compile(code, str(file), "exec"), found)

    def wait():
        warnings.warn(message, stacklevel=1)

    with one_update.waits(on_gpu=False) as counts:
        for nested in (found["ours"], found["verls"]):
            nested(wait)
        found["verls"](lambda: found["ours"](wait))  # the innermost decides
        wait()
        warnings.warn("something else", stacklevel=1)
    assert counts == {"ours": 2, "verl": 1, "other": 1}


def test_other_bounds_of_one_rank_are_seen():
    def seen(low, rho=0.4):
        line = {"low": low, "high": 1.5, "search_steps": 6, "positive_contribution_start": rho}
        return {"record": [{name: float(value).hex() for name, value in line.items()}], "waits": {}}

    for ranks, failures in (([seen(0.6)], 0), ([seen(0.6), seen(0.62)], 1), ([seen(0.6, rho=0.45)], 1)):
        table = Table("2", rehearsal=True)
        one_update.compare(table, "offload", ranks, {"four micro-batches": [seen(0.6)]}, tolerance=1e-4)
        assert len(table.failed()) == failures
    table = Table("2", rehearsal=True)
    one_update.compare(table, "offload", [{"error": "OutOfMemoryError"}], {}, tolerance=1e-4)
    assert table.failed()[0]["seen"] == "OutOfMemoryError"


def test_wheels_are_installed_beside_what_is_there(tmp_path):
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH: $*" >>"$CALLS"\n')
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "tensordict-0.10.0-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    given = {"BAPO_VENV": "", "BAPO_PYTHON": str(python), "CALLS": str(tmp_path / "calls")}
    done = call("--wheels", str(wheels), "2", folder=tmp_path, gpus=1, **given)
    assert done.returncode == 0 and "Not in" in done.stderr and "tensordict" not in done.stderr
    install, _, stage = (tmp_path / "calls").read_text().splitlines()
    assert "--no-index --no-deps" in install and f"{wheels}/tensordict-0.10.0-" in install
    target = re.search(r"--target (\S+)", install)[1]
    assert stage.startswith(target) and "-m scripts.gpu_check.one_update" in stage and not Path(target).exists()


def test_the_wheels_of_the_second_stage_are_pinned():
    text = (ROOT / "scripts" / "gpu_check.sh").read_text()
    names = re.search(r"^wheels_of_stage_2=\(([^)]*)\)", text, re.M)[1].split()
    pinned = {line.split("==")[0] for line in (ROOT / "requirements-cuda.txt").read_text().splitlines()}
    assert {"verl", "ray", "tensordict", "hydra-core"} <= set(names) <= pinned


def test_no_two_settings_of_the_second_stage_are_the_same():
    groups = {name: overrides for group in ("float32", "fused") for name, overrides in one_update.GROUPS[group].items()}
    settings = {name: dict(one.split("=", 1) for one in [*one_update.COMMON, *groups[name]]) for name in groups}
    assert len({tuple(sorted(setting.items())) for setting in settings.values()}) == len(settings)
    fused = {name for name in settings if settings[name]["actor_rollout_ref.model.use_fused_kernels"] == "true"}
    assert fused == {"fused kernels"}
