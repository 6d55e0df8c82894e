# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of one run, or of several over each other.

    .venv/bin/python -m recipe.bapo.plot runs/a                        # runs/a/dynamics.png
    .venv/bin/python -m recipe.bapo.plot GRPO=runs/g1,runs/g2 BAPO=runs/b1,runs/b2 --out compare.png

Runs joined by commas are seeds of one method: their mean is a line, their range a band. Panels may be
changed here alone; the launcher draws a run's picture at its end.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.records import PICTURE
from recipe.bapo.records.metrics import read_metrics

# Each panel: title, label of the y axis, and its curves (metric, name, line style).
PANELS = [
    ("Reward", "mean training reward", [("critic/rewards/mean", "", "-")]),
    ("Entropy", "nats a token", [("actor/entropy", "", "-")]),
    ("Gradient norm", "before clipping", [("actor/grad_norm", "", "-")]),
    (
        "Positive contribution",
        "rho = P / (P + N)",
        [
            ("actor/bapo/positive_contribution_start", "start", "--"),
            ("actor/bapo/positive_contribution", "at the bounds", "-"),
        ],
    ),
    ("Upper bound", "c_high on the ratio", [("actor/bapo/clip_high", "", "-")]),
    ("Lower bound", "c_low on the ratio", [("actor/bapo/clip_low", "", "-")]),
    (
        "Clipped tokens",
        "share of their sign",
        [("actor/bapo/clipfrac_positive", "positive", "-"), ("actor/bapo/clipfrac_negative", "negative", "--")],
    ),
    (
        "Out of reach, resumed",
        "share",
        [
            ("actor/bapo/saturated", "updates that missed the target", "-"),
            ("training/off_policy/cut_fraction", "responses cut and resumed", "--"),
        ],
    ),
    (
        "Staleness",
        "updates, weight versions",
        [
            ("training/off_policy/updates_per_rollout_batch", "updates per rollout batch", "--"),
            ("training/off_policy/trajectory_staleness/mean", "weight versions behind", "-"),
        ],
    ),
]
# From the Okabe-Ito palette, in an order whose lightness differs enough to tell in greyscale.
COLOURS = ["#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00"]


def read_steps(run: Path) -> list[dict[str, float]]:
    """The metrics of each training step of a run.

    Raises:
        ValueError: there is none.
    """
    steps = [data for _, data in read_metrics(run) if "training/global_step" in data]
    if not steps:
        raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
    return steps


def values_by_step(runs: list[list[dict[str, float]]], metric: str) -> dict[int, list[float]]:
    """At each step, in order, the values of the runs that have the metric there."""
    values = defaultdict(list)
    for data in (data for run in runs for data in run if metric in data):
        values[int(data["training/global_step"])].append(data[metric])
    return dict(sorted(values.items()))


def picture(methods: dict[str, list[Path]]) -> Figure:
    """The picture.

    Args:
        methods: the runs (folders with ``metrics.jsonl``) of each method, by its name.

    Raises:
        ValueError: a run has no metrics.
    """
    metrics = {name: [read_steps(run) for run in runs] for name, runs in methods.items()}
    figure = Figure(figsize=(13, 10), layout="constrained")
    for axis, (title, label, curves) in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        for number, (name, runs) in enumerate(metrics.items()):
            colour = COLOURS[number % len(COLOURS)]
            width = 1.6 if number else 2.4  # of lines that coincide the first is still seen
            for metric, part, style in curves:
                values = values_by_step(runs, metric)
                means = [sum(at) / len(at) for at in values.values()]
                text = ", ".join(word for word in (name if len(methods) > 1 else "", part) if word)
                axis.plot(list(values), means, style, color=colour, linewidth=width, label=text or None)
                if len(runs) > 1:
                    lowest, highest = map(min, values.values()), map(max, values.values())
                    axis.fill_between(list(values), list(lowest), list(highest), color=colour, alpha=0.15)
        axis.set_title(title, fontsize=14)
        axis.set_xlabel("training step", fontsize=12)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(label, fontsize=12)
        axis.tick_params(labelsize=11)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=11, framealpha=0.6)
    return figure


def draw(methods: dict[str, list[Path]], out: Path) -> None:
    """Write the ``picture`` to a file."""
    picture(methods).savefig(out, dpi=110)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="a run's folder, or NAME=folder,folder,...")
    parser.add_argument("--out", type=Path, help="the picture (default: dynamics.png in the run's folder)")
    arguments = parser.parse_args()
    methods = {}
    for argument in arguments.runs:
        name, _, folders = argument.rpartition("=")
        methods[name or Path(folders).name] = [Path(folder) for folder in folders.split(",")]
    out = arguments.out or Path(arguments.runs[0].rpartition("=")[2].split(",")[0]) / PICTURE
    try:
        draw(methods, out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
