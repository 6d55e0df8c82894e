# SPDX-License-Identifier: Apache-2.0
"""The report's numbers, as its JSON holds them, from what ``measure`` found. Shares are of 1.

The page reads every number by its path in this JSON; a number that is added here needs its place in
``page.html.jinja``, which a test holds. The sentences on them are in ``verdict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from bapo import BAPOConfig
from bapo.search import candidates, reaches_target
from recipe.bapo.records.tokens import about_dump
from recipe.bapo.report.measure import ABOVE, COLUMNS, DEFINITIONS, NEGATIVE, POSITIVE, key_of, measure, search
from recipe.bapo.report.methods import loss_of_run, methods_to_compare, settings_of
from recipe.bapo.report.verdict import OWN, staleness, verdict

TARGETS = (0.4, 0.45, 0.5, 0.55)
CURVE = [round(0.25 + 0.01 * k, 2) for k in range(51)]  # targets of the picture
VERLS_CLIP_RATIO_C = 3.0
SIGNS = {"positive": POSITIVE, "negative": NEGATIVE}


def report_on(
    folder: Path,
    targets: tuple[float, ...] = TARGETS,
    ranges: dict[str, float] | None = None,
    clip_ratio_c: float | None = None,
    watch: Callable[[Iterable], Iterable] = iter,
) -> tuple[dict, BAPOConfig]:
    """The numbers of the report, and the switches whose ranges they are for: the run's own if it searches.

    Args:
        folder: of the dump.
        targets: of the tables.
        ranges: values of ``ratio_lower_start`` and so on.
        clip_ratio_c: the run's dual clip; None: as the dump says, else 3.0.
        watch: as in ``measure``.

    Raises:
        ValueError: as ``read_dump``, or a range or target is not usable.
    """
    about = about_dump(folder)
    if clip_ratio_c is None:
        clip_ratio_c = float(about.get("clip_ratio_c", VERLS_CLIP_RATIO_C))
    own = loss_of_run(about, clip_ratio_c)
    config = replace(own if isinstance(own, BAPOConfig) else BAPOConfig(), **(ranges or {}))
    methods = methods_to_compare(config, targets, clip_ratio_c)
    if own is not None:
        methods = {OWN: own, **methods}
    measured = measure(folder, config, clip_ratio_c, methods, watch)
    updates = measured.updates
    total = _named(sum(update.columns for update in updates))
    tokens = sum(update.tokens for update in updates)
    of_config = measured.statistics[config.contribution, config.token_weight]
    effective_sizes = search(of_config, config)["effective_sample_size"]
    report = {
        "dump": {
            "updates": len(updates),
            "tokens": tokens,
            "loss_mode": about.get("loss_mode"),
            "clip_ratio_c": clip_ratio_c if clip_ratio_c < 1e6 else None,
        },
        "by_update": _by_update(updates, effective_sizes),
        "by_age": [{"age": age, **_row(columns)} for age, columns in sorted(measured.by_age.items())] or None,
        "signs": _signs(total, tokens),
        "methods": _left_by(methods, updates, total, clip_ratio_c),
        "ranges": {"c_low": vars(config.lower), "c_high": vars(config.upper)},
        "rho": [_rho(measured, replace(config, contribution=c, token_weight=w), targets) for c, w in DEFINITIONS],
        "curve": _curve(measured, config),
        "corrected": _corrected(updates, config),
        "unbounded": _unbounded(updates, total, effective_sizes),
    }
    return {"verdict": verdict(report, config, about), "staleness": staleness(report), **report}, config


def _named(columns):
    return dict(zip(COLUMNS, columns.tolist(), strict=True))


def _share(part, whole):
    return float(part / whole) if whole else 0.0


def _signs(total, tokens):
    sizes = total["positive_gradient"] + total["negative_gradient"]
    found = {
        sign: {"tokens": _share(total[sign], tokens), "gradient": _share(total[f"{sign}_gradient"], sizes)}
        for sign in SIGNS
    }
    return {**found, "zero": {"tokens": _share(tokens - total["positive"] - total["negative"], tokens)}}


def _left_by(methods, updates, total, clip_ratio_c):
    """Of each method, by sign: the share of the tokens without a gradient, and of r*|A| what its gradient is."""
    without = sum(update.without_gradient for update in updates)
    left = sum(update.gradient_left for update in updates)
    tokens, sizes = (torch.tensor([total[sign + of] for sign in SIGNS]) for of in ("", "_gradient"))
    rows = []
    for (name, method), of_tokens, of_sizes in zip(methods.items(), without, left, strict=True):
        if of_sizes.isnan().any():  # it needs to know where responses begin, which the dump does not say
            continue
        rows.append(
            {
                "method": name,
                "settings": settings_of(method, clip_ratio_c),
                "without_gradient": _shares_by_sign(of_tokens, tokens),
                "gradient_left": _shares_by_sign(of_sizes, sizes),
                "positive_share": _share(of_sizes[POSITIVE], of_sizes.sum()),
            }
        )
    return rows


def _shares_by_sign(part, whole):
    of_sign = {name: _share(part[sign], whole[sign]) for name, sign in SIGNS.items()}
    return {"all": _share(part.sum(), whole.sum()), **of_sign}


def _rho(measured, config, targets):
    """Rho by one definition before the search, and what the search does for each target."""
    statistics = measured.statistics[config.contribution, config.token_weight]
    rho = [candidates(update, config).positive_contribution for update in statistics]
    before = [update[0].item() for update in rho]
    rows = []
    for target in targets:
        found = search(statistics, replace(config, positive_contribution_target=target))
        missed = [bool(saturated) for saturated in found["saturated"]]
        met = [steps == 0 and not out for steps, out in zip(found["search_steps"], missed, strict=True)]
        shares = {"already_met": fmean(met), "out_of_reach": fmean(missed)}
        moved = max(0.0, 1 - sum(shares.values()))
        bounds = {"c_low": fmean(found["low"]), "c_high": fmean(found["high"])}
        rows.append({"target": target, **shares, "met_by_moving": moved, **bounds})
    return {
        "contribution": config.contribution,
        "token_weight": config.token_weight,
        "before": {"mean": fmean(before), "lowest": min(before), "highest": max(before)},
        "reach": {side: fmean(f(update).item() for update in rho) for side, f in (("from", min), ("to", max))},
        "targets": rows,
    }


def _curve(measured, config):
    """What the picture draws: shares of the updates by target, and mean rho before the search, as ``config`` has it."""
    targets = torch.tensor(CURVE, dtype=torch.float64)[:, None]
    tried = [candidates(update, config) for update in measured.statistics[config.contribution, config.token_weight]]
    reached = torch.stack([reaches_target(update.p, update.n, targets) for update in tried])
    already, ever = reached[:, :, 0], reached.any(2)
    shares = {"already_met": already, "met_by_moving": ever & ~already, "out_of_reach": ~ever}
    return {
        "contribution": config.contribution,
        "token_weight": config.token_weight,
        "before": fmean(update.positive_contribution[0].item() for update in tried),
        "target": CURVE,
        **{name: where.double().mean(0).tolist() for name, where in shares.items()},
    }


def _corrected(updates, config):
    """Mean rho before the search by the uniform weight, without and with rollout correction's; None without any."""
    if updates[0].corrected is None:
        return None
    config = replace(config, token_weight="uniform")
    sides = {
        "without": [update.statistics[key_of(config)] for update in updates],
        "with": [update.corrected for update in updates],
    }
    return {key: fmean(search(sums, config)["positive_contribution_start"]) for key, sums in sides.items()}


