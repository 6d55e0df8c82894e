# SPDX-License-Identifier: Apache-2.0
"""From the raw table to failures, primary tests and the tables of docs/results.md. The rules stand in its plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from scripts.study.plan import ABLATION, METHODS, TABLE

PANEL = ["map", "task", "optimizer", "norm_clip", "dual_clip"]
PLACE = [*PANEL, "source", "staleness", "learning_rate"]  # a cell but for its method
JUDGED_BY = ["task", "optimizer", "norm_clip", "learning_rate"]  # what a run shares with its control
TESTS = [("bapo@0.4", "grpo"), ("bapo@0.4", "widest")]
COMPARED = ["grpo", "widest", "bapo@0.4", "bapo@0.5", "bapo_gradient@0.4"]  # beside the ablation
LABELS = {**METHODS, **ABLATION}
MAP_NAMES = {
    ("A", "chain"): "A, protection",
    ("A", "reversal"): "A, never ending",
    ("B", "chain"): "B, epochs",
    ("C", "chain"): "C, delay",
    ("partial", "chain"): "C, partial rollout",
    ("ablation", "chain"): "B, ablation",
}


def read_table(path: Path = TABLE) -> pd.DataFrame:
    """The raw table with the column ``failed``; a clip that is off is 0."""
    return with_failures(pd.read_parquet(path).fillna({"norm_clip": 0, "dual_clip": 0}))


def with_failures(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with the columns ``control`` and ``failed``, by the rule that was fixed before the runs.

    A run failed if any of these holds: its final reward is below half of the mean one of the S=1 control with its task,
    optimizer, norm clip and learning rate; more than 20 % of the prompts were solved in under 2 % of the samples; over
    90 % of the responses never ended; a weight is not finite.

    Raises:
        ValueError: a run has no control.
    """
    controls = frame[(frame["map"] == "control") & (frame["method"] == "grpo")]
    control = controls.groupby(JUDGED_BY)["final_reward"].mean().rename("control")
    frame = frame.join(control, on=JUDGED_BY)
    if frame["control"].isna().any():
        raise ValueError(f"no control: {frame.loc[frame['control'].isna(), 'cell'].iloc[0]}")
    frame["failed"] = (
        (frame["final_reward"] < frame["control"] / 2)
        | (frame["unsolved"] > 0.2)
        | (frame["truncated"] > 0.9)
        | ~frame["finite"].astype(bool)
    )
    return frame


def sign_flip_test(differences: np.ndarray) -> float:
    """Two-sided p-value of paired differences: the share of all their 2^n sign patterns with a sum as far from 0."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return float((np.abs(sums) >= abs(sums[0]) - 1e-9).mean())


def by_seed(frame: pd.DataFrame, method: str, measure: str) -> pd.Series:
    """A measure of a method, averaged over the cells of ``frame``, for every seed."""
    return frame[frame["method"] == method].groupby("seed")[measure].mean().sort_index()


def compare(frame: pd.DataFrame, method: str, other: str, measure: str) -> dict[str, float]:
    """Both averages over seeds, their difference, and the p-value of the paired test."""
    first, second = by_seed(frame, method, measure), by_seed(frame, other, measure)
    if list(first.index) != list(second.index):
        raise ValueError(f"{method} and {other} have other seeds")
    p = sign_flip_test((first - second).to_numpy())
    return {"first": first.mean(), "second": second.mean(), "difference": (first - second).mean(), "p": p}


def stable_cells(frame: pd.DataFrame, methods: tuple[str, ...]) -> pd.DataFrame:
    """The rows of the cells in which no seed of these methods failed."""
    rows = frame[frame["method"].isin(methods)]
    return rows[~rows.groupby(PLACE)["failed"].transform("any")]


def of_map(frame: pd.DataFrame, map: str, task: str) -> pd.DataFrame:
    """The rows of one map; beside the ablation those that map B has in the same places."""
    rows = frame[(frame["map"] == map) & (frame["task"] == task)]
    if map == "ablation" and len(rows):
        place = ["source", "staleness", "learning_rate", "dual_clip"]
        compared = frame[(frame["map"] == "B") & frame["method"].isin(COMPARED)]
        rows = pd.concat([compared.merge(rows[place].drop_duplicates(), on=place), rows])
    return rows


def primary_tests(frame: pd.DataFrame) -> list[dict]:
    """For every map and pair of methods: the failing share, and the mean reward over the stable cells."""
    found = []
    for map, task in list(MAP_NAMES)[:-1]:
        rows = of_map(frame, map, task)
        for method, other in TESTS if len(rows) else ():
            entry = {"map": MAP_NAMES[map, task], "method": method, "other": other}
            failing = compare(rows, method, other, "failed")
            stable = stable_cells(rows, (method, other))
            reward = compare(stable, method, other, "mean_reward") if len(stable) else None
            cells = (stable.groupby(PLACE).ngroups, rows.groupby(PLACE).ngroups)
            found.append({**entry, "failing": failing, "reward": reward, "stable": cells})
    return found


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def primary_table(frame: pd.DataFrame) -> list[str]:
    """The primary tests as a table."""
    head = ["map", "BAPO 0.4 against", "failing share", "difference", "p"]
    head += ["mean reward, stable cells", "difference", "p", "stable cells"]
    lines = []
    for entry in primary_tests(frame):
        cells = [entry["map"], LABELS[entry["other"]]]
        for test, form in ((entry["failing"], "{:.3f}"), (entry["reward"], "{:.4f}")):
            values = ["-"] * 3
            if test:
                shares = f"{form} : {form}".format(test["first"], test["second"])
                values = [shares, f"{test['difference']:+.4f}", f"{test['p']:.2g}"]
            cells += values
        lines.append([*cells, "{} of {}".format(*entry["stable"])])
    return markdown(head, lines)


def in_order(frame: pd.DataFrame) -> list[str]:
    """The methods that the rows have, in the order of the plan."""
    return [method for method in LABELS if method in set(frame["method"])]


def panel_name(panel: tuple) -> str:
    """A panel's protections in words."""
    _, _, optimizer, norm_clip, dual_clip = panel
    norm = f"norm clip {norm_clip:g}" if norm_clip else "no norm clip"
    dual = f"dual clip {dual_clip:g}" if dual_clip else "no dual clip"
    return f"{'SGD' if optimizer == 'sgd' else 'AdamW'}, {norm}, {dual}"


