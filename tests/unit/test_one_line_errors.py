# SPDX-License-Identifier: Apache-2.0
"""A command that cannot start prints one line of error, not a traceback."""

import subprocess
import sys
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  fills its cache: on a slow machine a child would say that it does so

ROOT = Path(__file__).parents[2]


def test_a_command_that_cannot_begin_says_so_in_a_line():
    command = [sys.executable, "-m", "recipe.bapo.run", "--config-name=ppo_megatron_trainer"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (line,) = filter(None, run.stderr.splitlines())
    assert run.returncode == 1
    assert line.startswith("Error: ") and "For Megatron's config give model_engine=" in line


def test_a_folder_without_verl_is_named(tmp_path):
    command = ["bash", "scripts/try_verl.sh", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(
        f"Error: {tmp_path} is neither a release of verl, such as 0.8.0, nor a folder that holds verl/"
    )
