# SPDX-License-Identifier: Apache-2.0
"""What to do next in a run, in a few sentences, judging by the metrics of some updates.

The worker and the report print it, in the order of docs/monitor.md: first whether the numbers can be used at all, then
whether the loss clips, then what BAPO's bounds would do. All thresholds are here, and you may change them and the
texts. A search ends in one of three ways: the target is *met at the start* (no bound has to move), *met by moving* the
bounds, or the search is *saturated*: no pair of bounds on its path reaches the target. ``advice_inputs.py`` makes
what it needs. This module imports neither verl nor torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

EVERY = 10  # steps, or calls of the worker, from one advice to the next
MAX_MASKED = 1e-3  # share of an update's tokens without a usable old log-prob above which a run with BAPO ends
# Share of the tokens with A > 0 at or above a ratio of 1.2, in updates whose ratios should be 1, that is no rounding.
# Of 419 tokens of SmolLM2-135M none was there in bfloat16, however the batch was cut; with attention_dropout=0.05 18 %.
MAX_NOISE = 0.01
LEAST_UPDATES = 8  # fewer updates are not judged, nor is a target chosen or checked on fewer
LEAST_MOVED = 3  # updates in which bounds have to move with a target, where it is chosen and where it is checked
NEARLY_ALWAYS = 0.95  # share of the updates from which an outcome counts as the only one
RARELY = 0.1  # share of the updates below which the bounds hardly ever move
MANY = 0.01  # share of the tokens with A > 0 from which a higher upper bound may be worth a try
NEARLY_NOTHING = 1e-3  # a loss that clips a smaller share of the tokens of each sign hardly clips
IDLE = 0.3  # share of the response tokens without an advantage above which the advice begins with them
FORWARD = 0.3  # time of an extra forward pass as a share of an update's (docs/performance.md)
TARGETS = [k / 100 for k in range(1, 100)]  # among which a better target is looked for
MEASURES = ("value", "gradient")  # the values of the option contribution
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
SIGNS = {">": "positive", "<": "negative"}
OUTCOMES = ("met_at_start", "met_by_moving", "saturated")


@dataclass(frozen=True)
class Advice:
    """What to do next.

    Attributes:
        text: one or more sentences.
        overrides: lines to paste into the command of the run, if any.
        broken: whether something is wrong with the numbers themselves, so that no figure of clipping or of bounds says
            anything.
    """

    text: str
    overrides: list[str]
    broken: bool = False


def advise(updates: Sequence[Mapping[str, float]], options: Mapping, about: Mapping, window: str) -> Advice:
    """Say what to do next.

    Args:
        updates: the metrics of each of some updates, in order, with those of ``advice_inputs`` and of the record.
        options: the options of the search, by name.
        about: what the first line of the record says of the run.
        window: what the texts call the updates, such as "this run".
    """
    measured = [update for update in updates if "met_at_start" in update]
    broken = _what_is_broken(updates, measured, options, about.get("applied", False), window)
    if broken:
        return Advice(broken, [], broken=True)
    if not measured:
        return Advice(f"in {window} no update could be measured.", [])
    searched = [update for update in measured if any(update.get(name, 0) for name in OUTCOMES)]
    if not searched:
        text = f"in {window} no token had an advantage, because all responses to a prompt got the same reward."
        return Advice(f"{text} Look at the rewards, and at how hard the prompts are.", [])
    if len(searched) < LEAST_UPDATES:
        number = f"{len(searched)} update{'' if len(searched) == 1 else 's'}"
        advice = Advice(f"in {window} only {number} had an advantage, and {LEAST_UPDATES} are needed to judge.", [])
    else:
        advice = _judge(searched, options, about, window)
    idle = _idle_tokens(measured, window)
    if idle:
        advice = Advice(f"{idle} {advice.text[0].upper()}{advice.text[1:]}", advice.overrides)
    return Advice(" ".join([advice.text, *_masked_tokens(measured, window)]), advice.overrides)


def clipped_by_own_loss(updates: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """Return the share of all tokens with A > 0 and of all with A < 0 that a loss other than BAPO's clips (or caps).

    None if it does not clip by the ratio of a token.

    Args:
        updates: as in ``advise``, each with an advantage.
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


