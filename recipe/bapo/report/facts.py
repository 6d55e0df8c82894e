# SPDX-License-Identifier: Apache-2.0
"""The report's numbers, as JSON holds them, from what ``measure`` found. Shares are of 1."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import torch

from bapo import BAPOConfig
from bapo.search import candidates, reaches_target
from recipe.bapo.report.measure import (
    BOXES,
    COUNT,
    DEFINITIONS,
    EDGES,
    NEGATIVE,
    POSITIVE,
    WA,
    WAR,
    Measured,
    outcomes,
    search,
)

SIGNS = {"positive": POSITIVE, "negative": NEGATIVE}
CURVE = [round(0.25 + 0.01 * k, 2) for k in range(51)]  # targets of the picture
ABOVE = (1.0, 2.0, 3.0, 10.0)  # of the unbounded side
DUAL_CLIP = 3.0
OWN = "this run's own bounds"
MATTERS = 0.2  # a share of the updates from which the search is worth having


def facts(
    measured: Measured,
    config: BAPOConfig,
    targets: tuple[float, ...],
    about: dict[str, str],
    clip_ratio_c: float | None,
    updates_per_rollout_batch: int | None = None,
) -> dict:
    """All numbers of the report.

    Args:
        measured: of the dump.
        config: the ranges of the bounds; its measure and weight are those of the verdict.
        targets: of the table.
        about: what the dump says of its run; ``switches`` are those of its loss.
        clip_ratio_c: the run's dual clip.
        updates_per_rollout_batch: where the dump does not number its updates; None: unknown.
    """
    total = sum(update.by_ratio for update in measured.updates)
    tokens = sum(update.tokens for update in measured.updates)
    switches = json.loads(about["switches"]) if "switches" in about else None
    found = {
        "dump": {
            "updates": len(measured.updates),
            "tokens": int(tokens),
            "clip_ratio_c": clip_ratio_c if clip_ratio_c is not None and clip_ratio_c < 1e6 else None,
            "bound_scope": about.get("bound_scope"),
            "switches": switches,
        },
        "rho": [_rho(measured, config, definition, targets) for definition in DEFINITIONS],
        "corrected": _corrected(measured.updates, config),
        "probability": _boxes(measured.probability),
        "entropy": _boxes(measured.entropy) if measured.entropy else None,
        "unbounded": _unbounded(measured.updates, total),
        "masked": _masked(measured, total, config, targets, switches, clip_ratio_c),
        "signs": _signs(measured, total, tokens),
        "by_update": _by_update(measured.updates, updates_per_rollout_batch),
        "by_age": _by_age(measured.by_age),
    }
    return {"verdict": _verdict(found, config), "staleness": _staleness(found), **found}


def _rho(measured, config, definition, targets):
    contribution, token_weight = definition
    config = replace(config, contribution=contribution, token_weight=token_weight)
    statistics = measured.statistics[definition]
    tried = [candidates(update, config) for update in statistics]
    rho = [c.positive_contribution for c in tried]
    start = [update[0].item() for update in rho]
    reached = [reaches_target(c.p, c.n, torch.tensor(CURVE, dtype=torch.float64)[:, None]) for c in tried]
    first, any_of = (torch.stack([f(update) for update in reached]) for f in (lambda x: x[:, 0], lambda x: x.any(1)))
    at_once, way, never = (where.double().mean(0) for where in (first, any_of & ~first, ~any_of))
    rows = []
    for target in targets:
        of_target = search(statistics, replace(config, positive_contribution_target=target))
        row = dict(zip(("at_once", "on_the_way", "never"), outcomes(of_target), strict=True))
        rows.append({"target": target, **row, "c_low": fmean(of_target["low"]), "c_high": fmean(of_target["high"])})
    return {
        "contribution": contribution,
        "token_weight": token_weight,
        "start": {"mean": fmean(start), "lowest": min(start), "highest": max(start)},
        "reach": {side: fmean(f(update).item() for update in rho) for side, f in (("from", min), ("to", max))},
        "targets": rows,
        "curve": {"target": CURVE, "at_once": at_once.tolist(), "on_the_way": way.tolist(), "never": never.tolist()},
    }


def _corrected(updates, config):
    """Mean rho at the start by the uniform weight without and with rollout correction's weights; None without any."""
    if updates[0].corrected is None:
        return None
    config = replace(config, token_weight="uniform")
    sides = {
        "without": [update.statistics["uniform"] for update in updates],
        "with": [update.corrected for update in updates],
    }
    return {key: fmean(search(sums, config)["positive_contribution_start"]) for key, sums in sides.items()}


