# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of one run, or of several in the same panels.

    .venv/bin/python -m recipe.bapo.run.dynamics runs/a                              # runs/a/dynamics.png
    .venv/bin/python -m recipe.bapo.run.dynamics runs/grpo runs/bapo --out compare.png

The parent of a run draws its picture when it ends, in a process of its own. To change the panels, change ``PANELS``.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from recipe.bapo.host.files import PICTURE
from recipe.bapo.host.metrics import read_metrics, validation_reward
from recipe.bapo.run import bapo_run

STYLES: Any = ("-", "--")  # of the curves of a panel
VALIDATION = "validation"  # the mean over the data sources, which has no key of its own
# Each panel by its title: its metrics, and how the legend names them.
PANELS = {
    "Reward": {"critic/rewards/mean": "training, mean of the step", VALIDATION: "validation"},
    "Entropy, nats a token": {"actor/entropy": ""},
    "Gradient norm before clipping": {"actor/grad_norm": ""},
    **bapo_run.PANELS,
    "Staleness": {
        "training/off_policy/trajectory_staleness/mean": "versions behind",
        "training/off_policy/trajectory_spans/mean": "versions in a response",
    },
}


@rc_context({"font.size": 12})
def picture(runs: list[Path]) -> Figure:
    """Draw runs, given as folders with ``metrics.jsonl``, a color each.

    Raises:
        ValueError: a run has no metrics.
    """
    steps_of = {run: read_metrics(run) for run in runs}
    for run, steps in steps_of.items():
        if not any("training/global_step" in data for _, data in steps):
            raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
    figure = Figure(figsize=(13, 10.5), layout="constrained")
    axes = figure.subplots(math.ceil(len(PANELS) / 3), 3)
    for axis, (title, curves) in zip(axes.flat, PANELS.items(), strict=False):
        for number, steps in enumerate(steps_of.values()):
            width = 1.6 if number else 2.4  # keeps the first run visible where lines coincide
            for metric, style in zip(curves, STYLES, strict=False):
                points = points_of(steps, metric)
                marker = "o" if metric == VALIDATION else ""
                axis.plot(*points, style, marker=marker, color=f"C{number}", linewidth=width)
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if len(curves) > 1:
            pairs = zip(curves.values(), STYLES, strict=False)
            handles = [Line2D([], [], color="0.3", linestyle=style, label=name) for name, style in pairs]
            axis.legend(handles=handles, framealpha=0.6, fontsize=10)
    if len(runs) > 1:
        colors = [Patch(color=f"C{number}", label=name) for number, name in enumerate(names_of(runs))]
        figure.legend(handles=colors, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("training step")
    return figure


def points_of(steps: list[tuple[int, dict[str, float]]], metric: str) -> tuple[list[int], list[float]]:
    """Return the steps that logged a metric, and its values."""
    values = [(step, validation_reward(data) if metric == VALIDATION else data.get(metric)) for step, data in steps]
    logged = [(step, value) for step, value in values if value is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def names_of(runs: list[Path]) -> list[str]:
    """Return the paths of runs without the folders that all of them are in."""
    absolute = [run.absolute() for run in runs]
    shared = Path(os.path.commonpath([run.parent for run in absolute]))
    return [str(run.relative_to(shared)) for run in absolute]


def main():
    """Draw the runs that the arguments name into one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="the picture or its folder (default: the first run's)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.runs[0]
    out = out / PICTURE if out.is_dir() or not arguments.out else out
    try:
        picture(arguments.runs).savefig(out, dpi=110)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
