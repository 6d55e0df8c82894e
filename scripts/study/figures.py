# SPDX-License-Identifier: Apache-2.0
"""The pictures of the second study, from the raw table; legible at half size and without colour."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from scripts.study.analysis import (  # noqa: E402
    LABELS,
    MAP_NAMES,
    PANEL,
    TESTS,
    in_order,
    means_in_words,
    panel_name,
    primary_tests,
)
from scripts.study.measures import PATH_PARTS, POINTS  # noqa: E402

STALENESS_NAMES = {"block": "updates a rollout", "epochs": "epochs", "delay": "updates of delay", "partial": "updates"}
# Colours of Okabe and Ito in rising lightness; with styles and markers they survive greyscale.
LINES = {
    "grpo": ("#000000", "-", "o"),
    "widest": ("#0072B2", "--", "s"),
    "bapo@0.4": ("#D55E00", "-.", "^"),
    "bapo_gradient@0.4": ("#009E73", ":", "v"),
    "high_only": ("#CC79A7", ":", "D"),
    "low_only": ("#8B4513", "--", "P"),
    "figure7_high": ("#E69F00", "--", "s"),
    "figure7_low": ("#56B4E9", ":", "^"),
    "topr": ("#777777", "-.", "x"),
    "balance": ("#56B4E9", ":", "*"),
}
TITLE, LABEL, TICK = 15, 13, 12


def save(figure, path: Path) -> None:
    """Write a picture without a date, so that the same table gives the same file."""
    figure.savefig(path, dpi=75, metadata={"Software": None})
    plt.close(figure)


def grid_of(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means of a measure: learning rates as rows from high to low, stalenesses as columns."""
    return rows.pivot_table(index="learning_rate", columns="staleness", values=measure).sort_index(ascending=False)


def draw_map(rows: pd.DataFrame, measure: str, title: str, path: Path, dark: tuple[float, float]) -> None:
    """One panel a method: ``measure`` by learning rate and staleness, with its number in every cell.

    Args:
        rows: of one panel of protections.
        dark: the values drawn white and darkest.
    """
    methods = in_order(rows)
    columns = min(5, len(methods))
    lines = -(-len(methods) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(7, 2.6 * columns), 2.75 * lines + 0.9), constrained_layout=True, squeeze=False
    )
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    for number, (axis, method) in enumerate(zip(axes.flat, methods, strict=False)):
        grid = grid_of(rows[rows["method"] == method], measure)
        shades = np.clip((grid.to_numpy() - dark[0]) / (dark[1] - dark[0]), 0, 1)
        axis.imshow(shades, cmap="Greys", vmin=0, vmax=1.15, aspect="auto")
        for (y, x), value in np.ndenumerate(grid.to_numpy()):
            colour = "white" if shades[y, x] > 0.6 else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=TITLE, color=colour)
        axis.set_title(LABELS[method], fontsize=TITLE, fontweight="bold" if method.startswith("bapo") else None)
        axis.set_xticks(range(len(grid.columns)), grid.columns, fontsize=TICK)
        axis.set_yticks(range(len(grid.index)), [f"{rate:g}" for rate in grid.index] if number % columns == 0 else [])
        axis.tick_params(labelsize=TICK, length=0)
    figure.suptitle(title, fontsize=TITLE + 2)
    figure.supxlabel(f"staleness ({STALENESS_NAMES[rows['source'].iloc[0]]})", fontsize=LABEL)
    figure.supylabel("learning rate", fontsize=LABEL)
    save(figure, path)


