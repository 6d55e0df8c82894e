# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/results.md from the third study's table and the runs of the real stack.

.venv/bin/python -m scripts.study.figures          # docs/results/*.png
"""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from scripts.study.analysis import against_grpo, at_place, interval, read_table  # noqa: E402
from scripts.study.plan import (  # noqa: E402
    DELAY,
    EPOCHS,
    HARD_EPOCHS,
    HARD_PARTIAL,
    LABELS,
    LARGER,
    PARTIAL,
    RESULTS,
    Place,
)

STACK = RESULTS / "anchors_stack.jsonl"  # the real stack: 8 epochs on the larger model, three seeds a method
COLOURS = {"grpo": "black", "bapo@0.4": "#0072B2", "widest": "#D55E00", "high_only": "#009E73"}  # Okabe-Ito


def draw_ratios(frame: pd.DataFrame) -> plt.Figure:
    """Updates to the target reward against GRPO by place, of the methods that were run there, and their failed runs."""
    places = [place for place in (EPOCHS, DELAY, PARTIAL, HARD_EPOCHS, HARD_PARTIAL, LARGER) if has(frame, place)]
    methods = {place: [name for name in LABELS if len(against_grpo(frame, place, name))] for place in places}
    rows = [len(methods[place]) for place in places]
    figure, axes = plt.subplots(
        len(places), 1, sharex=True, figsize=(7.5, 0.26 * sum(rows) + 0.5 * len(rows)), height_ratios=rows
    )
    for axis, place in zip(axes, places, strict=True):
        for row, method in enumerate(methods[place]):
            differences = against_grpo(frame, place, method)
            low, high = np.exp(interval(differences))
            failed = at_place(frame, place, method)["failed"]
            colour = COLOURS["bapo@0.4"] if method.startswith("bapo") else "black"
            axis.plot([low, high], [row, row], color=colour, linewidth=2)
            axis.plot(np.exp(differences.mean()), row, "o", color=colour, markersize=5)
            text = f"{failed.sum()} of {len(failed)}"
            axis.text(1.02, row, text, transform=axis.get_yaxis_transform(), fontsize=8, va="center")
        axis.axvline(1, color="0.4", linestyle="--", linewidth=1)
        axis.set(xscale="log", title=place.name, ylim=(len(methods[place]) - 0.4, -0.6))
        axis.set_yticks(range(len(methods[place])), [LABELS[method] for method in methods[place]], fontsize=9)
        axis.grid(axis="x", alpha=0.4)
    ticks = [0.25, 0.5, 1, 2, 4]
    axes[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[-1].minorticks_off()
    axes[-1].set_xlabel("updates to the target reward, GRPO = 1 (left: faster); on the right: failed runs")
    return figure


def has(frame: pd.DataFrame, place: Place) -> bool:
    """Whether BAPO was run at a place where fresh data are stable."""
    return len(at_place(frame, place)) > 0 and at_place(frame, place)["method"].str.startswith("bapo").any()


def draw_stack() -> plt.Figure:
    """Reward and entropy of the real stack, step by step."""
    runs = [json.loads(line) for line in STACK.read_text().splitlines()]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for axis, key in zip(axes, ("reward", "entropy"), strict=True):
        for method, label, style in (
            ("grpo", "GRPO [0.8, 1.2]", "--"),
            ("bapo@0.4", "BAPO, target 0.40", "-"),
            ("widest", "[0.9, 3.0]", ":"),
        ):
            series = np.array([run["series"][key] for run in runs if run["method"] == method])
            steps = range(1, series.shape[1] + 1)
            axis.plot(steps, series.mean(0), style, color=COLOURS[method], label=label)
            axis.fill_between(steps, series.min(0), series.max(0), color=COLOURS[method], alpha=0.12, linewidth=0)
        axis.set(xlabel="step of 32 updates", ylabel="training reward" if key == "reward" else "entropy, nats")
        axis.grid(alpha=0.4)
    axes[0].legend(frameon=False)
    return figure


def draw_drift(frame: pd.DataFrame) -> plt.Figure:
    """rho at GRPO's bounds over a run, by staleness, against the targets that were tried."""
    places = [(EPOCHS, (0.35, 0.4, 0.45)), (HARD_EPOCHS, (0.28, 0.38, 0.48)), (LARGER, (0.4, 0.47, 0.5))]
    places = [(place, targets) for place, targets in places if has(frame, place)]
    figure, axes = plt.subplots(1, len(places), sharey=True, figsize=(1 + 3.2 * len(places), 3.2), squeeze=False)
    for axis, (place, targets) in zip(axes[0], places, strict=True):
        rows = at_place(frame, place, "grpo")
        for staleness, style in zip(place.stalenesses, ("-", "--"), strict=False):
            series = np.stack(rows[rows["staleness"] == staleness]["rho_series"].to_list())
            updates = rows["updates"].iloc[0] / series.shape[1] * np.arange(1, series.shape[1] + 1)
            axis.plot(updates, series.mean(0), color="black", linestyle=style, label=f"{staleness} epochs")
            for edge in np.quantile(series, [0.1, 0.9], axis=0):
                axis.plot(updates, edge, color="0.5", linestyle=style, linewidth=0.8)
        for target in targets:
            axis.axhline(target, color=COLOURS["bapo@0.4"], linewidth=1)
            label = {"color": COLOURS["bapo@0.4"], "fontsize": 8, "va": "center"}
            axis.text(1.02, target, f"{target:.2f}", transform=axis.get_yaxis_transform(), **label)
        axis.set(title=place.name, xlabel="update")
        axis.legend(frameon=False, fontsize=8)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("rho at [0.8, 1.2]")
    return figure


def main():
    """Write the pictures."""
    frame = read_table()
    pictures = {
        "ratios": draw_ratios(frame),
        "rho_drift": draw_drift(frame),
        "real_stack": draw_stack(),
    }
    for name, figure in pictures.items():
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.png", dpi=110)
        plt.close(figure)
        print(f"Picture: {RESULTS / name}.png")


if __name__ == "__main__":
    main()
