# SPDX-License-Identifier: Apache-2.0
"""Warn about runs in which the search for bounds has no effect, judging by the metrics of some steps.

A search ends in one of three ways: the target is *met at the start* (no bound had to move), *met by moving* the
bounds, or not even met at the widest bounds: the search is *saturated*. You may change limits and texts here. Console
and worker ask for warnings after every ``WINDOW`` steps. This module imports neither verl nor torch.
"""

import logging
from math import ceil, floor
from statistics import fmean, mean, median

logger = logging.getLogger(__name__)

WINDOW = 10  # steps
MET_AT_START = 0.95  # warn if the target was met at the start in more than this share of the updates


def health_warnings(steps: list[dict[str, float]], bounds_can_move: bool, name: str = "steps") -> list[str]:
    """Return the warnings about some consecutive steps.

    Args:
        steps: the metrics of each step.
        bounds_can_move: whether the run's bounds can move; those of ``method=grpo`` cannot.
        name: what the warnings call a step, in the plural.
    """
    warnings, window = [], f"the last {len(steps)} {name}"

    def values_of(metric):
        return [step.get(f"actor/{metric}", 0.0) for step in steps]

    if bounds_can_move and min(values_of("bapo/saturated")) == 1:
        # No target above the rho at the widest bounds can be reached.
        reached = median(values_of("bapo/positive_contribution"))
        in_reach = max(0.01, floor(100 * reached) / 100)
        warnings.append(
            f"the search was saturated in every update of {window}, so the bounds stayed at their "
            f"widest. They reached {reached:.3f}: positive_contribution_target={in_reach:g} is in "
            "reach in about half of such updates. What each target would do: docs/choosing.md."
        )
    met_at_start = mean(values_of("bapo/met_at_start"))
    # If nothing is clipped, the data are fresh and no bound matters.
    if bounds_can_move and met_at_start > MET_AT_START and any(values_of("pg_clipfrac")):
        before = median(values_of("bapo/positive_contribution_start"))
        low, high = mean(values_of("bapo/clip_low")), mean(values_of("bapo/clip_high"))
        next_target = min(0.99, ceil(100 * before) / 100)
        warnings.append(
            f"in {met_at_start:.0%} of the updates of {window} the target was met at the start, so the bounds stayed "
            f"at their start [{low:.2f}, {high:.2f}], and BAPO acts as that fixed range. rho before the search was "
            f"{before:.3f}: with positive_contribution_target={next_target:g} bounds would move in about half of such "
            "updates. What each target would do: docs/choosing.md."
        )
    masked = mean(values_of("bapo/masked_token_fraction"))
    if masked > 0:
        warnings.append(
            f"{masked:.2g} of the tokens in {window} had no usable old log-prob (NaN, infinite, or above 0.5) and were "
            "left out of the search and the loss. With bypass_mode=true these log-probs come from vLLM."
        )
    return warnings


class HealthLog:
    """Logs the warnings of a training process; a run without our console shows no others.

    Args:
        bounds_can_move: as in ``health_warnings``.
    """

    def __init__(self, bounds_can_move: bool):
        self.bounds_can_move = bounds_can_move
        self.calls: list[dict[str, float]] = []  # metrics of the training calls since the last warnings

    def add(self, metrics: dict) -> None:
        """Add the metrics of one call of ``train_mini_batch``, and log warnings after every ``WINDOW`` calls.

        Args:
            metrics: a list of numbers by name, one for each update.
        """
        prefixes = ("actor/bapo/", "actor/pg_")
        self.calls.append({name: fmean(metrics[name]) for name in metrics if name.startswith(prefixes)})
        if len(self.calls) == WINDOW:
            for text in health_warnings(self.calls, self.bounds_can_move, "training calls"):
                logger.warning("BAPO: %s", text)
            self.calls.clear()
