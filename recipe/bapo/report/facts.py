# SPDX-License-Identifier: Apache-2.0
"""The report's numbers, as its JSON holds them, from what ``measure`` found. Shares are of 1.

The page reads every number by its path in this JSON; a number that is added here needs its place in
``page.html.jinja``, which a test holds. The sentences on them are in ``verdict``.
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from bapo import BAPOConfig, ClipStatistics
from bapo.search import measure_search_path, reaches_target
from recipe.bapo.records.tokens import about_dump
from recipe.bapo.report.measure import Measured, measure
from recipe.bapo.report.methods import Method, loss_of_run, methods_to_compare
from recipe.bapo.report.verdict import OWN, staleness, verdict

TARGETS = [k / 100 for k in range(1, 100)]


def report_on(folder: Path) -> dict:
    """The numbers of the report on the dump in ``folder``.

    Raises:
        ValueError: as ``read_dump``, or the dump's metadata are not usable.
    """
    about = about_dump(folder)
    own = loss_of_run(about)
    # A run that says its loss and no dual clip has none; of others verl's default is as good a guess as any.
    clip_ratio_c = float(about.get("clip_ratio_c", 3.0 if own is None else math.inf))
    config = (own and own.search) or BAPOConfig()
    methods = methods_to_compare(config, clip_ratio_c)
    if own is not None:
        methods = {OWN: own, **methods}
    measured = measure(folder, config, clip_ratio_c, list(methods.values()))
    total = measured.sums["all"][0]
    other = "gradient" if config.contribution == "value" else "value"
    report = {
        "dump": {
            "updates": len(measured.statistics),
            "tokens": int(total["tokens"]),
            "loss_mode": about.get("loss_mode"),
            "loss": _loss_name(about.get("loss_mode"), own),
            "bound_scope": about.get("bound_scope"),
        },
        "by_update": _rows(measured, "update"),
        "by_age": _rows(measured, "age"),
        "signs": {
            sign: {
                "tokens": _share(total[sign], total["tokens"]),
                "gradient": _share(total[f"{sign}_gradient"], _gradient(total)),
            }
            for sign in ("positive", "negative")
        },
        "methods": _methods(methods, measured),
        "rho": [_rho(measured.statistics, replace(config, contribution=c)) for c in (config.contribution, other)],
        "unbounded": {**_spread_of_ratios(total), "largest_ratio": measured.largest_negative},
    }
    return {"verdict": verdict(report), "staleness": staleness(report), **report}


def _loss_name(loss_mode, own):
    """The loss as a reader calls it: with fixed bounds ``loss_mode=bapo`` is PPO's clip, for example of method=grpo."""
    if loss_mode == "bapo" and own is not None and own.search is None:
        return "PPO's clip with fixed bounds"
    return loss_mode


def _share(part, whole):
    return float(part / whole) if whole else 0.0


def _gradient(sums):
    return sums["positive_gradient"] + sums["negative_gradient"]


def _spread_of_ratios(sums: Counter) -> dict[str, float]:
    """How far the ratios of some tokens are from 1."""
    return {
        "clipped_by_grpo": _share(sums["clipped_by_grpo"], sums["positive"] + sums["negative"]),
        "effective_sample_size": _share(sums["ratio"] ** 2, sums["tokens"] * sums["ratio_squared"]),
        "negative_above_3": _share(sums["negative_above_3"], sums["negative"]),
        "gradient_above_3": _share(sums["gradient_above_3"], _gradient(sums)),
    }


def _rows(measured: Measured, group: str) -> list[dict] | None:
    """A row for each label of a group, or None where the dump does not say it."""
    rows = sorted(measured.sums[group].items())
    return [{group: label, "tokens": int(sums["tokens"]), **_spread_of_ratios(sums)} for label, sums in rows] or None


def _methods(methods: dict[str, Method], measured: Measured) -> list[dict]:
    """Of each method, by sign: the share of the tokens without a gradient, and of r*|A| what its gradient is."""
    total = measured.sums["all"][0]
    tokens = torch.tensor([total["positive"], total["negative"]])
    sizes = torch.tensor([total["positive_gradient"], total["negative_gradient"]])
    rows = []
    for method, without, left in zip(methods, measured.without_gradient, measured.gradient_left, strict=True):
        if left.isnan().any():  # it needs to know where responses begin, which the dump does not say
            continue
        shares = {"without_gradient": _by_sign(without, tokens), "gradient_left": _by_sign(left, sizes)}
        rows.append({"method": method, "settings": methods[method].description(), **shares})
    return rows


def _by_sign(part, whole):
    return {
        "all": _share(part.sum(), whole.sum()),
        "positive": _share(part[0], whole[0]),
        "negative": _share(part[1], whole[1]),
    }


def _rho(statistics: list[ClipStatistics], config: BAPOConfig) -> dict:
    """Rho by one contribution: before the search, how far bounds move it, and for each target how a search ends."""
    tried = [measure_search_path(update, config) for update in statistics]
    rho = torch.stack([update.positive_contribution for update in tried])
    targets = torch.tensor(TARGETS, dtype=torch.float64)[:, None]
    reached = torch.stack([reaches_target(update.p, update.n, targets) for update in tried])
    already, ever = reached[:, :, 0], reached.any(2)
    ends = {"already_met": already, "met_by_moving": ever & ~already, "out_of_reach": ~ever}
    return {
        "contribution": config.contribution,
        "token_weight": config.token_weight,
        "before": rho[:, 0].mean().item(),
        "lowest": rho.amin(1).mean().item(),
        "highest": rho.amax(1).mean().item(),
        "target": TARGETS,
        **{end: where.double().mean(0).tolist() for end, where in ends.items()},
    }
