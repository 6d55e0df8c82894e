# SPDX-License-Identifier: Apache-2.0
"""Check a config, the files it names and this machine, and print a table or JSON. No run is started. Exit code 0 or 1.

    bash recipe/bapo/run_bapo_example.sh --preflight [--json] [key=value ...]
    python -m recipe.bapo.run.preflight [--json] [--config-dir configs] [key=value ...]

Each line is ok, a warning, or failed. A failed one names the field, the value and the fix. A training run makes the
same checks before it starts Ray.
"""

import argparse
import json
import logging
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict

if __name__ == "__main__":
    logging.disable(logging.INFO)  # verl announces its platform on import
from recipe.bapo.run.preflight.preflight import run_preflight, table  # noqa: E402


def main() -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--config-dir", help="the folder with the groups size, experiment and method")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a training run")
    arguments = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")  # verl names the engines that are not installed
    with redirect_stdout(sys.stderr):  # verl prints while it validates
        lines = run_preflight(arguments.overrides, arguments.config_dir)
    print(json.dumps([asdict(line) for line in lines], indent=1) if arguments.json else table(lines))
    return int(any(line.status == "failed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
