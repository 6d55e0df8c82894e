# SPDX-License-Identifier: Apache-2.0
"""What was measured of some updates, in a sentence: whether the numbers can be used, and what BAPO's bounds would do.

The worker and the report print it, and docs/monitor.md, "How to decide", says what may follow. All thresholds are here.
``verdict_inputs.py`` makes what it needs. This module imports neither verl nor torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

EVERY = 10  # calls of the worker from one verdict to the next
MAX_MASKED = 1e-3  # share of an update's tokens without a usable old log-prob above which a run with BAPO ends
MAX_FAR = 0.01  # share of the tokens with a ratio that is far from 1, in updates whose ratios should be 1
LEAST_UPDATES = 8  # with an advantage; fewer are not judged
NEARLY_NOTHING = 1e-3  # a loss that clips a smaller share of the tokens of each sign hardly clips
FORWARD = 0.3  # time of an extra forward pass as a share of an update's (docs/performance.md)
LOSS = "actor_rollout_ref.actor.policy_loss"
SIGNS = {">": "positive", "<": "negative"}
OUTCOMES = ("met_at_start", "met_by_moving", "saturated")
NOT_MEASURED = ("bound_scope",)  # options that a monitored run has and does not use


@dataclass(frozen=True)
class Verdict:
    """What was measured.

    Attributes:
        kind: ``unusable``: something is wrong with the numbers themselves. ``few``: too few updates. ``hardly clips``:
            the loss clips hardly any token of either sign. ``bounds``: what BAPO's bounds do, or would do.
        text: one or two sentences with the numbers.
        switch: lines to paste into the command of the run. With ``bounds`` those that switch BAPO on as it was
            measured, if any bounds would move, and in a run with BAPO those that go back to verl's loss.
    """

    kind: str
    text: str
    switch: tuple[str, ...] = ()


def judge(updates: Sequence[Mapping[str, float]], config: Any, about: Mapping, window: str) -> Verdict:
    """Judge what was measured.

    Args:
        updates: the metrics of each of some updates, in order, with those of ``verdict_inputs`` and of the record.
        config: the options of the search, a ``BAPOConfig``.
        about: what the first line of the record says of the run.
        window: what the texts call the updates, such as "this run".
    """
    applied = about.get("applied", False)
    measured = [update for update in updates if "met_at_start" in update]
    searched = [update for update in measured if any(update.get(name, 0) for name in OUTCOMES)]
    wrong = next(_what_is_wrong(updates, measured, searched), None)
    if wrong is not None:
        return Verdict("unusable", f"in {window} the numbers cannot be used: {wrong}.")
    if len(searched) < LEAST_UPDATES:
        number = f"{len(searched)} update{'' if len(searched) == 1 else 's'}"
        return Verdict("few", f"in {window} only {number} had an advantage, and {LEAST_UPDATES} are needed to judge.")
    clips = "capped" if (about.get("own_clip") or {}).get("kind") == "cap" else "clipped"
    unchecked = _what_was_not_checked(searched)
    clipped = clipped_by_bounds(searched) if applied else clipped_by_own_loss(searched)
    shares = "{} of the tokens with A > 0 and {} of those with A < 0".format(*map(percent, clipped or (0, 0)))
    if clipped is not None and max(clipped) < NEARLY_NOTHING:
        text = f"in {window} the loss {clips} hardly anything of either sign: {shares}.{unchecked}"
        return Verdict("hardly clips", text)
    at_start, moved, saturated = (fmean(update[name] for update in searched) for name in OUTCOMES)
    first, last = (
        f"[{getattr(config, f'ratio_lower_{end}'):g}, {getattr(config, f'ratio_upper_{end}'):g}]"
        for end in ("start", "max")
    )
    move, reaches, does = ("moved", "reached", "did") if applied else ("would move", "reaches", "does")
    target = f"the target {config.positive_contribution_target:g}"
    parts = [f"BAPO's bounds, with {target}, {move} in {percent(moved)} of the updates"]
    parts += [f"in {percent(at_start)} the first pair {first} {reaches} the target"] * (at_start > 0)
    parts += [f"in {percent(saturated)} no pair {does}, so that the last one, {last}, is taken"] * (saturated > 0)
    text = f"in {window} {'; '.join(parts)}."
    if clipped is not None:
        text += f" The loss {clips} {shares}."
    cost = cost_of_bounds(searched)
    if cost is not None and not applied:
        text += f" An update would take about {cost:.2f} times as long."
    switch = _way_back() if applied else _switch(config) if moved else ()
    return Verdict("bounds", text + unchecked, switch)


def clipped_by_own_loss(updates: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """Return the share of all tokens with A > 0 and of all with A < 0 that a loss other than BAPO's clips (or caps).

    None if it has no limits that are known here.

    Args:
        updates: as in ``judge``, each with an advantage.
    """
    if "clipped_positive" not in updates[0]:
        return None
    return _shares(updates, [[update[f"clipped_{sign}"] for update in updates] for sign in SIGNS.values()])


def clipped_by_bounds(updates: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the same shares for the bounds that the search found."""
    clipped = [[one[f"clipfrac_{sign}"] * one[f"{sign}_tokens"] for one in updates] for sign in SIGNS.values()]
    return _shares(updates, clipped)


