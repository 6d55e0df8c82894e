# SPDX-License-Identifier: Apache-2.0
"""Report from a run's record what its loss clips, whether BAPO's bounds would move, and what to do next.

    .venv/bin/python -m recipe.bapo.report runs/mine                       # text, and runs/mine/report.png
    .venv/bin/python -m recipe.bapo.report runs/grpo runs/bapo --out compare.png

A run is a file record-*.jsonl or the folder that holds it. docs/monitor.md says how to record a run and how to read
the report.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median

from recipe.bapo.advice import advise, cost_of_bounds
from recipe.bapo.figures import figures_of
from recipe.bapo.record import Update
from recipe.bapo.report.findings import (
    CONTRIBUTIONS,
    Run,
    clipped,
    ends_of_search,
    fixed_bounds,
    read_runs,
    values,
)
from recipe.bapo.report.picture import picture

TARGETS = [k / 100 for k in range(30, 61, 5)]
BOUNDS = [(0.8, 1.2), (0.8, 3.0), (0.6, 1.2), (0.9, 3.0)]
# What is clipped is reported in at most this many rows for stretches of training, and for updates on a rollout batch.
STRETCHES, POSITIONS = 4, 8


def report(name: str, run: Run) -> Iterator[str]:
    """Yield the lines of the report on a run."""
    yield name
    yield f"  {_what_was_recorded(run)}"
    if run.invalid:
        yield (
            f"  {len(run.invalid)} of the {len(run.recorded)} updates could not be measured, because log-probs or "
            "advantages were not finite (or the log of the run says why not). They are left out of the figures."
        )
    if run.updates:
        yield from ("", "1. Does the run clip?", *_clipping(run))
        yield from ("", f"2. {'Did' if run.applied else 'Would'} BAPO's bounds move?", *_searches(run))
        yield from ("", "3. What would fixed bounds clip?", *_bounds(run))
    applied, clips = run.applied, run.own_clip is not None
    updates = [figures_of(update.stats, update.values, run.config, applied, clips) for update in run.recorded]
    found = advise(updates, asdict(run.config), run.about, "this run")
    yield from ("", "4. What next?", f"  {found.text[0].upper()}{found.text[1:]}")
    yield from (f"    {override}" for override in found.overrides)


def _what_was_recorded(run):
    unit, steps = run.by_step(run.recorded)
    span = f" in {_count(len(steps), unit)} ({min(steps)} to {max(steps)})" if steps and unit != "update" else ""
    starts = f", from {len(run.starts)} starts of the process" if len(run.starts) > 1 else ""
    loss = run.about.get("loss_mode", "another loss")
    if run.applied:
        scope = run.about["options"]["bound_scope"]
        trained = f"trained with BAPO, bound_scope={scope}"
        if scope == "micro_batch":
            trained += " (what its bounds clip is a mean over micro-batches)"
    elif run.own_clip is None:
        trained = f"trained with {loss}, BAPO only monitored"
    else:
        limits = f"[{run.own_clip['low']:g}, {run.own_clip['high']:g}]"
        trained = f"trained with {loss}, which {run.own_clip['kind']}s ratios to {limits}; BAPO only monitored"
    return f"{_count(len(run.recorded), 'update')}{span}{starts}; {trained}."


def _clipping(run):
    """Answer question 1."""
    own = clipped(run, run.updates, by_bapo=False)
    if own is None:
        yield (
            "  The run's loss does not clip by the ratio of a token, or the record does not know its limits. What "
            "BAPO's bounds would clip:"
        )
    by_bapo = own is None
    verb = "capped" if run.own_clip and run.own_clip["kind"] == "cap" else "clipped"
    rows = [("", f"A > 0 {verb}", f"A < 0 {verb}"), ("all updates", *_shares(run, run.updates, by_bapo))]
    places = run.by_position()
    if len(places) > 1:
        for label, updates in _parts(places, POSITIONS):
            rows.append(
                (f"update{'s' if ' to ' in label else ''} {label} on a rollout batch", *_shares(run, updates, by_bapo))
            )
    unit, steps = run.by_step(run.updates)
    if len(steps) > 1:
        for label, updates in _parts(steps, STRETCHES):
            rows.append((f"{unit}{'s' if ' to ' in label else ''} {label}", *_shares(run, updates, by_bapo)))
    yield from _table(rows)


def _searches(run):
    """Answer question 2."""
    target = run.config.positive_contribution_target
    ends = [
        sum(values(run.updates, name)) / len(run.updates) for name in ("met_at_start", "met_by_moving", "saturated")
    ]
    yield (
        f"  Searching for the target {target:g}: met at the start in {_percent(ends[0])} of the updates, met by moving "
        f"bounds in {_percent(ends[1])}, saturated in {_percent(ends[2])}."
    )
    yield from _cost(run)
    for name, key in (
        ("rho at the start of the search", "positive_contribution_start"),
        ("highest rho that bounds reach", "positive_contribution_highest"),
    ):
        rho = values(run.updates, key)
        yield f"  {name}: {median(rho):.3f} (median of the updates; {min(rho):.3f} to {max(rho):.3f})"
    yield "  How searches over all tokens of an update end with other targets, as shares of the updates:"
    for contribution in sorted(CONTRIBUTIONS, key=lambda one: one != run.config.contribution):
        rows = [(f"contribution={contribution}", "met at the start", "met by moving", "saturated")]
        for one, shares in ends_of_search(run, contribution, sorted({*TARGETS, target})).items():
            rows.append((f"target {one:g}{' (searched for)' if one == target else ''}", *map(_percent, shares)))
        yield from _table(rows)


def _cost(run):
    """Say how often exact bounds needed more than the update's own pass, or would have with BAPO."""
    updates = [update.values for update in run.updates if "redone" in update.values]
    if not updates:  # a record of version 0.2, or of another trainer
        return
    forwards, redone = (_percent(fmean(update[name] for update in updates)) for name in ("extra_forward", "redone"))
    made = "made" if run.applied else "would have made"
    yield (
        f"  To find exact bounds, {forwards} of the updates {made} an extra forward pass, and {redone} {made} their "
        f"forwards and backwards twice: about {cost_of_bounds(updates):.2f} times the time of an update."
    )


