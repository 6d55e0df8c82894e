# SPDX-License-Identifier: Apache-2.0
"""Turn runs into a table with intervals, as markdown and csv, and into a picture for a paper.

    .venv/bin/python -m recipe.bapo.table runs/table/*            # runs/table/grpo-seed1, runs/table/bapo-seed1, ...
    .venv/bin/python -m recipe.bapo.table grpo=/logs/a.jsonl grpo=/logs/b.jsonl dapo=/logs/c.jsonl --out paper

A run is a folder with metrics.jsonl, or a file of verl's own file logger (trainer.logger='[file]'). Runs of one method
are one row: METHOD=PATH names it, otherwise the name of the folder or file without a seed at its end, such as -seed3.
docs/table.md says what the columns mean.
"""

import argparse
import sys
from pathlib import Path

from recipe.bapo.table.curves import draw_curves
from recipe.bapo.table.runs import read_methods
from recipe.bapo.table.scores import average, compare
from recipe.bapo.table.tables import doubts, markdown


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
        methods = read_methods(arguments.runs)
        baseline = arguments.baseline or ("grpo" if "grpo" in methods else None)
        if baseline is not None and baseline not in methods:
            raise ValueError(f"invalid --baseline {baseline}: the methods are {', '.join(methods)}.")
        points = average(methods)
        scores = compare(methods, points, baseline)
        text = markdown(scores, baseline)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "table.md").write_text(text + "\n")
        scores.drop(columns="different_problems").to_csv(arguments.out / "table.csv", index=False)
        drawn = draw_curves(points)
        for ending in ("pdf", "png"):
            drawn.savefig(arguments.out / f"table.{ending}", dpi=300)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(text)
    for doubt in doubts(methods, scores):
        print(f"Note: {doubt}", file=sys.stderr)
    print(f"Written: {', '.join(str(arguments.out / f'table.{ending}') for ending in ('md', 'csv', 'pdf', 'png'))}")


if __name__ == "__main__":
    main()
