# SPDX-License-Identifier: Apache-2.0
"""The run script, for tests that expect it to end at once, and the wait for what takes its time."""

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(*arguments, **environment):
    """The main job's script with ``environment`` on top of this one's, without its inputs."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")}
    return subprocess.run(
        ["bash", "recipe/bapo/run_bapo_example.sh", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def until(true, seconds, what):
    """Wait for a function to give something true, and give it back."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what} did not come within {seconds} seconds")
