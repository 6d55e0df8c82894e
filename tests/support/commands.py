# SPDX-License-Identifier: Apache-2.0
"""The run script, for tests that expect it to end at once."""

import os
import subprocess
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
