# SPDX-License-Identifier: Apache-2.0
"""The lines of the report on a log of verl's: what it shows of the loss, what it cannot show, and what to do next.

The order and the rules are those of the advice on a record (docs/monitor.md), as far as a log has what they need.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from recipe.bapo.hook.advice import IDLE, NEARLY_NOTHING, OUTCOMES, SIGNS, percent
from recipe.bapo.report.logs import Log

# With vanilla a smaller share of the response tokens is less than 0.1 % of the tokens of each sign, from which the
# advice says that hardly any bound matters, unless fewer than 10 % of the tokens have that sign.
HARDLY_CLIPPED = 1e-4
HARDLY = (
    "Hardly any bound matters here, BAPO's included: leave the loss as it is, unless you reuse data more often. Where "
    "every update has a fresh rollout batch, every ratio is 1 and nothing can be clipped."
)
WATCH = "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.MonitorConfig"


def report_on_log(name: str, log: Log) -> Iterator[str]:
    """Yield the lines of the report."""
    yield name
    first, last = log.steps[0][0], log.steps[-1][0]
    restarts = f", {_count(log.restarts, 'restart')}" * (log.restarts > 0)
    unread = f" Values or lines that could not be read: {log.unread}." * (log.unread > 0)
    yield f"  {log.kind}: {_count(len(log.steps), 'training step')}, {first} to {last}{restarts}.{unread}"
    yield ""
    mode = log.loss_mode or "vanilla"
    assumed = "" if log.loss_mode else " (the file names none: verl's default is assumed)"
    yield f"  loss_mode={mode}{assumed}"
    for label, names, of in ROWS:
        values = [(step, value) for step, value in log.values(*names) if math.isfinite(value)]
        if values:
            yield f"  {label:<18}{of(values)}"
    yield ""
    yield f"What next?\n  {' '.join(verdict(log))}"
    if log.values("actor/bapo/applied"):
        return
    yield ""
    yield (
        "What a log cannot tell: which sign the clipped tokens have, how far ratios reach, and whether BAPO's bounds "
        f"would move. One more line on the command tells it and changes nothing in training: {WATCH} "
        "(docs/monitor.md). The package has to be installed for it: pip install --no-deps and this folder."
    )


def verdict(log: Log) -> Iterator[str]:
    """Yield the sentences on what to do next, in the order of the advice on a record."""
    if log.values("actor/distillation/loss"):
        yield "This run distils (actor/distillation/loss). The rules of this report are about a policy loss."
        return
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/grad_norm"):
        broken = [step for step, value in log.values(name) if not math.isfinite(value)]
        if broken:
            yield f"{name} was not finite in {_count(len(broken), 'step')}, first in step {broken[0]}: find the reason."
    broken = [step for step, value in log.values("actor/grad_norm") if not math.isfinite(value)]
    if broken:
        yield (
            f"The gradient norm was not finite in {_count(len(broken), 'step')}, first in step {broken[0]}. Find the "
            "reason before you look at any bound. On FSDP verl skips such updates; on Megatron it makes the step, "
            "and every checkpoint since is broken (docs/silent_faults.md#nan-on-megatron)."
        )
    highest, lowest = dict(log.values("critic/advantages/max")), dict(log.values("critic/advantages/min"))
    ends = [(highest[step], lowest[step]) for step in highest.keys() & lowest.keys()]
    idle = sum(high == low == 0 for high, low in ends)
    seen = {">": any(high > 0 for high, _ in ends), "<": any(low < 0 for _, low in ends)}
    missing = [sign for sign, found in seen.items() if not found]
    if ends and len(missing) == 1:
        yield (
            f"No token had A {missing[0]} 0. With a working baseline advantages have both signs, so look at the "
            "advantage estimator, at the rewards and at rollout.n before you look at any bound."
        )
        return
    if idle:
        yield f"In {idle} of {len(ends)} steps no response had an advantage: look at the rewards, and at the prompts."
    shares = [share for _, share in log.values("actor/bapo/zero_advantage_fraction") if math.isfinite(share)]
    if shares and fmean(shares) >= IDLE:
        yield (
            f"{percent(fmean(shares))} of the response tokens had no advantage, because all responses to a prompt got "
            "the same reward: change that first, by other prompts or a larger rollout.n."
        )
    if idle < len(ends) or not ends:
        yield from _clipping(log)


def _clipping(log: Log) -> Iterator[str]:
    """Say what the clip fraction means for this loss, and what follows."""
    shares = [share for _, share in log.values("actor/pg_clipfrac") if math.isfinite(share)]
    mode = log.loss_mode or "vanilla"
    outcomes = [[share for _, share in log.values(f"actor/bapo/{name}")] for name in OUTCOMES]
    own = [[share for _, share in log.values(f"actor/bapo/own_clipfrac_{sign}")] for sign in SIGNS.values()]
    if all(own) and max(map(fmean, own)) < NEARLY_NOTHING:
        yield f"The loss clipped {fmean(own[0]):.2%} of the tokens with A > 0 and {fmean(own[1]):.2%} with A < 0."
        yield HARDLY
    elif all(outcomes):
        at_start, moved, saturated = map(fmean, outcomes)
        yield (
            f"BAPO's target {'was' if mode == 'bapo' else 'would be'} met at the start in {at_start:.0%}, by moving "
            f"bounds in {moved:.0%}, saturated in {saturated:.0%} of the updates. Read the run's record: it tells more "
            "than its log."
        )
    elif not shares:
        yield "The log has no actor/pg_clipfrac, so it does not tell whether the loss clips."
    elif mode != "vanilla":
        yield f"With loss_mode={mode} actor/pg_clipfrac means something else (docs/losses.md), so no rule on it holds."
    elif max(shares) < HARDLY_CLIPPED and log.decimals > 3:
        default = "" if log.loss_mode else "If its loss is verl's default, vanilla: "
        yield f"{default}The loss clipped at most {max(shares):.2g} of the response tokens in any step. {HARDLY}"
    elif median(shares) == 0 and log.decimals <= 3:
        yield (
            "The values of this log have three decimals, so a share of clipped tokens below 0.0005 looks like 0: "
            "read the metrics of verl's file logger or of wandb."
        )
    else:
        yield (
            f"The loss clipped {percent(median(shares))} of the response tokens (median of the steps), "
            f"{percent(max(shares))} at most. Most published shares that we know are 0.06 to 2 % "
            "(docs/results/published.md). The monitor tells whether other bounds would matter."
        )


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def _quantity(values: Sequence[tuple[int, float]]) -> str:
    """Say how a metric moved: its mean over the first and the last fifth of the steps."""
    fifth = max(1, len(values) // 5)
    first, last = (fmean(value for _, value in part) for part in (values[:fifth], values[-fifth:]))
    if len(values) == 1:
        return f"{first:.3g}"
    of = "step" if fifth == 1 else f"{fifth} steps"
    return f"{first:.3g} in the first {of}, {last:.3g} in the last {of}"


def _extreme(values: Sequence[tuple[int, float]]) -> str:
    """Say how large a metric was in the middle, and where it was largest."""
    step, most = max(values, key=lambda one: one[1])
    return f"{median(value for _, value in values):.3g} (median), {most:.3g} at most (step {step})"


ROWS = (
    ("clip fraction", ("actor/pg_clipfrac",), _extreme),
    ("entropy", ("actor/entropy", "actor/entropy_loss"), _quantity),
    ("gradient norm", ("actor/grad_norm",), _extreme),
    ("no advantage", ("actor/bapo/zero_advantage_fraction",), _extreme),
    ("reward", ("critic/rewards/mean", "critic/score/mean"), _quantity),
    ("response length", ("response_length/mean",), _quantity),
    ("cut responses", ("response_length/clip_ratio",), _extreme),
)
