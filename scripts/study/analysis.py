# SPDX-License-Identifier: Apache-2.0
"""Compute failures, primary tests and tables from the third study's raw table, by the rules of docs/dev/plan.md."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from scripts.study.plan import LABELS, METHODS, PLACES, TABLE, TASKS, Comparison, Place, comparisons

MARGIN = np.log(1 / 0.95)  # two methods are equivalent if their updates differ by less than 5 %
RESAMPLES = 10_000  # of the bootstrap
JUDGED_BY = ["task", "learning_rate"]  # a run and its control have these in common


def read_table(path: Path = TABLE) -> pd.DataFrame:
    """Read the raw table and add the columns of ``with_failures``. A dual clip that is off is 0."""
    return with_failures(pd.read_parquet(path).fillna({"dual_clip": 0}))


def with_failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the columns ``control``, ``failed``, ``stable`` and ``log_updates`` by the plan's rules.

    A run's control is the mean of GRPO on fresh data at the same task and learning rate. A run failed if one of these
    holds: its final reward is below half of its control's; its final reward is below its reward before the first
    update; a weight is not finite; or, on the retry task, more than a fifth of the prompts are solved in under 2 % of
    the samples. A learning rate is stable if no control failed. ``log_updates`` is the log of the updates to the target
    reward, or of all updates if the run failed or never reached the target.

    Raises:
        ValueError: a run has no control.
    """
    is_control = frame["source"] == "fresh"
    control = frame[is_control].groupby(JUDGED_BY)["final_reward"].mean().rename("control")
    frame = frame.join(control, on=JUDGED_BY)
    if frame["control"].isna().any():
        raise ValueError(f"no control: {frame.loc[frame['control'].isna(), 'cell'].iloc[0]}")
    forgot = (frame["task"] == "chain") & (frame["unsolved"] > 0.2)
    low = frame["final_reward"] < np.maximum(frame["control"] / 2, frame["start_reward"])
    frame["failed"] = low | forgot | ~frame["finite"].astype(bool)
    unstable = frame[is_control].groupby(JUDGED_BY)["failed"].any().rename("unstable")
    frame = frame.join(unstable, on=JUDGED_BY)
    frame["stable"] = ~frame.pop("unstable").astype(bool)
    updates = frame["updates_to_target"].where(~frame["failed"]).fillna(frame["updates"])
    frame["log_updates"] = np.log(updates.astype(float))
    return frame


def at_place(frame: pd.DataFrame, place: Place, method: str | None = None) -> pd.DataFrame:
    """Select the rows of a place, of one method or of all, at its learning rates where fresh data are stable."""
    rows = frame[
        (frame["task"] == place.task)
        & (frame["source"] == place.source)
        & frame["staleness"].isin(place.stalenesses)
        & (frame["dual_clip"] == (place.dual_clip or 0))
        & frame["stable"]
    ]
    if place.rates:
        rows = rows[rows["learning_rate"].isin(place.rates)]
    return rows if method is None else rows[rows["method"] == method]


def halves(seeds: pd.Index) -> list[pd.Index]:
    """Split the seeds into two halves: the sorted seeds go to them in turn."""
    ordered = seeds.sort_values()
    return [ordered[::2], ordered[1::2]]


def best_rates(rows: pd.DataFrame) -> dict[int, float]:
    """Choose the learning rate at which each seed is evaluated: the best of the other half of the seeds.

    The best rate has the lowest mean of ``log_updates``.

    Args:
        rows: the rows of one method at one place.
    """
    by_seed = rows.pivot_table(index="seed", columns="learning_rate", values="log_updates")
    first, second = halves(by_seed.index)
    pairs = ((first, second), (second, first))
    return {seed: by_seed.loc[chosen_on].mean().idxmin() for chosen_on, judged in pairs for seed in judged}


def at_best_rate(rows: pd.DataFrame, measure: str = "log_updates") -> pd.Series:
    """Average a measure of one method at one place over its stalenesses, by seed, at the rates of ``best_rates``."""
    rates = best_rates(rows)
    chosen = rows[rows["learning_rate"] == rows["seed"].map(rates)]
    return chosen.groupby("seed")[measure].mean().sort_index()


def by_seed(frame: pd.DataFrame, place: Place, method: str, measure: str) -> pd.Series:
    """Return a comparison's measure by seed: ``speed`` at the best rates, or ``failing`` over all stable rates."""
    rows = at_place(frame, place, method)
    return at_best_rate(rows) if measure == "speed" else rows.groupby("seed")["failed"].mean().sort_index()


