# SPDX-License-Identifier: Apache-2.0
"""A command that cannot start prints one line of error, not a traceback."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_folder_without_verl_is_named(tmp_path):
    command = ["bash", "scripts/try_verl.sh", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(
        f"Error: {tmp_path} is neither a release of verl, such as 0.8.0, nor a folder that holds verl/"
    )
