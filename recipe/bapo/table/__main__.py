# SPDX-License-Identifier: Apache-2.0
"""Turn runs into a table with intervals, as markdown and csv, and into a picture for a paper.

    .venv/bin/python -m recipe.bapo.table runs/table/*                       # runs/table/grpo-1, runs/table/bapo-1, ...
    .venv/bin/python -m recipe.bapo.table grpo=/logs/a.jsonl grpo=/logs/b.jsonl dapo=/logs/c.jsonl --out paper

A run is a folder with metrics.jsonl, or a file of verl's own file logger (trainer.logger='[file]'). Runs of one method
are one row: METHOD=PATH names it, otherwise the name of the folder or file without a number at its end. docs/table.md
says what the columns mean.
"""

import argparse
import sys
from pathlib import Path

from recipe.bapo.table.picture import picture
from recipe.bapo.table.runs import by_method, read_runs
from recipe.bapo.table.statistics import cells
from recipe.bapo.table.tables import doubts, markdown, write_csv


def main():
    """Print the table of the runs that the arguments name, and write it, also as a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[METHOD=]RUN", help="a run's folder, or a file of verl's logger")
    parser.add_argument(
        "--baseline", help="the method that is subtracted from the others (default: grpo, if it is there)"
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for table.* (default: here)")
    arguments = parser.parse_args()
    try:
        methods = by_method(read_runs(arguments.runs))
        baseline = arguments.baseline or ("grpo" if "grpo" in methods else None)
        if baseline is not None and baseline not in methods:
            raise ValueError(f"--baseline {baseline} is not usable: the methods are {', '.join(methods)}.")
        found = list(cells(methods, baseline))
        if not found:
            named = ", ".join(methods)
            raise ValueError(f"the runs of {named} were validated at no common step: give them one trainer.test_freq.")
        text = markdown(found, baseline)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "table.md").write_text(text + "\n")
        with open(arguments.out / "table.csv", "w") as file:
            write_csv(found, file)
        drawn = picture(methods)
        for ending in ("pdf", "png"):
            drawn.savefig(arguments.out / f"table.{ending}", dpi=300)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(text)
    for doubt in doubts(methods):
        print(f"Note: {doubt}", file=sys.stderr)
    print(f"Written: {', '.join(str(arguments.out / f'table.{ending}') for ending in ('md', 'csv', 'pdf', 'png'))}")


if __name__ == "__main__":
    main()
