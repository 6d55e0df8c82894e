# SPDX-License-Identifier: Apache-2.0
"""Compute means and intervals of a method's runs. The intervals are 95 % intervals by Student's t, from scipy."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from recipe.bapo.table.runs import MEASURE, TrainingRun

CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Return half of the interval for the mean of independent values; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))


def half_width_of_difference(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Return half of the interval for the difference of two means, by Welch's test; NaN with one value on a side."""
    if min(len(values), len(baseline)) < 2:
        return math.nan
    interval = stats.ttest_ind(values, baseline, equal_var=False).confidence_interval(CONFIDENCE)
    return float(interval.high - interval.low) / 2


def average(methods: dict[str, list[TrainingRun]]) -> pd.DataFrame:
    """Average what the runs of each method logged, at the steps that all of them have.

    Returns:
        A row for each measure, method and step, sorted by measure and step, with methods in the order of ``methods``.
        Columns: ``MEASURE``, ``method``, ``step``, ``per_run`` (list of the runs' values), ``mean`` and ``over_seeds``
        (half of the interval over runs; NaN with one run).
    """
    logged = pd.concat([run.logged.assign(method=method) for method, runs in methods.items() for run in runs])
    logged["method"] = pd.Categorical(logged["method"], categories=list(methods))
    points = logged.groupby([*MEASURE, "method", "step"], observed=True)["value"].agg(list).reset_index(name="per_run")
    in_all_runs = [len(point.per_run) == len(methods[point.method]) for point in points.itertuples()]
    points = points[in_all_runs]
    return points.assign(mean=points["per_run"].map(np.mean), over_seeds=points["per_run"].map(half_width))


def compare(methods: dict[str, list[TrainingRun]], points: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Choose the last and the best step of each method in each measure, and subtract the baseline at that step.

    The last step is the last one that all runs of the method validated. The best one is the first of those with the
    highest mean@k, for best@k and maj@k too: it stands for one checkpoint.

    Args:
        methods: the runs of each method.
        points: their means, from ``average``.
        baseline: the method from which the others are subtracted, or None.

    Returns:
        A row for each measure, method and step so chosen, in the order of ``points``. Columns:

        - ``MEASURE``, ``method``, ``at`` (last or best), ``step``, ``runs`` (their number);
        - ``mean`` and ``over_seeds``, as in ``points``;
        - ``problems`` (their number) and ``over_problems``: half of the interval over problems, each the mean over
          runs and responses; 0 and NaN where a run has not kept the responses to the same problems;
        - ``difference``, ``of_difference``: the mean minus that of the baseline at the same step, and half of its
          interval over runs; NaN for the baseline, and where its runs did not all validate this step;
        - ``different_problems``: whether all runs have kept responses, and not to the same problems.

    Raises:
        ValueError: no method has a step that all its runs validated.
    """
    series = {key: of.set_index("step") for key, of in points.groupby([*MEASURE, "method"], observed=True)}
    rows = []
    for (data_set, variable, measure, method), own in series.items():
        if not measure:  # a curve of training
            continue
        mean_at_k = f"mean@{measure.removesuffix('/mean').partition('@')[2]}"
        by = series.get((data_set, variable, mean_at_k, method), own)["mean"].reindex(own.index)
        theirs = series.get((data_set, variable, measure, baseline)) if method != baseline else None
        for at, step in {"last": own.index[-1], "best": by.fillna(-math.inf).idxmax()}.items():
            point = own.loc[step]
            compared = theirs["per_run"].get(step) if theirs is not None else None
            problems = pd.DataFrame()  # (problems, runs), NaN where a run does not have the problem
            if measure == mean_at_k:
                kept = zip(methods[method], point["per_run"], strict=True)
                problems = pd.concat([run.problems(data_set, variable, step, mean) for run, mean in kept], axis=1)
            same = problems.notna().all(axis=None)
            rows.append(
                {
                    **point[[*MEASURE, "method"]],
                    "at": at,
                    "step": step,
                    "runs": len(point["per_run"]),
                    **point[["mean", "over_seeds"]],
                    "problems": len(problems) if same else 0,
                    "over_problems": half_width(problems.mean(axis=1)) if same else math.nan,
                    "difference": point["mean"] - np.mean(compared) if compared else math.nan,
                    "of_difference": half_width_of_difference(point["per_run"], compared) if compared else math.nan,
                    "different_problems": problems.notna().any().all() and not same,
                }
            )
    if not rows:
        named = ", ".join(methods)
        raise ValueError(f"the runs of {named} were validated at no common step: give them one trainer.test_freq.")
    return pd.DataFrame(rows)
