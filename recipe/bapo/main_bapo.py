# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO: ``python -m recipe.bapo.main_bapo [--config-dir configs] [key=value ...]``.

This is verl's entry point with our checks in front (``preflight=false`` leaves them out). ``python -m recipe.bapo.run``
takes the same arguments; it starts this command as a child, shows its progress and cleans up after it.
"""

import os
import sys

import hydra

from recipe.bapo.hook.verl_version import RUN_WITH, verl_version

try:
    from recipe.bapo.config.errors import ERRORS, explain
    from recipe.bapo.run import train
except ImportError as error:
    sys.exit(f"Error: verl {verl_version()} lacks what our trainer needs ({error}): use verl 0.9.1; {RUN_WITH}.")


@hydra.main(config_path="config", config_name="bapo_trainer", version_base=None)
def main(config):
    """Check the config and train; exit with code 1 if anything fails."""
    train.main(config)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    try:
        main()
    except ERRORS as error:
        train.give_up(explain(error))
