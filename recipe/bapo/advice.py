# SPDX-License-Identifier: Apache-2.0
"""What to do next in a run, in a few sentences, judging by the figures of some updates.

The worker and the report print it. All thresholds are here, and you may change them and the texts. A search ends in one
of three ways: the target is *met at the start* (no bound has to move), *met by moving* the bounds, or the search is
*saturated*: no pair of bounds on its path reaches the target. ``figures.py`` makes the figures. This module imports
neither verl nor torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

EVERY = 10  # steps, or calls of the worker, from one advice to the next
NEARLY_ALWAYS = 0.95  # share of the updates from which an outcome counts as the only one
RARELY = 0.1  # share of the updates below which the bounds hardly ever move
MANY = 0.01  # share of the tokens with A > 0 from which a higher upper bound may be worth a try
NEARLY_NOTHING = 1e-3  # a loss that clips a smaller share of the tokens of each sign hardly clips
IDLE = 0.3  # share of the response tokens without an advantage from which it is told
FORWARD = 0.3  # time of an extra forward pass as a share of an update's (docs/performance.md)
TARGETS = [k / 100 for k in range(1, 100)]  # among which a better target is looked for
MEASURES = ("value", "gradient")  # the values of the option contribution
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
OUTCOMES = ("met_at_start", "met_by_moving", "saturated")


@dataclass(frozen=True)
class Advice:
    """What to do next.

    Attributes:
        text: one or more sentences.
        overrides: lines to paste into the command of the run, if any.
    """

    text: str
    overrides: list[str]


def advise(updates: Sequence[Mapping[str, float]], options: Mapping, about: Mapping, window: str) -> Advice:
    """Say what to do next.

    Args:
        updates: the values of each of some updates, with the numbers of ``figures_of``.
        options: the options of the search, by name.
        about: what the first line of the record says of the run.
        window: what the texts call the updates, such as "this run".
    """
    measured = [update for update in updates if "met_at_start" in update]
    searched = [update for update in measured if any(update.get(name, 0) for name in OUTCOMES)]
    if not measured:
        advice = Advice(f"in {window} no update could be measured.", [])
    elif not searched:
        text = f"in {window} no token had an advantage, because all responses to a prompt got the same reward."
        advice = Advice(f"{text} Look at the rewards, and at how hard the prompts are.", [])
    else:
        advice = _judge(searched, options, about, window)
        idle = _idle_tokens(measured, window)
        if idle:
            advice = Advice(f"{idle} {advice.text[0].upper()}{advice.text[1:]}", advice.overrides)
    return Advice(" ".join([advice.text, *_faults(updates, window)]), advice.overrides)


def clipped_shares(updates: Sequence[Mapping[str, float]], applied: bool) -> tuple[float, float] | None:
    """Return the share of all tokens with A > 0 and of all with A < 0 that the run's loss clips (or caps).

    None if the loss does not clip by the ratio of a token.

    Args:
        updates: as in ``advise``, each with an advantage.
        applied: whether the loss uses BAPO's bounds.
    """
    if not applied and "clipped_positive" not in updates[0]:
        return None
    shares = []
    for sign in ("positive", "negative"):
        tokens = [update[f"{sign}_tokens"] for update in updates]
        clipped = (
            [update[f"clipped_{sign}"] for update in updates]
            if not applied
            else [update[f"clipfrac_{sign}"] * count for update, count in zip(updates, tokens, strict=True)]
        )
        shares.append(sum(clipped) / max(1, sum(tokens)))
    return shares[0], shares[1]


def idle_share(updates: Sequence[Mapping[str, float]]) -> float:
    """Return the share of all response tokens that have no advantage, and so train nothing.

    Args:
        updates: as in ``advise``, each measured.
    """
    tokens = sum(update["response_tokens"] for update in updates)
    idle = tokens - sum(update["positive_tokens"] + update["negative_tokens"] for update in updates)
    return idle / max(1, tokens)


def cost_of_bounds(updates: Sequence[Mapping[str, float]]) -> float | None:
    """Estimate how many times as long an update takes with exact bounds; None if the updates do not have the values.

    In a monitored run it is what BAPO would have cost.
    """
    measured = [update for update in updates if "redone" in update]
    if not measured:
        return None
    return 1 + fmean(FORWARD * update["extra_forward"] + update["redone"] for update in measured)


def _judge(updates: Sequence[Mapping[str, float]], options: Mapping, about: Mapping, window: str) -> Advice:
    """Judge updates that have searched."""
    applied, measure = about.get("applied", False), options["contribution"]
    target = options["positive_contribution_target"]
    if all(options[f"ratio_{side}_start"] == options[f"ratio_{side}_max"] for side in ("lower", "upper")):
        return Advice(f"in {window} there was nothing to search, because both bounds are fixed.", [])
    at_start, moved, saturated = (fmean(update[name] for update in updates) for name in OUTCOMES)
    clipped = clipped_shares(updates, applied)
    if clipped and max(clipped) < NEARLY_NOTHING:
        return Advice(
            f"in {window} the loss clipped {clipped[0]:.2%} of the tokens with A > 0 and {clipped[1]:.2%} of those "
            "with A < 0. Hardly any bound matters here: leave the loss as it is, unless you reuse data more often.",
            [],
        )
    if moved >= RARELY:
        outcomes = f"met at the start in {at_start:.0%}, by moving bounds in {moved:.0%}, saturated in {saturated:.0%}"
        if applied:
            return Advice(f"in {window} the target was {outcomes} of the updates. There is nothing to change.", [])
        text = f"BAPO would move the bounds: its target {target:g} would be {outcomes} of the updates. Try it."
        return Advice(f"in {window} {text}{_cost_sentence(updates)}", _switch(measure, target, about))
    text = _why_bounds_do_not_move(updates, options, window, applied, at_start, saturated)
    # The run's own measure first: it wins a tie.
    better = [
        (*_target_that_moves_bounds(updates, one, target), one)
        for one in (measure, *(other for other in MEASURES if other != measure))
    ]
    new_target, share, new_measure = max(better, key=lambda one: one[1])
    if share >= RARELY:
        other = "" if new_measure == measure else f" and contribution={new_measure}"
        text += (
            f" With positive_contribution_target={new_target:g}{other} they would move in about {share:.0%} of the "
            "updates."
        )
        changes = _changes(new_measure, new_target, measure)
        return Advice(text, changes if applied else _switch(new_measure, new_target, about))
    text += f" No target would be met by moving bounds in even {RARELY:.0%} of the updates, with either measure."
    if applied:
        return Advice(f"{text} Use fixed bounds, which need no search (docs/choosing.md).", [])
    if clipped and clipped[0] >= MANY:
        return Advice(
            f"{text} The loss clips {clipped[0]:.1%} of the tokens with A > 0: to keep these, raise its upper bound "
            "alone. On our small language model that learned faster than [0.8, 1.2] and ended with the least entropy "
            "of four losses (docs/results/language_model.md).",
            [f"{ACTOR}.clip_ratio_high=2.0"],
        )
    return Advice(f"{text} Leave the loss as it is.", [])


def _cost_sentence(updates: Sequence[Mapping[str, float]]) -> str:
    cost = cost_of_bounds(updates)
    return "" if cost is None else f" Updates would take about {cost:.2f} times as long."


def _why_bounds_do_not_move(
    updates: Sequence[Mapping[str, float]],
    options: Mapping,
    window: str,
    applied: bool,
    at_start: float,
    saturated: float,
) -> str:
    """Say how nearly all searches end: at the start of the ranges, at their end, or at one of the two."""
    target = options["positive_contribution_target"]
    start = f"[{options['ratio_lower_start']:g}, {options['ratio_upper_start']:g}]"
    end = f"[{options['ratio_lower_max']:g}, {options['ratio_upper_max']:g}]"
    acts = "acts" if applied else "would act"
    if saturated >= NEARLY_ALWAYS:
        highest = median(update["positive_contribution_highest"] for update in updates)
        return (
            f"in {saturated:.0%} of the updates of {window} the search was saturated: no pair of bounds reached the "
            f"target {target:g}, so BAPO {acts} as fixed bounds {end}. The highest rho was {highest:.3f} (median)."
        )
    if at_start >= NEARLY_ALWAYS:
        rho = median(update["positive_contribution_start"] for update in updates)
        return (
            f"in {at_start:.0%} of the updates of {window} the target {target:g} was met at the start, so BAPO {acts} "
            f"as fixed bounds {start}. rho at the start was {rho:.3f} (median)."
        )
    return (
        f"in {window} the target {target:g} was met at the start in {at_start:.0%} of the updates and the search "
        f"saturated in {saturated:.0%}, so BAPO {acts} as the bounds {start} where it was met and as {end} where not."
    )


def _target_that_moves_bounds(
    updates: Sequence[Mapping[str, float]], measure: str, target: float
) -> tuple[float, float]:
    """Return the target that most updates would meet by moving bounds, and their share, with a measure of rho.

    Of several such targets this is the one that is nearest to ``target``.
    """
    rho = [
        (update[f"{measure}_start"], update[f"{measure}_highest"]) for update in updates if f"{measure}_start" in update
    ]
    if not rho:
        return target, 0.0
    shares = {t: fmean(start < t - 1e-9 and highest >= t - 1e-9 for start, highest in rho) for t in TARGETS}
    better = max(TARGETS, key=lambda t: (shares[t], -abs(t - target)))
    return better, shares[better]


def _changes(measure: str, target: float, old_measure: str) -> list[str]:
    """Return the overrides that change target and measure of a run."""
    change = [f"++{LOSS}.positive_contribution_target={target:g}"]
    return change if measure == old_measure else [*change, f"++{LOSS}.contribution={measure}"]


def _switch(measure: str, target: float, about: Mapping) -> list[str]:
    """Return the overrides that train with BAPO instead of the run's loss."""
    dual_clip = about.get("clip_ratio_c", 3.0)  # None: the run has none, and keeps its setting
    return [
        f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        f"{LOSS}.loss_mode=bapo",
        *_changes(measure, target, "value"),
        *([] if dual_clip is None else [f"{ACTOR}.clip_ratio_c={dual_clip}"]),
    ]


def _idle_tokens(updates: Sequence[Mapping[str, float]], window: str) -> str:
    """Return a sentence on the tokens that train nothing, if they are many."""
    idle = idle_share(updates)
    if idle < IDLE:
        return ""
    return (
        f"in {window} {idle:.0%} of the response tokens had no advantage, because all responses to a prompt got the "
        "same reward, and trained nothing. If the reward stalls, change this first: prompts that are neither too easy "
        "nor too hard, more responses to each (rollout.n), or verl's algorithm.filter_groups."
    )


def _faults(updates: Sequence[Mapping[str, float]], window: str) -> Iterator[str]:
    """Yield a sentence on each fault of the data."""
    masked = fmean(update.get("masked_token_fraction", 0.0) for update in updates) if updates else 0.0
    if masked > 0:
        yield (
            f"{100 * masked:.2g}% of the tokens in {window} had no usable old log-prob (NaN, infinite, or above 0.5), "
            "and the search left them out. With bypass_mode=true these log-probs come from vLLM."
        )
    invalid = sum(update.get("invalid_tokens", 0.0) for update in updates)
    if invalid > 0:
        yield f"{invalid:.0f} log-probs or advantages in {window} were not finite: the model or the reward is broken."
