# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of one run, or of several over each other.

    .venv/bin/python -m recipe.bapo.plot runs/a                        # runs/a/dynamics.png
    .venv/bin/python -m recipe.bapo.plot GRPO=runs/g1,runs/g2 BAPO=runs/b1,runs/b2 --out compare.png

Runs joined by commas are seeds of one method: their mean is a line, their range a band.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402
from yaml import YAMLError  # noqa: E402

from recipe.bapo.records import CONFIG, PICTURE  # noqa: E402
from recipe.bapo.records.metrics import read_metrics  # noqa: E402

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
# From the Okabe-Ito palette, in an order whose lightness differs enough to tell in greyscale; line widths differ too.
COLOURS = ["#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00"]


def series(runs: list[Path], metric: str) -> tuple[list[int], list[list[float]]]:
    """Steps, and at each the values of the runs that have the metric there."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for step, data in read_metrics(run):
            if metric in data and "training/global_step" in data:
                values[step].append(data[metric])
    return sorted(values), [values[step] for step in sorted(values)]


def marks_of(run: Path) -> dict[str, dict[str, float]]:
    """Horizontal lines by panel, from the config of a run: the target and the ranges of the bounds.

    Empty where the run has no config, or one of another loss.

    Raises:
        ValueError: the config cannot be read.
    """
    path = run / CONFIG
    if not path.exists():
        return {}
    try:
        loss = OmegaConf.select(OmegaConf.load(path), "actor_rollout_ref.actor.policy_loss") or {}
        if "positive_contribution_target" not in loss:
            return {}
        marks = {
            "Positive contribution": {"target": float(loss.positive_contribution_target)},
            "Upper bound": _range(float(loss.ratio_upper_start), float(loss.ratio_upper_max)),
            "Lower bound": _range(float(loss.ratio_lower_start), float(loss.ratio_lower_max)),
        }
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not the config of a run ({error}): restore or remove it.") from error
    if "fixed" in marks["Upper bound"] and "fixed" in marks["Lower bound"]:
        del marks["Positive contribution"]  # nothing is searched
    return marks


def _range(start, maximum):
    return {"fixed": start} if start == maximum else {"start": start, "max": maximum}


def draw(methods: dict[str, list[Path]], out: Path) -> None:
    """Write the ``picture`` to a PNG."""
    figure = picture(methods)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def picture(methods: dict[str, list[Path]]) -> Figure:
    """The picture. Target and ranges are drawn as dotted lines where there is one method.

    Args:
        methods: the runs (folders with ``metrics.jsonl``) of each method, by its name.

    Raises:
        ValueError: a run has no metrics.
    """
    if len(methods) > len(COLOURS):
        raise ValueError(f"{len(methods)} methods in one picture: draw at most {len(COLOURS)}.")
    for run in (run for runs in methods.values() for run in runs):
        if not series([run], "critic/rewards/mean")[0]:
            raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
    marks = marks_of(next(iter(methods.values()))[0]) if len(methods) == 1 else {}
    figure, axes = plt.subplots(3, 3, figsize=(13, 10), constrained_layout=True)
    for axis, (title, label, curves) in zip(axes.flat, PANELS, strict=True):
        for (name, runs), colour, width in zip(methods.items(), COLOURS, (2.2, *5 * [1.6]), strict=False):
            for metric, part, style in curves:
                steps, values = series(runs, metric)
                means = [sum(at) / len(at) for at in values]
                text = ", ".join(word for word in (name if len(methods) > 1 else "", part) if word)
                axis.plot(steps, means, style, color=colour, linewidth=width, label=text or None)
                if len(runs) > 1:
                    axis.fill_between(steps, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15)
        for name, value in marks.get(title, {}).items():
            axis.axhline(value, color="0.4", linestyle=":", linewidth=1.8)
            axis.margins(y=0.15)
            axis.annotate(
                f"{name} {value:g}", (0.02, value), xycoords=("axes fraction", "data"), fontsize=11, va="bottom"
            )
        axis.set_title(title, fontsize=14)
        axis.set_xlabel("training step", fontsize=12)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(label, fontsize=12)
        axis.tick_params(labelsize=11)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=11, framealpha=0.6)
    return figure


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
