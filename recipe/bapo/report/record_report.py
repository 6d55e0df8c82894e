# SPDX-License-Identifier: Apache-2.0
"""The lines of the report on a run's record: what its loss clips, and whether BAPO's bounds would move."""

import math
from collections.abc import Iterator
from statistics import fmean, median

from bapo.clip_statistics import UNBOUNDED_RATIO
from recipe.bapo.hook.verdict import OUTCOMES, SIGNS, cost_of_bounds, far_from_1, percent
from recipe.bapo.report.findings import (
    BOUNDS,
    CONTRIBUTIONS,
    Run,
    clipped_by_bounds,
    clipped_by_loss,
    ends_of_search,
    fixed_bounds,
    steps_of,
    tail,
)

TARGETS = [k / 100 for k in range(30, 61, 5)]
# What is clipped is reported in at most this many rows for stretches of training, and for updates on a rollout batch.
STRETCHES, POSITIONS = 4, 8
# What a loss clips, by the name that its ``OwnClip`` has for it.
QUANTITIES = {
    "ratio": "ratios",
    "sequence ratio": "the mean ratio of a response",
    "log-ratio": "log-ratios",
    "probability": "changes of a token's probability",
    "divergence": "the signed KL divergence of a token",
}


def report(name: str, run: Run) -> Iterator[str]:
    """Yield the lines of the report on a run."""
    yield name
    yield f"  {_what_was_recorded(run)}"
    invalid = len(run.recorded) - int(run.valid.sum())
    if invalid and run.verdict.kind != "unusable":
        yield (
            f"  {invalid} of the {len(run.recorded)} updates could not be measured, because log-probs or "
            "advantages were not finite (or the log of the run says why not). They are left out of the figures."
        )
    sentence = f"  {run.verdict.text[0].upper()}{run.verdict.text[1:]}"
    yield from ("", "1. Can these numbers be used?")
    if run.verdict.kind == "unusable":
        if run.updates:
            yield from _tokens(run)
        yield f"{sentence} What can be the reason: docs/silent_faults.md."
        return
    if run.updates:
        yield from _tokens(run)
        yield from ("", "2. Does the run clip?", *_clipping(run), *_ratios(run))
        yield from ("", f"3. {'Did' if run.applied else 'Would'} BAPO's bounds move?", *_searches(run))
        yield from ("", "4. What would fixed bounds clip?", *_bounds(run))
    yield from ("", "5. In short", sentence)
    if run.verdict.switch:
        what = "go back to verl's loss, monitored" if run.applied else "train with these bounds"
        yield f"  Lines that would {what} (docs/monitor.md, How to decide):"
    yield from (f"    {line}" for line in run.verdict.switch)


def _what_was_recorded(run):
    unit, steps = steps_of(run.recorded)
    span = f" in {_count(len(set(steps)), unit)} ({min(steps)} to {max(steps)})" if unit != "update" else ""
    starts = f", from {len(run.starts)} starts of the process" if len(run.starts) > 1 else ""
    loss = run.about.get("loss_mode", "another loss")
    if run.applied:
        scope = run.about["options"].get("bound_scope", run.config.bound_scope)
        trained = f"trained with BAPO, bound_scope={scope}"
        if scope == "micro_batch":
            trained += " (what its bounds clip is a mean over micro-batches)"
    elif run.own_clip is None:
        trained = f"trained with {loss}, BAPO only monitored"
    else:
        limits = f"{QUANTITIES[run.own_clip['of']]} to {_limits(run.own_clip)}"
        if run.own_clip["kind"] == "cap" and run.own_clip["low"] <= 0:
            limits = f"ratios at {run.own_clip['high']:g}"
        trained = f"trained with {loss}, which {run.own_clip['kind']}s {limits}; BAPO only monitored"
    return f"{_count(len(run.recorded), 'update')}{span}{starts}; {trained}."


