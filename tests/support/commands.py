# SPDX-License-Identifier: Apache-2.0
"""Call the run script, in tests that expect it to end at once, and wait for conditions."""

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds after which what a test waits for has failed to come: many times what a busy machine needs


def run_script(*arguments, **environment):
    """Call the run script in this process's environment without its input variables, and with ``environment`` added."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")}
    return subprocess.run(
        ["bash", "recipe/bapo/run_bapo_example.sh", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def until(true, seconds, what):
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"{what} did not come within {seconds} seconds"
        time.sleep(0.1)
    return found
