# SPDX-License-Identifier: Apache-2.0
"""Run the study on the language model. A run can be stopped at any time and resumed by its name.

    .venv/bin/python -m scripts.study list
    .venv/bin/python -m scripts.study run [NAME ...] [--threads 1]
    .venv/bin/python -m scripts.study table
    .venv/bin/python -m scripts.study figure
    MODEL_PATH=/models/mine .venv/bin/python -m scripts.study run

``run`` makes all runs of both stages that are not complete, one after the other, or those that you name. It uses a GPU
if there is one (not tried yet; VERL_PLATFORM=cpu prevents it). On a CPU start it once for each core, with ``--threads
1``: no two processes make the same run. Task and model come from ``recipe/bapo/language_model``. With MODEL_PATH
another model is warmed up for the same task and trained; its rows go to a folder of its own in runs/study. ``table``
and ``figure`` print and draw what docs/results/language_model.md shows.

After each rollout batch a run writes its rows to docs/results/language_model/NAME.parquet, and its state (weights,
optimizer, generator) to .cache/study/NAME.pt. The state has 12 bytes a parameter and is removed when the run is
complete. The same command resumes a stopped run. The plan is docs/dev/plan_language_model.md.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from scripts.study.figure import draw
from scripts.study.model import cache_of, warmed_up_model
from scripts.study.plan import PLANNED, ROWS, is_complete, runs_named
from scripts.study.tables import print_tables
from scripts.study.training import commit_of_this_process, make_run

STATES = Path(".cache/study")


def main() -> int:
    """List or train runs, or print the tables or draw the figure of those that are there. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run", "table", "figure"])
    parser.add_argument("names", nargs="*", help="for `run`: names (default: all runs of both stages)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    given = os.environ.get("MODEL_PATH")
    name = f"{Path(given).name}-{cache_of(given).name}" if given else ""  # two models may have the same folder name
    results, states = (Path("runs/study") / name if given else ROWS), STATES / name
    if arguments.command == "table":
        print_tables(results)
        return 0
    if arguments.command == "figure":
        picture = results.parent / f"{results.name}.png"  # a model's name may have a dot
        try:
            draw(results).savefig(picture, dpi=110)
        except ValueError as error:
            sys.exit(f"Error: {error}")
        print(f"Picture: {picture}")
        return 0
    if arguments.command == "list":
        for run in PLANNED:
            print("complete" if is_complete(run, results / f"{run.name}.parquet") else "to do   ", run.name)
        return 0
    runs = runs_named(arguments.names)  # before a model is warmed up
    torch.set_num_threads(arguments.threads)
    try:
        folder = warmed_up_model(given)
    except (ValueError, OSError) as error:
        prefix = f"MODEL_PATH={given} is not usable; give a folder with a model of Hugging Face: " if given else ""
        print(f"Error: {prefix}{error}", file=sys.stderr)
        return 1
    commit_of_this_process()
    for run in runs:
        make_run(run, folder, results, states)
    return 0


if __name__ == "__main__":
    sys.exit(main())