def _tokens(run):
    """Answer question 1, where nothing speaks against it."""
    measured = run.recorded.rows(run.valid)
    masked = percent(measured["masked_token_fraction"].nan_to_num().mean().item())
    yield f"  Response tokens without a usable old log-prob: {masked}."
    counts = measured.dicts(["response_tokens", "positive_tokens", "negative_tokens"])
    tokens, *signs = (sum(one[f"{name}_tokens"] for one in counts) for name in ("response", *SIGNS.values()))
    shares = [percent(number / max(1, tokens)) for number in (*signs, tokens - sum(signs))]
    yield f"  Advantage: A > 0 on {shares[0]} of the response tokens, A < 0 on {shares[1]}, none on {shares[2]}."
    same_weights = measured.rows(measured["on_policy"] == 1)
    first, which = measured.rows(measured["update"] == 0), "on a rollout batch; the trainer does not tell if all are 1"
    if same_weights or not measured["on_policy"].isnan().all():
        first, which = same_weights, "whose old log-probs the same weights had computed"
    far = far_from_1(first.dicts(["far_from_1", "positive_tokens", "negative_tokens"]))
    if far is not None:
        yield (
            f"  Ratios above 1.2 or below 0.83: {percent(far)} of the tokens with an advantage in the "
            f"{_count(len(first), 'first update')} ({which})."
        )
    norms = [norm for norm in measured["grad_norm"].tolist() if not math.isnan(norm)]
    if norms:
        yield f"  Gradient norm: {median(norms):.3g} (median), {min(norms):.3g} to {max(norms):.3g}."


def _clipping(run):
    """Answer question 2."""
    yield "  As shares of the tokens with an advantage of that sign:"
    if clipped_by_loss(run, run.updates) is None:
        yield ("  The run's loss does not clip, or the record does not know its limits. What BAPO's bounds would clip:")
    verb = "capped" if run.own_clip and run.own_clip["kind"] == "cap" else "clipped"
    rows = [("", f"A > 0 {verb}", f"A < 0 {verb}"), ("all updates", *_clipped(run, run.updates))]
    unit, stretches = run.by_step(STRETCHES)
    for one, after, groups in (("update", " on a rollout batch", run.by_position(POSITIONS)), (unit, "", stretches)):
        for first, last, updates in groups if len(groups) > 1 else ():
            label = f"{one} {first}" if first == last else f"{one}s {first} to {last}"
            rows.append((f"{label}{after}", *_clipped(run, updates)))
    yield from _table(rows)


def _ratios(run):
    """Say how far the ratios reach, and which tokens no bound touches."""
    tails = {f"A {sign} 0, ratio at or {side}": tail(run, side) for sign, side in ((">", "above"), ("<", "below"))}
    if any(tails.values()):
        yield "  How far the ratios of single tokens reach, as shares of the tokens of the sign:"
    for label, shares in tails.items():
        if shares:
            yield from _table([(label, *(f"{ratio:g}" for ratio in shares)), ("", *map(percent, shares.values()))])
    gradient, unbounded = (run.updates[name].sum().item() for name in ("gradient", "unbounded_gradient"))
    yield (
        f"  Tokens with A < 0 and a ratio above {UNBOUNDED_RATIO:g}, which BAPO limits only by the dual clip, made up "
        f"{percent(unbounded / gradient if gradient else 0.0)} of the gradient before clipping."
    )
    covariance = [value for value in run.updates["entropy_covariance"].tolist() if not math.isnan(value)]
    if covariance:  # not in an older record, in a run with BAPO, or where the loss does not clip by the ratio
        lowering = percent(fmean(value > 0 for value in covariance))
        yield (
            f"  entropy_covariance was above 0 in {lowering} of the updates, which then tend to lower the entropy "
            f"(median {median(covariance):.2g} nats)."
        )


