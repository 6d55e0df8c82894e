# SPDX-License-Identifier: Apache-2.0
"""From the second study's table to what docs/results.md says of it. Its code stands in the history, at 4b93ff6."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from scripts.study.plan import RESULTS

TABLE = RESULTS / "second_study.parquet"
METHODS = {  # the name in tables and pictures, by the name in configs/method
    "grpo": "GRPO [0.8, 1.2]",
    "clip_higher": "clip-higher [0.8, 1.28]",
    "low_only": "[0.9, 1.2]",
    "figure7_low": "[0.5, 1.2]",
    "figure7_high": "[0.8, 1.5]",
    "high_only": "[0.8, 3.0]",
    "widest": "[0.9, 3.0]",
    "bapo@0.4": "BAPO 0.4",
    "bapo@0.5": "BAPO 0.5",
    "bapo_gradient@0.4": "BAPO gradient 0.4",
    "authors_code": "authors' code",
    "topr": "TOPR",
    "balance": "balance, no clips",
}
ABLATION = {  # of map B, beside bapo@0.4, bapo@0.5 and bapo_gradient@0.4
    "bapo@0.35": "BAPO 0.35",
    "bapo@0.45": "BAPO 0.45",
    "bapo_gradient@0.35": "BAPO gradient 0.35",
    "bapo_gradient@0.45": "BAPO gradient 0.45",
    "bapo_gradient@0.5": "BAPO gradient 0.5",
    "paper_octothinker@0.4": "BAPO 0.4 in 0.8..0.9, 1.2..2.0",
    "bapo@0.4,ratio_lower_start=0.8,ratio_lower_max=0.8": "BAPO 0.4 in 0.8, 1.2..3.0",
    "bapo@0.4,ratio_upper_max=1.2": "BAPO 0.4 in 0.6..0.9, 1.2",
}
B_RATE = 1.6e-2  # map B's middle learning rate

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