def failing_table(frame: pd.DataFrame) -> list[str]:
    """Failing runs by method, over the learning rates and stalenesses of every panel."""
    rows = frame[frame["map"].isin(["A", "B", "C", "partial"])]
    panels = list(rows.groupby(PANEL, sort=False).groups)
    head = ["map", "panel", "runs a method", *(LABELS[method] for method in in_order(rows))]
    lines = []
    for panel in panels:
        chosen = rows[(rows[PANEL] == list(panel)).all(axis=1)]
        failed = chosen.groupby("method")["failed"].sum()
        runs = int(chosen.groupby("method").size().iloc[0])
        names = [MAP_NAMES[panel[0], panel[1]], panel_name(panel), str(runs)]
        lines.append([*names, *(str(int(failed[m])) if m in failed else "-" for m in in_order(rows))])
    return markdown(head, lines)


COLUMNS = {  # of the table of means: heading, column and form
    "failing": ("failed", "{:.2f}"),
    "final reward": ("final_reward", "{:.3f}"),
    "mean reward": ("mean_reward", "{:.3f}"),
    "updates to 0.8": ("updates_to_08", "{:.0f}"),
    "entropy": ("entropy", "{:.2f}"),
    "first guess right": ("first_right", "{:.2f}"),
    "largest/median norm": ("norm_ratio", "{:.1f}"),
    "effective sample": ("effective_sample", "{:.2f}"),
    "clipped +": ("clipped_positive", "{:.2f}"),
    "clipped -": ("clipped_negative", "{:.2f}"),
    "A<0, r>3": ("negative_above_3", "{:.4f}"),
    "their gradient": ("gradient_above_3", "{:.3f}"),
    "rho, value": ("rho_value", "{:.3f}"),
    "rho, gradient": ("rho_gradient", "{:.3f}"),
    "at once": ("at_once", "{:.2f}"),
    "on the way": ("on_the_way", "{:.2f}"),
    "out of reach": ("out_of_reach", "{:.2f}"),
}


def means_table(frame: pd.DataFrame) -> list[str]:
    """What was measured, averaged over a map; of the norms and the updates to 0.8 the median."""
    medians = ("norm_ratio", "updates_to_08")
    lines = []
    for method in in_order(frame):
        rows, cells = frame[frame["method"] == method], []
        for name, form in COLUMNS.values():
            # A run that never got there counts as later than all others.
            values = rows[name].fillna(np.inf) if name == "updates_to_08" else rows[name].dropna()
            value = values.median() if name in medians else values.mean()
            cells.append("-" if not np.isfinite(value) else form.format(value))
        lines.append([LABELS[method], *cells])
    return markdown(["method", *COLUMNS], lines)


def means_in_words(frame: pd.DataFrame, measure: str, form: str = "{:.2f}") -> str:
    """The mean of a measure of the methods of the primary tests, those that the rows have."""
    means = frame.groupby("method")[measure].mean()
    methods = [method for method in ("grpo", "widest", "bapo@0.4") if method in means]
    return ", ".join(f"{LABELS[method]} {form.format(means[method])}" for method in methods)


def control_line(frame: pd.DataFrame) -> str:
    """Whether all methods end with the same weights where every sample is new."""
    rows = frame[(frame["map"] == "control") & (frame["task"] == "chain")]
    place = rows[rows["method"] != "grpo"][JUDGED_BY].drop_duplicates()
    rows = rows.merge(place, on=JUDGED_BY)
    exact = rows[rows["method"] != "balance"]
    same = (exact.groupby("seed")["weights"].nunique() == 1).sum()
    return (
        f"Control: at staleness 1 the {exact['method'].nunique()} methods other than balance, which scales by design, "
        f"end with bit-identical weights in {same} of {exact['seed'].nunique()} seeds."
    )