def idle_share(updates: Sequence[Mapping[str, float]]) -> float:
    """Return the share of all response tokens that have no advantage, and so train nothing.

    Args:
        updates: as in ``advise``, each measured.
    """
    tokens = sum(update["response_tokens"] for update in updates)
    idle = tokens - sum(update["positive_tokens"] + update["negative_tokens"] for update in updates)
    return idle / max(1, tokens)


def percent(share: float) -> str:
    """Format a share. Small shares keep two digits, so that 0.02% is not 0.0%."""
    return f"{100 * share:{'.1f' if share == 0 or share >= 0.01 else '.2g'}}%"


def cost_of_bounds(updates: Sequence[Mapping[str, float]]) -> float | None:
    """Estimate how many times as long an update takes with exact bounds; None if the updates do not have the values.

    In a monitored run it is what BAPO would have cost.
    """
    measured = [update for update in updates if "redone" in update]
    if not measured:
        return None
    return 1 + fmean(FORWARD * update["extra_forward"] + update["redone"] for update in measured)


def _what_is_broken(
    updates: Sequence[Mapping[str, float]],
    measured: Sequence[Mapping[str, float]],
    options: Mapping,
    applied: bool,
    window: str,
) -> str:
    """Say what is wrong with the numbers themselves, if anything is. While it is, no other figure says anything."""
    invalid = sum(update.get("invalid_tokens", 0.0) for update in updates)
    if invalid:
        return (
            f"in {window} {invalid:.0f} log-probs or advantages were not finite: the model or the reward is broken. "
            "Find the reason before you look at any bound."
        )
    masked = [update.get("masked_token_fraction", 0.0) for update in measured]
    unusable = sum(share > MAX_MASKED for share in masked)
    if unusable:
        ends = "" if applied else " BAPO would end the run at the first of them."
        return (
            f"in {window} {unusable} of {len(measured)} updates had old log-probs that cannot be used (NaN, infinite, "
            f"or above 0.5) on more than {MAX_MASKED:.1%} of their response tokens, at most on {percent(max(masked))}."
            f"{ends} With bypass_mode=true these log-probs come from the rollout engine, otherwise "
            "from the trainer's own forward, as with a faulty fused kernel. Find the reason before you look at any "
            "bound (docs/silent_faults.md)."
        )
    tokens = {sign: sum(update[f"{name}_tokens"] for update in measured) for sign, name in SIGNS.items()}
    missing = [sign for sign, number in tokens.items() if not number]
    if len(missing) == 1:
        return (
            f"in {window} no token had A {missing[0]} 0. With a working baseline advantages have both signs, so look "
            "at the advantage estimator, at the rewards and at rollout.n (one response to a prompt has no other to be "
            "compared with) before you look at any bound."
        )
    fresh = [update for update in measured if update.get("on_policy") == 1 and update["positive_tokens"]]
    noise = sum(update["beyond_upper_start"] for update in fresh) / max(1, sum(one["positive_tokens"] for one in fresh))
    if noise > MAX_NOISE:
        return (
            f"in {window} the old log-probs of {len(fresh)} updates were computed by the same weights, so their "
            f"ratios should be 1, but {noise:.1%} of the tokens with A > 0 had a ratio of "
            f"{options['ratio_upper_start']:g} or more: the two forward passes differ, for example in precision, "
            "dropout, attention or temperature. Find the reason before you look at any bound "
            "(docs/silent_faults.md)."
        )
    return ""


