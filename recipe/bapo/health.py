# SPDX-License-Identifier: Apache-2.0
"""Warnings where the bounds of a run do nothing for it, from the metrics of its last steps.

Limits and texts may be changed here. The console shows the warnings, and whoever has the metrics of ten steps can ask
for them: this module imports neither verl nor torch. Of a search the target is *already met* (no bound had to move),
*met by moving* the bounds, or *out of reach* at the widest bounds.
"""

from __future__ import annotations

from math import ceil, floor
from statistics import mean, median

WINDOW = 10  # steps
MAX_UNBOUNDED_SHARE = 0.1  # share of the gradient's size that tokens carry which no bound touches
ALREADY_MET = 0.95  # share of the updates in which the target was already met

Steps = list[dict[str, float]]


def health_warnings(steps: Steps, bounds_can_move: bool = True) -> dict[str, str]:
    """Warnings about the last ``WINDOW`` steps, by their kind; none while there are fewer steps.

    Args:
        steps: the metrics of each step so far, in order.
        bounds_can_move: whether the run's bounds can move; those of ``method=grpo`` cannot.
    """
    recent = steps[-WINDOW:]
    if len(recent) < WINDOW:
        return {}
    warnings = {
        "out_of_reach": _out_of_reach(recent),
        "already_met": _already_met(recent) if bounds_can_move else None,
        "unbounded": _unbounded(recent),
    }
    return {kind: text for kind, text in warnings.items() if text is not None}


def _out_of_reach(recent: Steps) -> str | None:
    if not all(step.get("actor/bapo/saturated") == 1 and step.get("actor/bapo/search_steps", 0) > 0 for step in recent):
        return None
    # rho at the widest bounds is the most that bounds can reach.
    reached = median(step["actor/bapo/positive_contribution"] for step in recent)
    in_reach = max(0.01, floor(100 * reached) / 100)
    return (
        f"the target was out of reach in every update of the last {WINDOW} steps, so the bounds stand at their "
        f"widest. They reached {reached:.3f}: positive_contribution_target={in_reach:g} is in "
        "reach of about half of such updates. What each target would do: docs/choosing.md."
    )


def _already_met(recent: Steps) -> str | None:
    share = mean(step.get("actor/bapo/met_at_once", 0.0) for step in recent)
    clips = any(step.get("actor/pg_clipfrac", 0.0) for step in recent)
    if share <= ALREADY_MET or not clips:  # where nothing is clipped, the data are fresh and no bound matters
        return None
    before = median(step["actor/bapo/positive_contribution_start"] for step in recent)
    next_target = min(0.99, ceil(100 * before) / 100)
    low, high = (mean(step[f"actor/bapo/clip_{side}"] for step in recent) for side in ("low", "high"))
    return (
        f"in {share:.0%} of the updates of the last {WINDOW} steps the target was already met, so the bounds stand "
        f"at their start [{low:.2f}, {high:.2f}], and BAPO is that fixed range. rho before the search was "
        f"{before:.3f}: with positive_contribution_target={next_target:g} bounds would move in about "
        "half of such updates. What each target would do: docs/choosing.md."
    )


def _unbounded(recent: Steps) -> str | None:
    share = mean(step.get("actor/bapo/negative_unbounded_share", 0.0) for step in recent)
    # A dual clip of 3 or less would clip every one of these tokens, and show in this metric.
    if share <= MAX_UNBOUNDED_SHARE or any(step.get("actor/pg_clipfrac_lower", 0.0) for step in recent):
        return None
    return (
        f"tokens with negative advantage and a ratio above 3 carried {share:.0%} of the gradient's "
        f"size in the last {WINDOW} steps, and neither a bound nor a dual clip limits them: consider "
        "actor_rollout_ref.actor.clip_ratio_c=3.0."
    )