def _boxes(quantiles):
    found = {}
    edges = [0.0, *BOXES, None]
    for name, sign in SIGNS.items():
        found[name] = []
        for box in range(len(BOXES) + 1):
            tokens, values = quantiles.of(sign, box)
            found[name].append({"above": edges[box], "to": edges[box + 1], "tokens": tokens, "percentiles": values})
    return found


def _unbounded(updates, total):
    negative, size = total[NEGATIVE], total[:, :, WAR].sum()
    above = []
    for edge in ABOVE:
        part = negative[EDGES.index(edge) + 1 :]
        above.append(
            {
                "ratio": edge,
                "negative_tokens": _share(part[:, COUNT].sum(), negative[:, COUNT].sum()),
                "negative_gradient": _share(part[:, WAR].sum(), negative[:, WAR].sum()),
                "gradient": _share(part[:, WAR].sum(), size),
            }
        )
    sizes = [update.effective_sample_size for update in updates]
    return {
        "above": above,
        "largest_ratio": max(update.largest_negative for update in updates),
        "effective_sample_size": {"mean": fmean(sizes), "lowest": min(sizes)},
        "second_moment_of_log_ratio": _share(
            sum(update.log_squared for update in updates), sum(update.tokens for update in updates)
        ),
    }


def _share(part, whole):
    return float(part / whole) if whole else 0.0


def _masked(measured, total, config, targets, switches, clip_ratio_c):
    """Of each method: share of the tokens whose gradient is smaller than r*|A|, and by how much all of it shrinks."""

    def clipped(low, high, dual_clip=None, high_of_negative=None, low_of_positive=None):
        # Touched tokens and removed r*|A| by sign.
        taken = torch.zeros(2, 2, dtype=torch.float64)
        parts = []
        if high is not None:
            parts.append((POSITIVE, slice(EDGES.index(high) + 1, None)))
        if low_of_positive is not None:
            parts.append((POSITIVE, slice(None, EDGES.index(low_of_positive) + 1)))
        if low is not None:
            parts.append((NEGATIVE, slice(None, EDGES.index(low) + 1)))
        for above in (dual_clip, high_of_negative):
            if above is not None:
                parts.append((NEGATIVE, slice(EDGES.index(above) + 1, None)))
        for sign, buckets in parts:
            taken[sign] += total[sign, buckets][:, [COUNT, WAR]].sum(0)
        return taken

    above_1 = slice(EDGES.index(1.0) + 1, None)
    topr = torch.stack([total[sign, above_1, COUNT].sum() for sign in (NEGATIVE, POSITIVE)])
    excess = total[NEGATIVE, above_1, WAR].sum() - total[NEGATIVE, above_1, WA].sum()
    change = total[POSITIVE, :, WAR].sum() - total[POSITIVE, :, WA].sum()
    rows = []
    if switches is not None:
        own = BAPOConfig(**switches)
        if own.fixed:
            what = f"[{own.ratio_lower_start:g}, {own.ratio_upper_start:g}], fixed"
        else:
            what = f"BAPO, {own.contribution}, {own.token_weight}, target {own.positive_contribution_target:g}"
        rows.append((OWN, what, _by_search([update.own for update in measured.updates], own)))
    rows += [
        ("GRPO", "[0.8, 1.2]", clipped(0.8, 1.2)),
        ("clip-higher", "[0.8, 1.28] (DAPO)", clipped(0.8, 1.28)),
        ("dual clip alone", "A < 0 with r > 3; adds to any [low, high]", clipped(None, None, DUAL_CLIP)),
        ("widest", "[0.9, 3.0]", clipped(0.9, 3.0)),
    ]
    for contribution in ("value", "gradient"):
        for target in targets:
            of_target = replace(config, contribution=contribution, positive_contribution_target=target)
            what = f"{contribution}, {config.token_weight}, this run's updates searched"
            taken = _by_search([update.statistics for update in measured.updates], of_target)
            rows.append((f"BAPO {target:g}", what, taken))
    rows += [
        ("ABC-GRPO", "0.8 < r < 1.2 for both signs", clipped(0.8, 1.2, high_of_negative=1.2, low_of_positive=0.8)),
        (
            "M2PO",
            "largest (log r)^2 of A > 0, r > 1 and A < 0, r < 1 until the rest averages 0.04",
            sum(update.m2po for update in measured.updates),
        ),
        (
            "TOPR",
            "weight 1 for A > 0, min(r, 1) for A < 0, in place of r; below 0: adds",
            torch.stack([topr, torch.stack([excess, change])], dim=1),
        ),
    ]
    tokens = total[:, :, COUNT].sum(1)
    sizes = total[:, :, WAR].sum(1)
    return [{"method": name, "what": what, **_shares_of(taken, tokens, sizes)} for name, what, taken in rows]