def _searches(run):
    """Answer question 3."""
    target = run.config.positive_contribution_target
    ends = [sum(run.updates[name].tolist()) / len(run.updates) for name in OUTCOMES]
    yield (
        f"  Searching for the target {target:g}: met at the start in {percent(ends[0])} of the updates, met by moving "
        f"bounds in {percent(ends[1])}, saturated in {percent(ends[2])}."
    )
    yield from _cost(run)
    yield f"  rho is the share of the tokens with A > 0 in the loss, with contribution={run.config.contribution}:"
    for name, key in (
        ("rho at the start of the search", "positive_contribution_start"),
        ("highest rho that bounds reach", "positive_contribution_highest"),
    ):
        rho = run.updates[key].tolist()
        yield f"  {name}: {median(rho):.3f} (median of the updates; {min(rho):.3f} to {max(rho):.3f})"
    yield "  How searches over all tokens of an update end with other targets, as shares of the updates:"
    for contribution in sorted(CONTRIBUTIONS, key=lambda one: one != run.config.contribution):
        rows = [(f"contribution={contribution}", "met at the start", "met by moving", "saturated")]
        ends_of = ends_of_search(run, contribution)
        for one in sorted({*TARGETS, target}):
            rows.append((f"target {one:g}{' (searched for)' if one == target else ''}", *map(percent, ends_of[one])))
        yield from _table(rows)


def _cost(run):
    """Say how often exact bounds needed more than the update's own pass, or would have with BAPO."""
    known = run.updates.rows(~run.updates["redone"].isnan())
    if not known:  # a record of version 0.2, or of another trainer
        return
    names = ("extra_forward", "redone")
    forwards, redone = (percent(fmean(known[name].tolist())) for name in names)
    cost = cost_of_bounds(known.dicts(names))
    made = "made" if run.applied else "would have made"
    yield (
        f"  To find exact bounds, {forwards} of the updates {made} an extra forward pass, and {redone} {made} their "
        f"forwards and backwards twice: about {cost:.2f} times the time of an update."
    )


def _bounds(run):
    """Answer question 4."""
    rows = [("", "A > 0 clipped", "A < 0 clipped", *(f"rho ({contribution})" for contribution in CONTRIBUTIONS))]
    if run.own_clip is not None:
        low, high = run.own_clip["low"], run.own_clip["high"]
        found = fixed_bounds(run, low, high)
        rho = ("-", "-") if found is None else _rho(found.rho)
        caps = " (caps)" * (run.own_clip["kind"] == "cap")
        rows.append((f"the run's loss{caps}, {_limits(run.own_clip)}", *_clipped(run, run.updates), *rho))
    rho = {run.config.contribution: median(run.updates["positive_contribution"].tolist())}
    rows.append(("the bounds that BAPO's search finds", *map(percent, clipped_by_bounds(run.updates)), *_rho(rho)))
    for low, high in BOUNDS:
        found = fixed_bounds(run, low, high)
        row = (
            (percent(found.positive), percent(found.negative), *_rho(found.rho))
            if found
            else ("not on the run's grid",)
        )
        rows.append((f"[{low:g}, {high:g}]", *row))
    yield from _table(rows)
    has_dual_clip = run.own_clip and math.isfinite(run.own_clip["dual_clip"])
    dual = " The row of the run's loss counts its dual clip too." if has_dual_clip else ""
    yield f"  rho is the median of the updates. A dash: the record does not have it.{dual}"
    yield (
        "  These figures are about this run's tokens: with other bounds the ratios would differ from the second update "
        "of a rollout batch on."
    )


def _clipped(run, updates):
    """Format what the run's loss clips or, if it does not clip by the ratio, what BAPO's bounds would."""
    return map(percent, clipped_by_loss(run, updates) or clipped_by_bounds(updates))


def _limits(own_clip: dict) -> str:
    """Format the limits of a loss. A ratio is never below 0."""
    low = "-" if own_clip["of"] in ("ratio", "sequence ratio") and own_clip["low"] <= 0 else f"{own_clip['low']:g}"
    return f"[{low}, {own_clip['high']:g}]"


def _rho(rho: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{rho[contribution]:.3f}" if contribution in rho else "-" for contribution in CONTRIBUTIONS)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Align the columns, the first to the left and the others to the right."""
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=False)]
        yield "    " + "   ".join([f"{first:<{widths[0]}}", *cells])
