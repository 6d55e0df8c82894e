# SPDX-License-Identifier: Apache-2.0
"""Check a config, the files it names and this machine, and print a table. No run is started. Exit code 0 or 1.

    bash recipe/bapo/run_bapo_example.sh --preflight [key=value ...]
    python -m recipe.bapo.run.preflight [--config-dir configs] [key=value ...]

Each line is ok, a warning, or failed. A training run makes the same checks before it starts Ray.
"""

import argparse
import os
import sys
from contextlib import contextmanager


@contextmanager
def nothing_printed():
    """Send what libraries print to nowhere: verl, transformers and vLLM announce themselves on both streams."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def main() -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-dir", help="the folder with the groups size, experiment and method")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a training run")
    arguments = parser.parse_intermixed_args()
    with nothing_printed():
        from recipe.bapo.run.preflight.stages import run_preflight, table

        results = run_preflight(arguments.overrides, arguments.config_dir)
    print(table(results))
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