def _shares_of(taken, tokens, sizes):
    found = {}
    for key, column, whole in (("tokens", 0, tokens), ("gradient", 1, sizes)):
        found[key] = {name: _share(taken[sign, column], whole[sign]) for name, sign in SIGNS.items()}
        found[key]["all"] = _share(taken[:, column].sum(), whole.sum())
    return found


def _by_search(statistics, config):
    # Tokens and r*|A| that the bounds of every update's own search clip. statistics: of each update, by token weight.
    bounds = search([of_update[config.token_weight] for of_update in statistics], config)
    high, low = config.upper.points().tolist(), config.lower.points().tolist()
    taken = torch.zeros(2, 2, dtype=torch.float64)
    for of_update, low_bound, high_bound in zip(statistics, bounds["low"], bounds["high"], strict=True):
        tokens, sizes = of_update["uniform"].tokens, of_update["uniform"].contribution
        above_high, below_low = slice(high.index(high_bound) + 1, None), slice(low.index(low_bound) + 1)
        for column, positive, negative in (
            (0, tokens.positive_tokens, tokens.negative_tokens),
            (1, sizes.positive_weighted_ratio, sizes.negative_weighted_ratio),
        ):
            taken[POSITIVE, column] += positive[above_high].sum()
            taken[NEGATIVE, column] += negative[below_low].sum()
    return taken


def _signs(measured, total, tokens):
    size = total[:, :, WAR].sum()
    found = {}
    for name, sign in SIGNS.items():
        found[name] = {
            "tokens": _share(total[sign, :, COUNT].sum(), tokens),
            "gradient": _share(total[sign, :, WAR].sum(), size),
            "lengths": measured.lengths.of(sign),
        }
    found["zero"] = {"tokens": _share(sum(update.zero for update in measured.updates), tokens)}
    return found


def _row(by_ratio):
    counts, sizes = by_ratio[:, :, COUNT], by_ratio[:, :, WAR]
    outside = counts[POSITIVE, EDGES.index(1.2) + 1 :].sum() + counts[NEGATIVE, : EDGES.index(0.8) + 1].sum()
    return {
        "tokens": int(counts.sum()),
        "clipped_by_grpo": _share(outside, counts.sum()),
        "negative_above_3": _share(counts[NEGATIVE, EDGES.index(3.0) + 1 :].sum(), counts[NEGATIVE].sum()),
        "gradient_above_3": _share(sizes[NEGATIVE, EDGES.index(3.0) + 1 :].sum(), sizes.sum()),
    }