def draw_maps(frame: pd.DataFrame, folder: Path) -> list[tuple[str, str]]:
    """The stability map of every panel in which one run in twenty failed, and the speed map of every panel.

    Returns:
        The pictures' names and captions.
    """
    drawn = []
    for panel, rows in frame[frame["map"].isin(["A", "B", "C", "partial"])].groupby(PANEL, sort=False):
        kind, task, optimizer, norm_clip, dual_clip = panel
        name = f"{kind}-{task}-{optimizer}-norm{norm_clip:g}-dual{dual_clip:g}"
        about = f"Map {MAP_NAMES[kind, task]}: {panel_name(panel)}"
        seeds = rows["seed"].nunique()
        if rows["failed"].mean() >= 0.05:
            draw_map(
                rows, "failed", f"{about}\nshare of {seeds} seeds that fail", folder / f"failing-{name}.png", (0, 1)
            )
            means = means_in_words(rows, "failed")
            drawn.append(
                (f"failing-{name}", f"{about}. Share of {seeds} seeds that fail; darker is worse. Mean: {means}.")
            )
        draw_map(rows, "mean_reward", f"{about}\nmean reward over training", folder / f"speed-{name}.png", (1, 0.2))
        means = means_in_words(rows, "mean_reward", "{:.3f}")
        drawn.append((f"speed-{name}", f"{about}. Mean reward over training; darker is slower. Mean: {means}."))
    return drawn


def draw_summary(frame: pd.DataFrame, path: Path) -> None:
    """The primary tests as differences, filled where p < 0.05, and what the dual clip does to failures in map A."""
    entries = primary_tests(frame)
    maps = list(dict.fromkeys(entry["map"] for entry in entries))
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), constrained_layout=True, width_ratios=[1, 1, 0.9])
    for axis, kind in zip(axes, ("reward", "failing"), strict=False):
        for shift, (method, other) in zip((-0.15, 0.15), TESTS, strict=True):
            colour, _, marker = LINES[other]
            label = f"{LABELS[method]} minus {LABELS[other]}"
            for entry in (entry for entry in entries if entry["other"] == other and entry[kind]):
                place, test = maps.index(entry["map"]) + shift, entry[kind]
                face = colour if test["p"] < 0.05 else "white"
                axis.plot([0, test["difference"]], [place, place], color=colour, linewidth=2)
                axis.plot(test["difference"], place, marker, color=colour, markerfacecolor=face, markersize=10)
            axis.plot([], [], marker, color=colour, markersize=10, label=label)
        axis.axvline(0, color="black", linewidth=1)
        axis.set_yticks(range(len(maps)), maps if axis is axes[0] else [])
        axis.set_ylim(len(maps) - 0.5, -0.5)
        axis.locator_params(axis="x", nbins=5)
    protected = frame[frame["map"] == "A"].groupby(["method", "dual_clip"])["failed"].mean().unstack()
    methods = [method for method in ("grpo", "widest", "bapo@0.4") if method in protected.index]
    for number, clip in enumerate(protected.columns):
        place = np.arange(len(methods)) + 0.4 * (number - 0.5)
        name = f"dual clip {clip:g}" if clip else "no dual clip"
        colour, hatch = (("#E69F00", ""), ("#444444", "//"))[number]
        bars = axes[2].bar(
            place, protected.loc[methods, clip], 0.4, color=colour, hatch=hatch, edgecolor="white", label=name
        )
        axes[2].bar_label(bars, fmt="%.3f", fontsize=TICK)
    axes[2].margins(y=0.1)
    axes[2].set_xticks(range(len(methods)), [LABELS[method].replace(" [", "\n[") for method in methods])
    titles = ["mean reward (right: BAPO is faster)", "share that fails (left: BAPO is safer)"]
    titles.append("share that fails, map A, both tasks")
    finish(figure, axes, titles, "BAPO 0.4 against GRPO and against fixed wide bounds; filled: p < 0.05", path)


def course(axis, rows: pd.DataFrame, series: str, label: str, line: tuple, log: bool = False) -> None:
    """The median of a series over runs, and a band between its quartiles."""
    values = np.stack(rows[series].to_list()).astype(float)
    first = POINTS + 1 - values.shape[1]  # a probe comes before the first update, a window after it
    ends = rows["updates"].iloc[0] * np.arange(first, POINTS + 1) / POINTS
    colour, style, _ = line
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=0)
    axis.plot(ends, middle, style, color=colour, linewidth=2.5, label=label)
    axis.fill_between(ends, low, high, color=colour, alpha=0.12)
    axis.set_xlabel("update", fontsize=LABEL)
    axis.set_yscale("log" if log else "linear")