def _unbounded(updates, total, effective_sizes):
    sizes = total["positive_gradient"] + total["negative_gradient"]
    return {
        "above": [
            {
                "ratio": ratio,
                "negative_tokens": _share(total[f"negative_above_{ratio:g}"], total["negative"]),
                "negative_gradient": _share(total[f"gradient_above_{ratio:g}"], total["negative_gradient"]),
                "gradient": _share(total[f"gradient_above_{ratio:g}"], sizes),
            }
            for ratio in ABOVE
        ],
        "largest_ratio": max(update.largest_negative for update in updates),
        "effective_sample_size": {"mean": fmean(effective_sizes), "lowest": min(effective_sizes)},
        "second_moment_of_log_ratio": _second_moment(updates),
    }


def _second_moment(updates):
    return _share(sum(update.log_squared for update in updates), sum(update.tokens for update in updates))


def _by_update(updates, effective_sizes):
    if updates[0].number is None:
        return None
    groups: dict[int, list[int]] = {}
    for index, update in enumerate(updates):
        groups.setdefault(update.number, []).append(index)
    return [
        {
            "update": number + 1,
            "updates": len(group),
            **_row(sum(updates[index].columns for index in group)),
            "effective_sample_size": fmean(effective_sizes[index] for index in group),
            "second_moment_of_log_ratio": _second_moment([updates[index] for index in group]),
        }
        for number, group in sorted(groups.items())
    ]


def _row(columns):
    sums = _named(columns)
    tokens, sizes = sums["positive"] + sums["negative"], sums["positive_gradient"] + sums["negative_gradient"]
    return {
        "tokens": int(tokens),
        "clipped_by_grpo": _share(sums["clipped_by_grpo"], tokens),
        "negative_above_3": _share(sums["negative_above_3"], sums["negative"]),
        "gradient_above_3": _share(sums["gradient_above_3"], sizes),
    }