def _by_update(updates, per_batch):
    if updates[0].number is None and per_batch is None:
        return None
    groups: dict[int, list] = {}
    for index, update in enumerate(updates):
        groups.setdefault(index % per_batch if update.number is None else update.number, []).append(update)
    return [
        {
            "update": number + 1,
            "updates": len(group),
            **_row(sum(update.by_ratio for update in group)),
            "effective_sample_size": fmean(update.effective_sample_size for update in group),
            "second_moment_of_log_ratio": _share(
                sum(update.log_squared for update in group), sum(update.tokens for update in group)
            ),
        }
        for number, group in sorted(groups.items())
    ]


def _by_age(tables):
    ages = [(age, table.view(3, 2, -1).permute(1, 2, 0)) for age, table in sorted(tables.items())]
    return [{"age": age, **_row(by_ratio)} for age, by_ratio in ages] or None


def _percent(share):
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _verdict(found, config):
    """Three sentences: what is clipped, who carries the gradient, which target is in reach; and one on staleness."""
    own = next((row for row in found["masked"] if row["method"] == OWN), None)
    row = own or next(row for row in found["masked"] if row["method"] == "GRPO")
    who = f"This run's own bounds ({row['what']}) clip" if own else f"GRPO's bounds {row['what']} would clip"
    clip = f"{who} {_percent(row['tokens']['all'])} of the tokens with "
    clip += f"{_percent(row['gradient']['all'])} of the gradient's size."
    signs, above = found["signs"], {row["ratio"]: row for row in found["unbounded"]["above"]}
    carries = (
        f"Tokens with A < 0 are {_percent(signs['negative']['tokens'])} of the tokens and carry "
        f"{_percent(signs['negative']['gradient'])} of the gradient's size before clipping; those of them with r > 3, "
        f"which no bound of PPO or BAPO touches, carry {_percent(above[3.0]['gradient'])}."
    )
    name = (config.contribution, config.token_weight)
    rho = next(one for one in found["rho"] if (one["contribution"], one["token_weight"]) == name)
    curve = rho["curve"]
    on_the_way = curve["on_the_way"]
    best = max(range(len(CURVE)), key=lambda k: on_the_way[k])
    measure = f"rho ({', '.join(name)}) starts at {rho['start']['mean']:.3f} and bounds move it from "
    measure += f"{rho['reach']['from']:.3f} to {rho['reach']['to']:.3f} on average; "
    if on_the_way[best] < 0.005:
        measure += "no target stops the search on its way: BAPO has nothing to adapt here."
    else:
        what = "BAPO can adapt here" if on_the_way[best] >= MATTERS else "BAPO would mostly be a fixed range here"
        measure += (
            f"target {CURVE[best]:g} stops the search on its way in {_percent(on_the_way[best])} of the updates, more "
        )
        measure += f"than any other: {what}."
    return [clip, carries, measure]


def _staleness(found):
    """One sentence, or None where the dump says neither the update's number nor the weights' age."""
    for key, name in (("by_age", "age"), ("by_update", "update")):
        rows = found[key]
        if rows and len(rows) > 1:
            first, last = rows[0], rows[-1]
            before, after = first["clipped_by_grpo"], last["clipped_by_grpo"]
            where = f"[0.8, 1.2] clips {_percent(before)} of the tokens at {name} {first[name]}, {_percent(after)} at "
            where += f"{name} {last[name]}"
            if max(before, after) < 0.001:
                return f"{where}: hardly anything is clipped."
            if after > 2 * before:
                return f"{where}: it grows with staleness."
            return f"{where}: staleness is not the main cause; compare the log-probs of sampler and trainer."
    return None
