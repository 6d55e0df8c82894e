# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of one run, or of several in the same panels.

    .venv/bin/python -m recipe.bapo.run.picture runs/a                              # runs/a/dynamics.png
    .venv/bin/python -m recipe.bapo.run.picture runs/grpo runs/bapo --out compare.png

The parent of a run draws its picture when it ends, in a process of its own. To change the panels, change ``PANELS``.
"""

import argparse
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.run import recipe
from recipe.bapo.run.files import PICTURE
from recipe.bapo.run.metrics import read_metrics

# Each panel by its title: its metrics, and how the legend names them. The second curve of a panel is dashed.
PANELS = {
    "Mean training reward": {"critic/rewards/mean": ""},
    "Entropy, nats a token": {"actor/entropy": ""},
    "Gradient norm before clipping": {"actor/grad_norm": ""},
    **recipe.PANELS,
    "Staleness": {
        "training/off_policy/trajectory_staleness/mean": "versions behind",
        "training/off_policy/trajectory_spans/mean": "versions in a response",
    },
}


@rc_context({"font.size": 12})
def picture(runs: list[Path]) -> Figure:
    """Draw runs, given as folders with ``metrics.jsonl``.

    Raises:
        ValueError: a run has no metrics.
    """
    steps_of = {run: [data for _, data in read_metrics(run) if "training/global_step" in data] for run in runs}
    for run, steps in steps_of.items():
        if not steps:
            raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
    figure = Figure(figsize=(13, 10), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(3, 3).flat, PANELS.items(), strict=True):
        for number, (run, steps) in enumerate(steps_of.items()):
            width = 1.6 if number else 2.4  # keeps the first run visible where lines coincide
            for (metric, curve), style in zip(curves.items(), ("-", "--"), strict=False):
                points = {data["training/global_step"]: data[metric] for data in steps if metric in data}
                label = ", ".join(word for word in (str(run) if len(runs) > 1 else "", curve) if word)
                axis.plot(list(points), list(points.values()), style, color=f"C{number}", linewidth=width, label=label)
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(framealpha=0.6)
    figure.supxlabel("training step")
    return figure


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