def interval(differences: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean over seeds, always with the same random numbers."""
    if np.ptp(differences) == 0:
        return float(differences[0]), float(differences[0])
    found = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def p_value(differences: np.ndarray, claim: str) -> float:
    """Return p of a paired t-test (claim: difference), or of two one-sided ones against ``MARGIN`` (equivalence)."""
    if np.ptp(differences) == 0:  # equal differences have no spread, so there is no t statistic
        apart = abs(differences[0]) > (MARGIN if claim == "equivalence" else 0)
        return float(apart if claim == "equivalence" else not apart)
    if claim == "difference":
        return float(stats.ttest_1samp(differences, 0).pvalue)
    above = stats.ttest_1samp(differences, -MARGIN, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, MARGIN, alternative="less").pvalue
    return float(max(above, below))


def holm(values: list[float]) -> list[float]:
    """Adjust p-values by Holm's method."""
    values = np.array(values)
    order = values.argsort(kind="stable")
    adjusted = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1)
    found = np.empty(len(values))
    found[order] = adjusted
    return found.tolist()


def is_there(frame: pd.DataFrame, comparison: Comparison) -> bool:
    """Whether every cell of both methods is in the table."""
    place = comparison.place
    names = {cell.name for cell in place.cells([comparison.method, comparison.other])}
    return names <= set(frame["cell"])


def primary_tests(frame: pd.DataFrame, planned: list[Comparison] | None = None) -> pd.DataFrame:
    """Make one row for each primary test: the mean difference, its interval, p, and p after Holm's correction.

    A ``speed`` difference is a log ratio: below 0 the method needs fewer updates. ``both`` is the share of pairs in
    which both runs reached the target without failing, and ``conditional`` the difference over these pairs only. If
    cells of a test are missing, its row has no figures, and the test counts with p = 1 in Holm's correction. The
    correction is over all planned tests.
    """
    planned = comparisons() if planned is None else planned
    found = []
    for comparison in planned:
        place, method, other, measure = comparison.place, comparison.method, comparison.other, comparison.measure
        entry = {"place": place.name, "method": method, "other": other, "measure": measure, "claim": comparison.claim}
        if is_there(frame, comparison) and len(at_place(frame, place)):
            first, second = (by_seed(frame, place, name, measure) for name in (method, other))
            differences = (first - second).to_numpy()
            low, high = interval(differences)
            entry |= {"first": first.mean(), "second": second.mean(), "difference": differences.mean()}
            entry |= {"low": low, "high": high, "p": p_value(differences, comparison.claim)}
            if measure == "speed":
                entry |= conditional(frame, comparison)
        found.append(entry)
    columns = ["first", "second", "difference", "low", "high", "p", "both", "conditional"]
    table = pd.DataFrame(found).reindex(columns=["place", "method", "other", "measure", "claim", *columns])
    table["holm"] = holm(table["p"].fillna(1).tolist())
    return table


def conditional(frame: pd.DataFrame, comparison: Comparison) -> dict[str, float]:
    """Return the share of pairs in which both runs reached the target without failing, and their mean log ratio."""
    parts = []
    for name in (comparison.method, comparison.other):
        rows = at_place(frame, comparison.place, name)
        rows = rows[rows["learning_rate"] == rows["seed"].map(best_rates(rows))]
        reached = np.log(rows["updates_to_target"].astype(float)).where(~rows["failed"])
        parts.append(reached.set_axis(pd.MultiIndex.from_frame(rows[["seed", "staleness"]])))
    differences = parts[0].sub(parts[1])
    return {"both": differences.notna().mean(), "conditional": differences.mean()}


