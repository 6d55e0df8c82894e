# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of one run, or of several over each other.

    .venv/bin/python -m recipe.bapo.plot runs/a                        # runs/a/dynamics.png
    .venv/bin/python -m recipe.bapo.plot GRPO=runs/g1,runs/g2 BAPO=runs/b1,runs/b2 --out compare.png

Runs joined by commas are seeds of one method: their mean is a line, their range a band. Panels may be
changed here alone; the launcher draws a run's picture at its end.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import pandas
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.records import PICTURE
from recipe.bapo.records.metrics import read_metrics

# The panels by their titles: metrics and what to call them; the second of a panel is dashed.
PANELS = {
    "Mean training reward": {"critic/rewards/mean": ""},
    "Entropy, nats a token": {"actor/entropy": ""},
    "Gradient norm before clipping": {"actor/grad_norm": ""},
    "Positive contribution rho": {
        "actor/bapo/positive_contribution": "at the bounds",
        "actor/bapo/positive_contribution_start": "start",
    },
    "Upper bound on the ratio": {"actor/bapo/clip_high": ""},
    "Lower bound on the ratio": {"actor/bapo/clip_low": ""},
    "Clipped tokens, share of their sign": {
        "actor/bapo/clipfrac_positive": "positive",
        "actor/bapo/clipfrac_negative": "negative",
    },
    "Shares: out of reach, resumed": {
        "actor/bapo/saturated": "updates out of reach",
        "training/off_policy/cut_fraction": "responses resumed",
    },
    "Staleness": {
        "training/off_policy/trajectory_staleness/mean": "versions behind",
        "training/off_policy/updates_per_rollout_batch": "updates a batch",
    },
}


def read_steps(runs: list[Path]) -> pandas.DataFrame:
    """The metrics of the training steps of some runs, a row for each step of each run.

    Raises:
        ValueError: a run has none.
    """
    rows = []
    for run in runs:
        steps = [data for _, data in read_metrics(run) if "training/global_step" in data]
        if not steps:
            raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
        rows += steps
    return pandas.DataFrame(rows)


@rc_context({"font.size": 12})
def picture(methods: dict[str, list[Path]]) -> Figure:
    """The picture.

    Args:
        methods: the runs (folders with ``metrics.jsonl``) of each method, by its name.

    Raises:
        ValueError: a run has no metrics.
    """
    tables = {name: read_steps(runs).groupby("training/global_step") for name, runs in methods.items()}
    figure = Figure(figsize=(13, 10), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(3, 3).flat, PANELS.items(), strict=True):
        for number, (name, steps) in enumerate(tables.items()):
            colour = f"C{number}"  # of matplotlib's own cycle
            width = 1.6 if number else 2.4  # of lines that coincide the first is still seen
            for (metric, curve), style in zip(curves.items(), ("-", "--"), strict=False):
                if metric not in steps.obj:
                    continue
                seeds = steps[metric].agg(["mean", "min", "max"]).dropna()
                label = ", ".join(word for word in (name if len(methods) > 1 else "", curve) if word)
                axis.plot(seeds["mean"], style, color=colour, linewidth=width, label=label or None)
                axis.fill_between(seeds.index, seeds["min"], seeds["max"], color=colour, alpha=0.15)
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(framealpha=0.6)
    figure.supxlabel("training step")
    return figure


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="a run's folder, or NAME=folder,folder,...")
    parser.add_argument("--out", type=Path, help="the picture (default: dynamics.png in the run's folder)")
    arguments = parser.parse_args()
    methods = defaultdict(list)
    for argument in arguments.runs:
        name, _, folders = argument.rpartition("=")
        methods[name or folders] += map(Path, folders.split(","))
    out = arguments.out or next(iter(methods.values()))[0] / PICTURE
    try:
        picture(methods).savefig(out, dpi=110)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