def _bounds(run):
    """Answer question 3."""
    rows = [("", "A > 0 clipped", "A < 0 clipped", *(f"rho ({contribution})" for contribution in CONTRIBUTIONS))]
    if run.own_clip is not None:
        low, high = run.own_clip["low"], run.own_clip["high"]
        found = fixed_bounds(run, low, high)
        rho = ("-", "-") if found is None else _rho(found.rho)
        rows.append((f"the run's loss, [{low:g}, {high:g}]", *_shares(run, run.updates, by_bapo=False), *rho))
    rho = {run.config.contribution: median(values(run.updates, "positive_contribution"))}
    rows.append(("the bounds that BAPO's search finds", *_shares(run, run.updates, by_bapo=True), *_rho(rho)))
    for low, high in BOUNDS:
        found = fixed_bounds(run, low, high)
        row = (
            (_percent(found.positive), _percent(found.negative), *_rho(found.rho))
            if found
            else ("not on the run's grid",)
        )
        rows.append((f"[{low:g}, {high:g}]", *row))
    yield from _table(rows)
    dual = " The row of the run's loss counts its dual clip too." if run.own_clip and run.own_clip["dual_clip"] else ""
    yield f"  rho is the median of the updates.{dual}"
    yield (
        "  These figures are about this run's tokens: with other bounds the tokens would differ from the second update "
        "of a rollout batch on."
    )


def _shares(run, updates, by_bapo):
    return tuple(map(_percent, clipped(run, updates, by_bapo)))


def _parts(groups: dict[int, list[Update]], most: int) -> Iterator[tuple[str, list[Update]]]:
    """Join neighboring groups, so that there are at most ``most``."""
    labels = list(groups)
    size = -(-len(labels) // most)
    for first in range(0, len(labels), size):
        some = labels[first : first + size]
        label = f"{some[0]}" if len(some) == 1 else f"{some[0]} to {some[-1]}"
        yield label, [update for one in some for update in groups[one]]


def _rho(rho: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{rho[contribution]:.3f}" if contribution in rho else "-" for contribution in CONTRIBUTIONS)


def _percent(share: float) -> str:
    """Format a share. Small shares keep two digits, so that 0.02% is not 0.0%."""
    return f"{100 * share:{'.1f' if share == 0 or share >= 0.01 else '.2g'}}%"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Align the columns, the first to the left and the others to the right."""
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=False)]
        yield "    " + "   ".join([f"{first:<{widths[0]}}", *cells])


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="record-*.jsonl, or a folder with records")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="default: report.png beside the first record")
    arguments = parser.parse_args()
    try:
        runs = {}
        for path in arguments.runs:
            found = read_runs(path)
            runs |= {str(path if len(found) == 1 else run.starts[0].path): run for run in found}
        for name, run in runs.items():
            print("\n".join(report(name, run)), end="\n\n")
        out = arguments.out or next(iter(runs.values())).starts[0].path.with_name("report.png")
        out = out / "report.png" if out.is_dir() else out
        drawn = {name: run for name, run in runs.items() if run.updates}
        if drawn:
            picture(drawn).savefig(out, dpi=110)
            print(f"Picture: {out}")
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
