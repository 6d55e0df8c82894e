# SPDX-License-Identifier: Apache-2.0
"""The lines of the report on a log of verl's: what it has of the loss, and what it cannot show."""

import math
from collections.abc import Iterator
from statistics import fmean

from recipe.bapo.hook.verdict import percent
from recipe.bapo.report.logs import Log

# With vanilla a smaller share of the response tokens is less than 0.1 % of the tokens of each sign, from which on the
# verdict on a record says that the loss clips, unless fewer than 10 % of the tokens have that sign.
HARDLY_CLIPPED = 1e-4
WATCH = "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.MonitorConfig"
ROWS = (
    ("reward", ("critic/rewards/mean", "critic/score/mean")),
    ("response length", ("response_length/mean",)),
    ("cut responses", ("response_length/clip_ratio",)),
    ("entropy", ("actor/entropy", "actor/entropy_loss")),
    ("gradient norm", ("actor/grad_norm",)),
    ("loss", ("actor/pg_loss",)),
    ("clip fraction", ("actor/pg_clipfrac",)),
    ("dual clip", ("actor/pg_clipfrac_lower",)),
    ("rollout-training mismatch", ("training/rollout_probs_diff_mean",)),
    ("largest advantage", ("critic/advantages/max",)),
    ("smallest advantage", ("critic/advantages/min",)),
    ("no advantage", ("actor/bapo/zero_advantage_fraction",)),
    ("BAPO: met at the start", ("actor/bapo/met_at_start",)),
    ("BAPO: met by moving", ("actor/bapo/met_by_moving",)),
    ("BAPO: saturated", ("actor/bapo/saturated",)),
    ("clipped of A > 0", ("actor/bapo/own_clipfrac_positive", "actor/bapo/own_capfrac_positive")),
    ("clipped of A < 0", ("actor/bapo/own_clipfrac_negative", "actor/bapo/own_capfrac_negative")),
)


def report_on_log(name: str, log: Log) -> Iterator[str]:
    """Yield the lines of the report."""
    yield name
    first, last = log.steps[0][0], log.steps[-1][0]
    restarts = f", {_count(log.restarts, 'restart')}" * (log.restarts > 0)
    unread = f" Values or lines that could not be read: {log.unread}." * (log.unread > 0)
    yield f"  {log.kind}: {_count(len(log.steps), 'training step')}, {first} to {last}{restarts}.{unread}"
    yield f"  {_losses(log)}"
    yield ""
    yield from _table(log)
    yield ""
    hardly = clips_hardly(log)
    if hardly:
        yield f"  {hardly}"
    if not log.values("actor/bapo/applied"):
        yield (
            "  A log cannot tell which sign the clipped tokens have, how far ratios reach, and whether BAPO's bounds "
            f"would move. One more line measures that and changes nothing in training (docs/monitor.md): {WATCH}"
        )
    else:
        yield "  The record of this run (record_dir) tells more than its log: docs/monitor.md."


def clips_hardly(log: Log) -> str:
    """Say that the loss clips hardly anything, if the log shows that for every step; else an empty text.

    That is so where every step has verl's vanilla loss and a share of clipped tokens, the dual clip's among them, that
    is small also if all of it is of one sign.
    """
    # Distillation has a loss of its own.
    if set(log.modes.values()) != {"vanilla"} and log.modes or log.values("actor/distillation/loss"):
        return ""
    upper, lower = (dict(log.values(name)) for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"))
    shares = [upper.get(step, math.nan) + lower.get(step, 0.0) for step, _ in log.steps]
    if log.decimals <= 3 or not all(share < HARDLY_CLIPPED for share in shares):
        return ""
    assumed = "" if log.modes else " (verl's default is assumed)"
    return f"The loss{assumed} clipped at most {percent(max(shares))} of the response tokens in any step."


def _losses(log: Log) -> str:
    """Name the losses, with the first step of each."""
    if not log.modes:
        return "loss_mode: not in this file (verl's default is vanilla)"
    named: list[tuple[int, str]] = []
    for step, _ in log.steps:
        mode = log.modes.get(step, "not named")
        if not named or named[-1][1] != mode:
            named.append((step, mode))
    text = f"loss_mode={named[0][1]}"
    if len(named) > 1:
        text = "loss_mode=" + ", ".join(f"{mode} from step {step} on" for step, mode in named)
    if {mode for _, mode in named} != {"vanilla"}:
        text += " (what its clip fraction counts: docs/losses.md)"
    return text


def _table(log: Log) -> Iterator[str]:
    """Yield a row for each metric: its mean over the first and the last fifth of the steps, and its extremes."""
    rows: list[tuple[str, ...]] = [("", "first", "last", "lowest", "in step", "highest", "in step", "not finite")]
    for label, names in ROWS:
        values = log.values(*names)
        finite = [(step, value) for step, value in values if math.isfinite(value)]
        if not values:
            continue
        lost = str(len(values) - len(finite)) if len(finite) < len(values) else ""
        if not finite:
            rows.append((label, "-", "-", "-", "", "-", "", lost))
            continue
        fifth = max(1, len(finite) // 5)
        parts = [finite[:fifth], finite[-fifth:]]
        means = [f"{fmean(value for _, value in part) + 0.0:.4g}" for part in parts]
        ends = [of(finite, key=lambda one: one[1]) for of in (min, max)]
        varies = ends[0][1] < ends[1][1]
        shown = [cell for step, value in ends for cell in (f"{value + 0.0:.4g}", str(step) if varies else "")]
        rows.append((label, *means, *shown, lost))
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    yield f"  First and last: means over {_count(max(1, len(log.steps) // 5), 'step')}."
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for label, *cells in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  " + "  ".join([f"{label:<{widths[0]}}", *aligned]).rstrip()


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"