def _judge(updates: Sequence[Mapping[str, float]], options: Mapping, about: Mapping, window: str) -> Advice:
    """Judge updates that have searched."""
    applied, measure = about.get("applied", False), options["contribution"]
    target = options["positive_contribution_target"]
    if all(options[f"ratio_{side}_start"] == options[f"ratio_{side}_max"] for side in ("lower", "upper")):
        return Advice(f"in {window} there was nothing to search, because both bounds are fixed.", [])
    at_start, moved, saturated = (fmean(update[name] for update in updates) for name in OUTCOMES)
    clipped = clipped_by_bounds(updates) if applied else clipped_by_own_loss(updates)
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
    better = find_stable_target(updates, measure, target)
    other = "" if better.measure == measure else f" and contribution={better.measure}"
    text += f" {better.text(f'positive_contribution_target={better.target:g}{other}')}"
    if better.stable:
        changes = _changes(better.measure, better.target, measure)
        return Advice(text, changes if applied else _switch(better.measure, better.target, about))
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
        low = options["ratio_lower_max"]
        do = "Lower the target, or go back to your loss." if applied else "Do not switch with this target."
        return (
            f"in {saturated:.0%} of the updates of {window} the search was saturated: no pair of bounds reached the "
            f"target {target:g}, so BAPO {acts} as fixed bounds {end}. The highest rho was {highest:.3f} (median). "
            f"A lower bound of {low:g} stops the suppression of each token with A < 0 whose ratio has fallen below "
            f"{low:g}, and a published run that stayed there collapsed (docs/monitor.md#saturation). {do}"
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


@dataclass(frozen=True)
class BetterTarget:
    """The target that moves bounds in most of the earlier updates, and what it does in the later ones.

    Attributes:
        target, measure: values of the options ``positive_contribution_target`` and ``contribution``.
        moved: the number of updates that would move their bounds, of the earlier and of the later ones.
        updates: the number of all earlier and of all later ones.
    """

    target: float
    measure: str
    moved: tuple[int, int]
    updates: tuple[int, int]

    @property
    def enough(self) -> bool:
        """Whether there are enough updates to choose a target and to check it."""
        return min(self.updates) >= LEAST_UPDATES

    @property
    def stable(self) -> bool:
        """Whether the target also moves bounds where it was not chosen."""
        return self.enough and all(map(_is_often, self.moved, self.updates))

    def text(self, options: str) -> str:
        """Say it in a sentence; ``options`` names target and measure."""
        if not self.enough:
            return f"To look for another target, {2 * LEAST_UPDATES} updates of several rollout batches are needed."
        if not _is_often(self.moved[0], self.updates[0]):
            return f"No target would move bounds in even {RARELY:.0%} of the updates, with either measure."
        counts = (
            f"{options}, chosen on the {self.updates[0]} earlier updates, would move bounds in {self.moved[0]} of these"
        )
        if self.stable:
            return f"{counts} and in {self.moved[1]} of the {self.updates[1]} later ones."
        return f"No other target is stable: {counts}, but only in {self.moved[1]} of the {self.updates[1]} later ones."


def find_stable_target(updates: Sequence[Mapping[str, float]], measure: str, target: float) -> BetterTarget:
    """Choose the target that moves bounds in most of the earlier half of the updates, and count it in the later half.

    The best of many targets always looks good on the updates that chose it. The halves are of whole rollout batches,
    whose updates share their responses.

    Args:
        updates: updates that have searched, in order.
        measure, target: the run's own. Of several targets this is the one of the run's measure, and the nearest.
    """
    measures = [measure, *(other for other in MEASURES if other != measure)]
    earlier, later = _halves(updates)
    moved = {(one, t): _moved(earlier, one, t) for one in measures for t in TARGETS}
    best, chosen = max(moved, key=lambda one: (moved[one], one[0] == measure, -abs(one[1] - target)))
    counts = moved[best, chosen], _moved(later, best, chosen)
    return BetterTarget(chosen, best, counts, (len(earlier), len(later)))


def _halves(updates: Sequence[Mapping[str, float]]) -> tuple[Sequence[Mapping], Sequence[Mapping]]:
    """Split at the beginning of the rollout batch that is nearest to the middle."""
    # ``update`` is the position on the rollout batch; without it every update may begin one.
    begins = [
        k for k in range(1, len(updates)) if updates[k].get("update", 0) <= updates[k - 1].get("update", math.inf)
    ]
    middle = min(begins, key=lambda k: abs(2 * k - len(updates)), default=len(updates))
    return updates[:middle], updates[middle:]


def _moved(updates: Sequence[Mapping[str, float]], measure: str, target: float) -> int:
    """Count the updates whose bounds would move: the target is above rho at the start, and can be reached."""
    start, highest = f"{measure}_start", f"{measure}_highest"
    return sum(start in update and update[start] < target - 1e-9 <= update[highest] for update in updates)


def _is_often(moved: int, updates: int) -> bool:
    return moved >= max(LEAST_MOVED, RARELY * updates)


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


def _masked_tokens(measured: Sequence[Mapping[str, float]], window: str) -> Iterator[str]:
    """Yield a sentence on tokens without a usable old log-prob, where they are too few to end anything."""
    masked = fmean(update.get("masked_token_fraction", 0.0) for update in measured)
    if masked > 0:
        yield (
            f"{percent(masked)} of the tokens in {window} had no usable old log-prob (NaN, infinite, or above 0.5), "
            "and the search left them out."
        )
