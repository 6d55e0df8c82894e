# SPDX-License-Identifier: Apache-2.0
"""Compute the report's numbers, as its JSON holds them, from the sums of ``measure``. Shares are between 0 and 1.

The page reads every number by its path in this JSON. If you add a number here, show it in ``page.html.jinja`` too; a
test checks that. The sentences about the numbers are in ``verdict``.
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
    """Compute the numbers of the report on the dump in ``folder``.

    Raises:
        ValueError: as in ``measure``, or the dump's metadata are not usable.
    """
    about = about_dump(folder)
    own = loss_of_run(about)
    # If the metadata describe the run's loss but no dual clip, the run had none. If they do not describe the loss well
    # enough for ``loss_of_run``, assume verl's default.
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
    """Name the loss for the reader. With fixed bounds, as with method=grpo, ``loss_mode=bapo`` is PPO's clip."""
    if loss_mode == "bapo" and own is not None and own.search is None:
        return "PPO's clip with fixed bounds"
    return loss_mode


def _share(part, whole):
    return float(part / whole) if whole else 0.0


def _gradient(sums):
    return sums["positive_gradient"] + sums["negative_gradient"]


def _spread_of_ratios(sums: Counter) -> dict[str, float]:
    """Describe how far the ratios of some tokens are from 1."""
    return {
        "clipped_by_grpo": _share(sums["clipped_by_grpo"], sums["positive"] + sums["negative"]),
        "effective_sample_size": _share(sums["ratio"] ** 2, sums["tokens"] * sums["ratio_squared"]),
        "negative_above_3": _share(sums["negative_above_3"], sums["negative"]),
        "gradient_above_3": _share(sums["gradient_above_3"], _gradient(sums)),
    }


def _rows(measured: Measured, group: str) -> list[dict] | None:
    """Make a row for each label of a group; None if the dump has no such labels."""
    rows = sorted(measured.sums[group].items())
    return [{group: label, "tokens": int(sums["tokens"]), **_spread_of_ratios(sums)} for label, sums in rows] or None


def _methods(methods: dict[str, Method], measured: Measured) -> list[dict]:
    """Compute how much gradient each method leaves, for tokens of both signs and for those of either sign.

    ``without_gradient`` is the share of the tokens to which the method gives no gradient. ``gradient_left`` is its sum
    of |gradient| as a share of the sum of r*|A|. Methods that need the start of responses are left out if the dump does
    not have it.
    """
    total = measured.sums["all"][0]
    tokens = torch.tensor([total["positive"], total["negative"]])
    sizes = torch.tensor([total["positive_gradient"], total["negative_gradient"]])
    rows = []
    for method, without, left in zip(methods, measured.without_gradient, measured.gradient_left, strict=True):
        if left.isnan().any():  # the method needs to know where responses begin, and the dump does not say it
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
    """Average over the updates rho before the search and the lowest and highest rho on the search's path.

    For each target, also compute the share of updates in which the search would end in each of three ways.
    """
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
