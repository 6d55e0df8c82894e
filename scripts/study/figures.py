# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/results from the stored runs.

.venv/bin/python -m scripts.study.figures          # docs/results/*.png
"""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from scripts.study.analysis import against_grpo, at_best_rate, at_place, read_table  # noqa: E402
from scripts.study.language_model import ROWS  # noqa: E402
from scripts.study.language_model_tables import METHOD_NAMES, runs_of_whole_seeds  # noqa: E402
from scripts.study.plan import (  # noqa: E402
    EPOCHS,
    HARD_EPOCHS,
    LABELS,
    LARGER,
    RESULTS,
    Place,
)

STACK = RESULTS / "anchors_stack.jsonl"  # the real stack: 8 epochs on the larger model, three seeds a method
# Methods of the overview, and the offsets of their labels from their dots in points.
OVERVIEW = {
    "grpo": (-30, 10),
    "clip_higher": (-20, -34),
    "high_only": (8, -14),
    "bapo@0.4": (8, 2),
    "gspo": (8, 0),
    "topr": (8, 0),
    "dppo_tv": (8, 0),
}
COLOURS = {"grpo": "black", "bapo@0.4": "#0072B2", "widest": "#D55E00", "high_only": "#009E73"}  # Okabe-Ito
LINE_STYLES = {
    "high_only": ("#009E73", "-."),
    "bapo": ("#0072B2", "-"),
    "grpo": ("black", "--"),
    "gspo": ("#D55E00", ":"),
}


def draw_overview(frame: pd.DataFrame) -> plt.Figure:
    """Draw how fast each method learns the retry task with epochs, its entropy at the end, and its failed runs."""
    figure, axis = plt.subplots(figsize=(7.5, 5))
    for method, offset in OVERVIEW.items():
        rows = at_place(frame, EPOCHS, method)
        speed = np.exp(against_grpo(frame, EPOCHS, method).mean()) if method != "grpo" else 1.0
        entropy = at_best_rate(rows, "entropy").mean()
        colour = COLOURS["bapo@0.4"] if method.startswith("bapo") else "black"
        axis.plot(speed, entropy, "o", color=colour, markersize=9)
        text = f"{LABELS[method]}\n{rows['failed'].sum()} of {len(rows)} runs failed"
        axis.annotate(text, (speed, entropy), offset, textcoords="offset points", color=colour, fontsize=10)
    axis.set(xlabel="updates to the target reward, GRPO = 1 (left is faster)")
    axis.set(
        ylabel="entropy at the end, nats (up keeps more)", title="Small networks, the retry task with 4 or 16 epochs"
    )
    axis.set(xlim=(0.33, 1.22), ylim=(0.6, 2.0))
    axis.grid(alpha=0.4)
    return figure


def has(frame: pd.DataFrame, place: Place) -> bool:
    """Whether BAPO was run at a place where fresh data are stable."""
    return len(at_place(frame, place)) > 0 and at_place(frame, place)["method"].str.startswith("bapo").any()


def draw_stack() -> plt.Figure:
    """Draw reward and entropy of the real stack, step by step."""
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
    """Draw rho at GRPO's bounds over a run, by staleness, with the targets that were tried."""
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


def draw_language_model() -> plt.Figure:
    """Draw held-out reward and entropy of the language model by method: a thin line a seed, a thick one their mean."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    runs = [(run, pd.read_parquet(ROWS / f"{run.name}.parquet")) for run in runs_of_whole_seeds()]
    for method, (colour, style) in LINE_STYLES.items():
        of_method = [rows for run, rows in runs if run.method == method]
        rewards = [[rows["held_out_before"].iloc[0], *rows["held_out_reward"].dropna()] for rows in of_method]
        entropies = [rows.groupby("rollout")["entropy"].mean() for rows in of_method]
        for axis, lines, first in ((axes[0], rewards, 0), (axes[1], entropies, 1)):
            batches = range(first, first + len(lines[0]))
            for line in lines:
                axis.plot(batches, line, style, color=colour, linewidth=0.8, alpha=0.5)
            axis.plot(batches, np.mean(lines, 0), style, color=colour, linewidth=2.2, label=METHOD_NAMES[method])
    axes[0].set(ylabel="held-out reward", title="share of 512 answers that are right")
    axes[1].set(ylabel="entropy, nats a token", title="entropy, mean of 16 updates", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="rollout batch, 16 updates each", xticks=range(5))
        axis.grid(alpha=0.4)
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def main():
    """Write the pictures."""
    frame = read_table()
    pictures = {
        "overview": draw_overview(frame),
        "rho_drift": draw_drift(frame),
        "real_stack": draw_stack(),
        "language_model": draw_language_model(),
    }
    for name, figure in pictures.items():
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.png", dpi=110)
        plt.close(figure)
        print(f"Picture: {RESULTS / name}.png")


if __name__ == "__main__":
    main()