def finish(figure, axes, titles: list[str], title: str, path: Path) -> None:
    """Titles, ticks and one legend below, then the file."""
    handles, labels = [], []
    for axis, name in zip(axes, titles, strict=True):
        axis.set_title(name, fontsize=LABEL)
        axis.tick_params(labelsize=TICK)
        axis.grid(alpha=0.25)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
    figure.suptitle(title, fontsize=TITLE)
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=LABEL)
    save(figure, path)


def curves(frame: pd.DataFrame, methods: list[str], panels: dict[str, str], title: str, path: Path) -> None:
    """Series of several methods in one cell, a panel each; ``panels`` maps a column to its title."""
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.6), constrained_layout=True)
    for axis, series in zip(axes, panels, strict=True):
        for method in (name for name in methods if name in set(frame["method"])):
            rows = frame[frame["method"] == method]
            course(axis, rows, series, LABELS[method], LINES[method], log=series == "grad_norm_series")
    finish(figure, axes, list(panels.values()), title, path)


def draw_breaking(frame: pd.DataFrame, path: Path) -> None:
    """After the paper's Figure 2: GRPO's reward, entropy and gradient norm by staleness."""
    panels = {
        "reward_series": "reward",
        "entropy_series": "entropy (nats)",
        "grad_norm_series": "largest gradient norm",
    }
    lines = [("#9ECAE1", "-", ""), ("#3182BD", "--", ""), ("#08306B", ":", "")]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), constrained_layout=True)
    for axis, series in zip(axes, panels, strict=True):
        for line, (epochs, rows) in zip(lines, frame[frame["method"] == "grpo"].groupby("staleness"), strict=False):
            course(axis, rows, series, f"{epochs} epoch{'s' * (epochs > 1)}", line, log=series == "grad_norm_series")
    finish(figure, axes, list(panels.values()), "GRPO, by epochs a rollout (the paper's Figure 2)", path)


def draw_bounds(frame: pd.DataFrame, path: Path) -> None:
    """After the paper's Figure 8: mean bounds over training, and how the searches behind them ended."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), constrained_layout=True)
    methods = [method for method in ("bapo@0.4", "bapo_gradient@0.4") if method in set(frame["method"])]
    for number, method in enumerate(methods):
        rows = frame[frame["method"] == method]
        course(axes[0], rows, "c_high_series", LABELS[method], LINES[method])
        course(axes[1], rows, "c_low_series", LABELS[method], LINES[method])
        path_counts = np.stack(rows["search_path"].to_list()).sum(0)
        place = np.arange(PATH_PARTS + 2) + 0.4 * (number - 0.5)
        colour, hatch = LINES[method][0], ("", "//")[number]
        axes[2].bar(place, path_counts / path_counts.sum(), 0.4, color=colour, hatch=hatch, edgecolor="white")
    axes[2].set_xticks(
        [0, (PATH_PARTS + 1) / 2, PATH_PARTS + 1], ["at once,\n[0.6, 1.2]", "on its way", "out of reach,\n[0.9, 3.0]"]
    )
    titles = ["mean c_high", "mean c_low", "where the search stopped (share of updates)"]
    finish(figure, axes, titles, "The bounds that BAPO chose (the paper's Figure 8)", path)


def draw_by_staleness(frame: pd.DataFrame, methods: list[str], path: Path) -> None:
    """After the paper's Figure 11: methods by staleness."""
    panels = {"final_reward": "final reward", "mean_reward": "mean reward", "entropy": "entropy at the end (nats)"}
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), constrained_layout=True)
    for axis, measure in zip(axes, panels, strict=True):
        for method in methods:
            of_method = frame[frame["method"] == method].groupby("staleness")[measure].mean()
            colour, style, marker = LINES[method]
            axis.plot(of_method.index, of_method, style, marker=marker, color=colour, linewidth=2, label=LABELS[method])
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(frame["staleness"].unique()), sorted(frame["staleness"].unique()))
        axis.set_xlabel("epochs a rollout", fontsize=LABEL)
    finish(figure, axes, list(panels.values()), "Methods by staleness (the paper's Figure 11)", path)
