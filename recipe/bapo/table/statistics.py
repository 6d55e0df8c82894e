# SPDX-License-Identifier: Apache-2.0
"""Means and intervals of a method's runs. The intervals are 95 % intervals by Student's t, from scipy."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from recipe.bapo.table.runs import Measure, Run

CONFIDENCE = 0.95
NAN = math.nan


@dataclass(frozen=True)
class Cell:
    """A method's score in one measure, at one step.

    Attributes:
        at: ``last``, the last step that all runs of the method validated, or ``best``, the one with the highest mean@k.
        mean: over the runs.
        over_seeds: half of the interval over runs; NaN with one run.
        over_problems: half of the interval over problems, each the mean over runs and responses; NaN where the
            responses were not kept.
        difference, of_difference: the mean minus that of the baseline at its own last or best step, and half of its
            interval over runs (Welch); NaN for the baseline itself.
    """

    method: str
    measure: Measure
    at: str
    step: int
    runs: int
    mean: float
    over_seeds: float
    problems: int
    over_problems: float
    difference: float
    of_difference: float


def half_width(values: Sequence[float]) -> float:
    """Return half of the interval for the mean of independent values; NaN for fewer than two."""
    if len(values) < 2:
        return NAN
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))


def difference(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means, and half of its interval by Welch's test; NaN with one value on a side."""
    apart = float(np.mean(values) - np.mean(baseline))
    if min(len(values), len(baseline)) < 2:
        return apart, NAN
    interval = stats.ttest_ind(values, baseline, equal_var=False).confidence_interval(CONFIDENCE)
    return apart, float(interval.high - interval.low) / 2


def values_by_step(runs: Sequence[Run], measure: Measure) -> dict[int, list[float]]:
    """Return the values of all runs at each step that all of them validated."""
    found = [run.validations.get(measure, {}) for run in runs]
    return {step: [values[step] for values in found] for step in sorted(set.intersection(*map(set, found)))}


def cells(methods: dict[str, list[Run]], baseline: str | None) -> Iterator[Cell]:
    """Compute all cells, by measure and then by method.

    Args:
        methods: the runs of each method.
        baseline: the method from which the others are subtracted, or None.
    """
    measures = sorted({measure for runs in methods.values() for run in runs for measure in run.validations})
    for measure in measures:
        # The best step of a data set is that of its mean, for best@k and maj@k too: it stands for one checkpoint.
        by = next((one for one in measures if one.is_mean and one[:2] == measure[:2]), measure)
        series = {method: values_by_step(runs, measure) for method, runs in methods.items()}
        chosen = {method: _steps(values_by_step(methods[method], by), values) for method, values in series.items()}
        for method, steps in chosen.items():
            for at, step in steps.items():
                compared = None
                if baseline is not None and method != baseline and at in chosen[baseline]:
                    compared = series[baseline][chosen[baseline][at]]
                yield _cell(method, measure, at, step, series[method][step], methods[method], compared)


def _steps(values: dict[int, list[float]], known: dict[int, list[float]]) -> dict[str, int]:
    """Choose the last step, and the first of those with the highest mean, among steps that are also in ``known``."""
    means = {step: float(np.mean(of_runs)) for step, of_runs in values.items() if step in known}
    return {"last": max(means), "best": max(means, key=means.__getitem__)} if means else {}


def _cell(method, measure, at, step, values, runs, compared) -> Cell:
    of_problems = _problems(runs, measure, step)
    apart, of_apart = (NAN, NAN) if compared is None else difference(values, compared)
    return Cell(
        method=method,
        measure=measure,
        at=at,
        step=step,
        runs=len(values),
        mean=float(np.mean(values)),
        over_seeds=half_width(values),
        problems=len(of_problems),
        over_problems=half_width(of_problems),
        difference=apart,
        of_difference=of_apart,
    )


def validated_different_problems(runs: Sequence[Run], measure: Measure) -> bool:
    """Whether the runs have kept the responses to their last common validation, and not to the same problems."""
    found = [run.problems(measure, max(values_by_step(runs, measure))) for run in runs]
    return all(found) and any(one.keys() != found[0].keys() for one in found)


def _problems(runs: Sequence[Run], measure: Measure, step: int) -> list[float]:
    """Return the mean of each problem over all runs; empty if a run has not kept its responses."""
    found = [run.problems(measure, step) for run in runs]
    if any(one.keys() != found[0].keys() for one in found):
        return []
    return [float(np.mean([one[prompt] for one in found])) for prompt in found[0]]
