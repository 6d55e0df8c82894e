# SPDX-License-Identifier: Apache-2.0
"""Print the table "preflight and torch's tracker" of docs/running.md: some minutes, no GPU.

VERL_PLATFORM=cpu .venv/bin/python tests/memory/table.py
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.memory_cases import CASES, line_of, row_of

if __name__ == "__main__":
    print("| experiment | model | GPUs | log-probs: preflight | tracker | update: preflight | tracker |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            print(line_of(case, row_of(case, Path(folder))), flush=True)
