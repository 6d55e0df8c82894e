# SPDX-License-Identifier: Apache-2.0
"""Do the anchors, a larger model and the real stack, say what the maps of small policies say? For docs/results.md.

Chosen before the anchors' data (2026-11-22): the cells of map B that they are held against, and what is compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from scripts.study.plan import RESULTS
from scripts.study.second.analysis import B_RATE, LABELS, TESTS, markdown

LOOP_RUNS, STACK_RUNS = RESULTS / "anchors_loop.jsonl", RESULTS / "anchors_stack.jsonl"
COLUMNS = {  # heading, column and form; rho is measured as the method's own search measures it
    "final reward": ("final_reward", "{:.3f}"),
    "mean reward": ("mean_reward", "{:.3f}"),
    "entropy at the end": ("entropy", "{:.2f}"),
    "largest/median norm": ("norm_ratio", "{:.1f}"),
    "own rho at the start": ("positive_contribution_start", "{:.3f}"),
    "own rho at the bounds": ("positive_contribution", "{:.3f}"),
    "clipped +": ("clipfrac_positive", "{:.2f}"),
    "clipped -": ("clipfrac_negative", "{:.2f}"),
    "out of reach": ("saturated", "{:.2f}"),
}


def read_runs(path: Path) -> pd.DataFrame:
    """A row a run: means of its series over training, but for the entropy, which is its last value."""
    rows = []
    for run in map(json.loads, path.read_text().splitlines()):
        series = {name: np.array(values, dtype=float) for name, values in run["series"].items()}
        norms = series["grad_norm"]
        rows.append(
            {name: np.nanmean(values) if np.isfinite(values).any() else np.nan for name, values in series.items()}
            | {key: run[key] for key in ("method", "seed", "final_reward")}
            | {
                "mean_reward": series["reward"].mean(),
                "entropy": series["entropy"][-1],
                "norm_ratio": norms.max() / np.median(norms[norms > 0]),
            }
        )
    return pd.DataFrame(rows)


def anchor_table(runs: pd.DataFrame) -> list[str]:
    """What was measured, averaged over seeds; "out of reach" only where there is a search."""
    lines = []
    for method in [name for name in (*LABELS, "control") if name in set(runs["method"])]:
        means = runs[runs["method"] == method].mean(numeric_only=True)
        if method == "control" or not method.startswith(("bapo", "authors")):
            means["saturated"] = np.nan
        cells = [form.format(means[name]) if np.isfinite(means[name]) else "-" for name, form in COLUMNS.values()]
        lines.append([LABELS.get(method, "GRPO, each sample used once"), *cells])
    return markdown(["method", *COLUMNS], lines)


def with_every_method(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds that every method has."""
    methods = runs.groupby("seed")["method"].nunique()
    return runs[runs["seed"].isin(methods.index[methods == runs["method"].nunique()])]


def differences(runs: pd.DataFrame, method: str, other: str, measure: str = "mean_reward") -> list[float]:
    """Method minus other, seed by seed."""
    first, second = (runs[runs["method"] == name].set_index("seed")[measure].sort_index() for name in (method, other))
    return (first - second).dropna().tolist()


def rank_correlation(runs: pd.DataFrame, frame: pd.DataFrame) -> tuple[float, int]:
    """Spearman's correlation of the methods' mean reward between anchors and map B, and the number of methods.

    Of map B: no dual clip, the middle learning rate, 4 and 16 epochs, between which the anchors' 8 lie.
    """
    cells = frame[(frame["map"] == "B") & (frame["dual_clip"] == 0)]
    cells = cells[(cells["learning_rate"] == B_RATE) & (cells["staleness"] > 1)]
    both = pd.concat(
        [part.groupby("method")["mean_reward"].mean() for part in (runs, cells)], axis=1, join="inner", keys=("a", "b")
    )
    return both["a"].corr(both["b"], method="spearman"), len(both)


def agreement(frame: pd.DataFrame, loop: Path = LOOP_RUNS, stack: Path = STACK_RUNS) -> list[str]:
    """The generated lines about the anchors: of those that were run."""
    lines = []
    for title, path in (("the example's model in one process", loop), ("the real stack", stack)):
        if not path.exists():
            continue
        runs = with_every_method(read_runs(path))
        seeds = ", ".join(map(str, sorted(runs["seed"].unique())))
        lines += [f"### Anchors: {title}", ""]
        lines += [f"Means over the seeds {seeds}. Mean reward: of all training rollouts.", "", *anchor_table(runs)]
        for method, other in TESTS:
            by_seed = ", ".join(f"{value:+.3f}" for value in differences(runs, method, other))
            lines += [f"Mean reward, {LABELS[method]} minus {LABELS[other]}, by seed: {by_seed}.", ""]
        if path == loop:
            correlation, methods = rank_correlation(runs, frame)
            lines += [
                f"Mean reward against map B's (4 and 16 epochs, learning rate {B_RATE:g}, no dual "
                f"clip): Spearman's rank correlation over {methods} methods {correlation:.2f}.",
                "",
            ]
    return lines
