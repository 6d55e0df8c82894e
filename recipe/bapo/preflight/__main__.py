# SPDX-License-Identifier: Apache-2.0
"""Check the command of a run, the files it names and this machine, and print a table. No run is started.

    python -m recipe.bapo.preflight ARGUMENTS     those of python -m verl.trainer.main_ppo, with BAPO's lines or not
    python -m recipe.bapo.preflight --config-name bapo_trainer ARGUMENTS             those of recipe.bapo.main_bapo
    bash recipe/bapo/run_bapo_example.sh --preflight [key=value ...]

Each line is ok, a warning, failed, or skipped where nothing was looked at. The exit code is 1 if a line failed, 2 if
nothing was checked, else 0. Our trainer makes the same checks before it starts Ray; preflight=false
leaves them out.
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
    """Check the command that the arguments give, and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", "-cn", dest="name", default="ppo_trainer", help="of the config (ppo_trainer)")
    parser.add_argument("--config-path", "-cp", dest="folder", help="the folder of that config (verl's, or ours)")
    parser.add_argument("--config-dir", "-cd", dest="groups", help="a folder with further groups, such as configs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a training run")
    arguments = vars(parser.parse_intermixed_args())
    with nothing_printed():
        from recipe.bapo.hook.verl_version import RUN_WITH, verl_version

        missing = ""
        try:
            from recipe.bapo.preflight.stages import run_preflight, table
        except ImportError as error:
            missing = str(error)
        results = [] if missing else run_preflight(**arguments)
    if missing:
        print(
            f"skipped  versions         nothing was checked, because verl {verl_version()} lacks what preflight and "
            f"our trainer need ({missing}); {RUN_WITH}."
        )
        return 2
    print(table(results))
    if all(result.status == "skipped" for result in results):
        return 2
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
