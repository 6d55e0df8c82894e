# SPDX-License-Identifier: Apache-2.0
"""The second stage of scripts/gpu_check.sh, rehearsed on the CPU platform."""

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.gpu_check.one_update import SETTINGS

ROOT = Path(__file__).parents[2]


def test_the_second_stage_rehearsed(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--rehearse", "--out", str(tmp_path), "2"],
        cwd=ROOT,
        env={**os.environ, "BAPO_VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = json.loads((tmp_path / "stage2.json").read_text())["rows"]
    judged = {row["what"] for row in rows if row["ok"]}
    assert {f"{name}: bounds and steps" for name in [*SETTINGS, "two ranks"]} <= judged
    assert any(row["what"].endswith("the pass and the search") for row in rows)