def _shares(updates: Sequence[Mapping[str, float]], clipped: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Divide the clipped tokens of each sign by all tokens of that sign."""
    positive, negative = (
        sum(counts) / max(1, sum(update[f"{sign}_tokens"] for update in updates))
        for sign, counts in zip(SIGNS.values(), clipped, strict=True)
    )
    return positive, negative


def cost_of_bounds(updates: Sequence[Mapping[str, float]]) -> float | None:
    """Estimate how many times as long an update takes with exact bounds; None if the updates do not have the values.

    In a monitored run it is what BAPO would have cost.
    """
    measured = [update for update in updates if "redone" in update]
    if not measured:
        return None
    return 1 + fmean(FORWARD * update["extra_forward"] + update["redone"] for update in measured)


def far_from_1(updates: Sequence[Mapping[str, float]]) -> float | None:
    """Return the share of the tokens with an advantage whose ratio is far from 1; None if that is not known."""
    known = [update for update in updates if "far_from_1" in update]
    if not known:
        return None
    tokens = sum(update["positive_tokens"] + update["negative_tokens"] for update in known)
    return sum(update["far_from_1"] for update in known) / max(1, tokens)


def percent(share: float) -> str:
    """Format a share. Small shares keep two digits, so that 0.02% is not 0.0%."""
    return f"{100 * share:{'.1f' if share == 0 or share >= 0.01 else '.2g'}}%"


def _what_is_wrong(
    updates: Sequence[Mapping[str, float]],
    measured: Sequence[Mapping[str, float]],
    searched: Sequence[Mapping[str, float]],
) -> Iterator[str]:
    """Yield what is wrong with the numbers themselves, the most basic first."""
    invalid = sum(update.get("invalid_tokens", 0.0) for update in updates)
    if invalid:
        bad = [update for update in updates if update.get("invalid_tokens")]
        step = f" (first in step {bad[0]['step']:.0f})" if "step" in bad[0] else ""
        yield f"{invalid:.0f} log-probs or advantages were not finite, in {len(bad)} of {len(updates)} updates{step}"
    masked = [update.get("masked_token_fraction", 0.0) for update in measured]
    unusable = sum(share > MAX_MASKED for share in masked)
    if unusable:
        yield (
            f"in {unusable} of {len(measured)} updates the old log-probs of more than {MAX_MASKED:.1%} of the response "
            f"tokens were NaN, infinite or above 0.5 (at most of {percent(max(masked))}); BAPO's loss ends a run there"
        )
    same_weights = [update for update in searched if update.get("on_policy") == 1]
    far = far_from_1(same_weights)
    if far is not None and far > MAX_FAR:
        yield (
            f"the same weights had computed the old log-probs of {len(same_weights)} updates, so all their ratios "
            f"should be 1, but {percent(far)} of their tokens with an advantage had one above 1.2 or below 0.83"
        )
    norms = [update["grad_norm"] for update in searched if "grad_norm" in update]
    if norms and not any(norms):
        yield f"the gradient norm was exactly 0 in all {len(norms)} updates with an advantage, so they trained nothing"


def _what_was_not_checked(searched: Sequence[Mapping[str, float]]) -> str:
    """Say that no trainer told where the ratios must be 1, and how far they were where they may have to be."""
    if any("on_policy" in update for update in searched):
        return ""
    far = far_from_1([update for update in searched if update.get("update") == 0])
    seen = "" if far is None else f" (in first updates on a rollout batch {percent(far)} were above 1.2 or below 0.83)"
    return f" That all ratios are 1 where they must be was not checked, because this trainer does not say where{seen}."


def _switch(config: Any) -> tuple[str, ...]:
    """Return the lines that train with BAPO as it was measured: every option that is not at its default is in them."""
    changed = [option.name for option in fields(config) if getattr(config, option.name) != option.default]
    return (
        f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        f"{LOSS}.loss_mode=bapo",
        *(f"++{LOSS}.{name}={getattr(config, name)}" for name in changed if name not in NOT_MEASURED),
    )


def _way_back() -> tuple[str, ...]:
    """Return the lines with which a run with BAPO goes on with verl's default loss, and is still measured."""
    return f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig", f"{LOSS}.loss_mode=vanilla"
