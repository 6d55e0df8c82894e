# SPDX-License-Identifier: Apache-2.0
"""Print the table of docs/running.md that holds preflight's memory against torch's tracker: some minutes, no GPU.

VERL_PLATFORM=cpu .venv/bin/python tests/memory/table.py
"""

import sys
import tempfile
from pathlib import Path


def main():
    """Print each line as it is known."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests)]
    from support.memory_cases import CASES, line_of, row_of

    print("| experiment | model | GPUs | log-probs: preflight | tracker | update: preflight | tracker |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            print(line_of(case, row_of(case, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