def control_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of GRPO on fresh data at every learning rate."""
    rows = []
    for (task, rate), part in frame[frame["source"] == "fresh"].groupby(JUDGED_BY):
        reward = f"{part['final_reward'].mean():.3f} ({part['final_reward'].min():.3f})"
        rows.append([TASKS[task], f"{rate:g}", f"{part['failed'].sum()} of {len(part)}", reward])
    return markdown(["task", "learning rate", "failed", "final reward (least)"], rows)


def against_grpo(frame: pd.DataFrame, place: Place, method: str) -> np.ndarray:
    """Return log(updates to the target / GRPO's) by seed, each method at its best rates; empty without data."""
    if not is_there(frame, Comparison(place, method, "grpo")) or at_place(frame, place).empty:
        return np.zeros(0)
    return (by_seed(frame, place, method, "speed") - by_seed(frame, place, "grpo", "speed")).to_numpy()


def ratio(differences: np.ndarray) -> str:
    """Format the mean of log ratios as a ratio with its interval."""
    if not len(differences):
        return "-"
    low, high = np.exp(interval(differences))
    return f"{np.exp(differences.mean()):.2f} [{low:.2f}, {high:.2f}]"


def ratio_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of updates to the target against GRPO, by method and place. Intervals are not corrected."""
    rows = []
    for method in LABELS:
        differences = [against_grpo(frame, place, method) for place in PLACES]
        if any(map(len, differences)) and method != "grpo":
            rows.append([LABELS[method], *map(ratio, differences)])
    return by_place(rows)


def failure_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of failed runs at stable learning rates, by method and place. "-" if a cell is missing."""
    rows, there = [], set(frame["cell"])
    for method in LABELS:
        parts = [
            at_place(frame, place, method)["failed"]
            if there.issuperset(cell.name for cell in place.cells([method]))
            else pd.Series(dtype=bool)
            for place in PLACES
        ]
        if any(map(len, parts)):
            rows.append([LABELS[method], *(f"{part.sum()} of {len(part)}" if len(part) else "-" for part in parts)])
    return by_place(rows)


def by_place(rows: list[list[str]]) -> list[str]:
    """Make a table with a column for each place at which something was run."""
    columns = zip(["method", *(place.name for place in PLACES)], *rows, strict=True)
    head, *rows = zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True)
    return markdown(head, rows)


def means_table(frame: pd.DataFrame, place: Place) -> list[str]:
    """Make a descriptive table: every method at its best rates, and means over all its runs, failed ones included."""
    head = ["method", "updates to target against GRPO", "best rates", "final reward", "entropy", "no gradient +"]
    head += ["no gradient -", "failing", "mean reward, all runs", "final reward, all runs"]
    rows = []
    for method in METHODS[place]:
        part = at_place(frame, place, method)
        differences = against_grpo(frame, place, method)
        if not len(differences):
            continue
        every = frame[(frame["method"] == method) & frame["cell"].isin({cell.name for cell in place.cells([method])})]
        best = [f"{at_best_rate(part, name).mean():.3f}" for name in ("final_reward", "entropy")]
        best += [f"{at_best_rate(part, f'no_gradient_{sign}').mean():.2f}" for sign in ("positive", "negative")]
        rates = sorted(set(best_rates(part).values()))
        overall = [f"{every[name].mean():.3f}" for name in ("mean_reward", "final_reward")]
        failing = f"{part['failed'].mean():.3f}"
        rows.append(
            [LABELS[method], ratio(differences), ", ".join(f"{rate:g}" for rate in rates), *best, failing, *overall]
        )
    return markdown(head, rows)


def primary_table(tests: pd.DataFrame) -> list[str]:
    """Make the table of the primary tests, with speeds as ratios of updates."""
    head = [
        "where",
        "method against",
        "measure",
        "difference",
        "95 % interval",
        "p",
        "Holm",
        "both got there",
        "ratio there",
    ]
    rows = []
    for test in tests.itertuples():
        against = f"{LABELS[test.method]} : {LABELS[test.other]}"
        names = [test.place, against, f"{test.measure}, {test.claim}"]
        if np.isnan(test.p):
            rows.append([*names, *["-"] * 6])
            continue
        speed = test.measure == "speed"
        difference, low, high = (np.exp(x) if speed else x for x in (test.difference, test.low, test.high))
        form = "{:.3f}" if speed else "{:+.3f}"
        figures = [form.format(difference), f"[{form.format(low)}, {form.format(high)}]"]
        figures += [f"{test.p:.2g}", f"{test.holm:.2g}"]
        figures += [f"{test.both:.2f}", f"{np.exp(test.conditional):.3f}"] if speed else ["-", "-"]
        rows.append([*names, *figures])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as Markdown lines."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def print_tables(path: Path = TABLE) -> None:
    """Print all tables as Markdown."""
    frame = read_table(path)
    lines = ["## Fresh data", "", *control_table(frame)]
    lines += ["## Updates to the target reward against GRPO", "", *ratio_table(frame)]
    lines += ["## Failed runs at stable learning rates", "", *failure_table(frame)]
    lines += ["## Primary tests", "", *primary_table(primary_tests(frame))]
    for place in PLACES:
        lines += [f"## {place.name}", "", *means_table(frame, place)]
    print("\n".join(lines))
