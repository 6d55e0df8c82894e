# SPDX-License-Identifier: Apache-2.0
"""Run the commands of docs/silent_faults.md, unchanged, on files like those that a run of verl leaves.

The files are made here, and no run is started. Other tests run README's commands and the snippets of bapo/README.md and
docs/monitor.md.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.configs import ROOT

PAGE = (ROOT / "docs/silent_faults.md").read_text()
(BLOCK,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [*BLOCK.splitlines(), *re.findall(r"`(python docs/silent_faults/.*?)`", PAGE)]


def command(words):
    """Return the page's command that holds ``words``."""
    (found,) = (command for command in COMMANDS if words in command)
    return found


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command of the page in the folder of the run, and returns what it prints."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run_command(words):
        line = ["bash", "-c", command(words)]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert not done.stderr, done.stderr
        return done.stdout

    return run_command


def test_the_page_names_every_script():
    named = {name for command in COMMANDS for name in re.findall(r"docs/silent_faults/\w+\.py", command)}
    assert named == {f"docs/silent_faults/{path.name}" for path in (ROOT / "docs/silent_faults").glob("*.py")}


def test_the_command_of_a_run_is_given_to_preflight(run, tmp_path):
    folder = tmp_path / "outputs/DATE/TIME/.hydra"
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(yaml.safe_dump(["trainer.no_such_key=1"]))
    assert run("preflight_of_run").startswith("failed   keys             Could not override 'trainer.no_such_key'")


def test_the_log_is_searched(run, tmp_path):
    (tmp_path / "train.log").write_text(
        "(Worker pid=1) BAPO: something is wrong.\n(Worker pid=1) BAPO: something is wrong.\n"
        "WARN: grad_norm is not finite: nan\nstep:7 - actor/grad_norm:nan - actor/lr:1e-6\n"
    )
    assert run("grep -h") == "      2 (Worker pid=1) BAPO: something is wrong.\n"
    assert run("grep -c") == "1\n"
    assert run("grep -E") == "step:7\n"


def test_steps_without_a_finite_gradient_norm_are_printed(run, tmp_path):
    norms = {1: 0.5, 2: None, 3: None, 4: 0.4}
    rows = [{"step": step, "data": {"actor/grad_norm": norm}} for step, norm in norms.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 5, "data": {}}]))
    assert run("grad_norm.py") == "step 2\nstep 3\n"


def test_broken_weights_and_ranks_that_differ_are_found(run, tmp_path):
    checkpoint = tmp_path / "global_step_N" / "actor"
    checkpoint.mkdir(parents=True)
    weights = {"same": torch.ones(2), "other": torch.ones(2)}
    for rank in (0, 1):
        changed = weights | {"other": weights["other"] * (1 + rank)}
        torch.save(changed, checkpoint / f"model_world_size_2_rank_{rank}.pt")
    save_file({"good": torch.ones(1), "bad": torch.tensor([float("nan")])}, checkpoint / "model.safetensors")
    assert run("weights.py global_step_N") == "model.safetensors bad\n"
    assert run("weights.py --ranks") == "1 of 2 tensors differ between rank 0 and 1\n"


def test_right_answers_without_a_reward_are_counted(run, tmp_path):
    rows = [
        ("so \\boxed{1,000}", "1000", -1.0),
        ("so \\boxed{7}", "7", 1.0),
        ("so \\boxed{8}", "7", -1.0),
        ("\u2028", "7", -1.0),
    ]
    (tmp_path / "ROLLOUTS").mkdir()
    lines = [json.dumps(dict(zip(("output", "gts", "score"), row, strict=True)), ensure_ascii=False) for row in rows]
    (tmp_path / "ROLLOUTS" / "1.jsonl").write_text("\n".join(lines))
    assert run("answers.py") == "1 of 4 have the right answer in a box and no reward\n"
