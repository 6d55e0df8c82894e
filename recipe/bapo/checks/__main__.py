# SPDX-License-Identifier: Apache-2.0
"""Check a config, what it reads and this machine, and print a table or JSON: exit code 0 or 1; no run is started.

    bash recipe/bapo/run_bapo_example.sh --preflight [--json] [key=value ...]
    python -m recipe.bapo.checks [--json] [--config-dir configs] [key=value ...]

Each line is ok, a warning, or failed; a failed one names the field, the value and the fix. The main job makes the same
checks before it starts Ray.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict

logging.disable(logging.INFO)  # verl announces its platform on import
import verl  # noqa: E402, F401  before anything of ours: it loads our plugin
from recipe.bapo.checks import table  # noqa: E402
from recipe.bapo.checks.composing import explain, resolve  # noqa: E402
from recipe.bapo.config import compose_config  # noqa: E402


def lines_of(overrides: list[str], groups: str | None) -> list[table.Line]:
    """All checks; a config that cannot be composed or resolved is the only line."""
    try:
        config = compose_config(overrides, groups)
        resolve(config, groups)
        return table.run(config, groups)
    except Exception as error:
        return [table.Line("config", "failed", explain(error, groups))]


def main() -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--config-dir", help="the folder with the groups size, experiment and method")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the main job")
    arguments = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")  # verl names the engines that are not installed
    with redirect_stdout(sys.stderr):  # verl prints while it validates
        lines = lines_of(arguments.overrides, arguments.config_dir)
    print(json.dumps([asdict(line) for line in lines], indent=1) if arguments.json else table.table(lines))
    return int(any(line.status == "failed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
