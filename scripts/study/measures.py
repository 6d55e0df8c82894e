# SPDX-License-Identifier: Apache-2.0
"""Measure the tokens of every update, and summarise runs. ``R`` is the number of runs, ``U`` of updates."""

import torch
from torch import Tensor

from scripts.study.methods import Tokens, contribution_at

POINTS = 16  # length of a series in the table
SEARCHED = ("positive_contribution_start", "search_steps", "saturated")


@torch.no_grad()
def token_measures(tokens: Tokens, gradient: Tensor, bounds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Measure the tokens of one update. Each result is ``(R,)``.

    Args:
        tokens: the tokens of the update.
        gradient: gradient of the loss with respect to ``log_prob``, ``(R, N, T)``, whatever the method.
        bounds: ``low`` and ``high``, ``(R,)``.

    Returns:
        ``no_gradient_positive`` and ``no_gradient_negative``: share of the tokens of that sign without a gradient.
        ``negative_above_3``: share of the negative tokens that have r > 3. ``gradient_above_3``: share of
        sum(|gradient|) contributed by negative tokens with r > 3. ``effective_sample``: (sum r)^2 / (n sum r^2), which
        is 1 if all ratios are equal. ``rho``: the positive contribution at the bounds.
    """
    ratio = tokens.log_ratio().exp() * tokens.mask
    positive, negative = (tokens.advantages > 0) & tokens.mask, (tokens.advantages < 0) & tokens.mask

    def share(part, whole):
        return part.sum((1, 2)) / whole.sum((1, 2)).clamp(min=1e-12)

    return {
        "no_gradient_positive": share(positive & (gradient == 0), positive),
        "no_gradient_negative": share(negative & (gradient == 0), negative),
        "negative_above_3": share(negative & (ratio > 3), negative),
        "gradient_above_3": share(gradient.abs() * (negative & (ratio > 3)), gradient.abs()),
        "effective_sample": share(ratio, ratio.square()) * share(ratio, tokens.mask),
        "rho": contribution_at(tokens, bounds["low"], bounds["high"]),
    }


def crossing(reward: Tensor, target: float) -> Tensor:
    """Find the probe where ``reward`` ``(P, R)`` first reaches the target, interpolated linearly; NaN if none does."""
    reached = reward >= target
    after = reached.int().argmax(0).clamp(min=1)
    before, later = reward.gather(0, after[None] - 1).squeeze(0), reward.gather(0, after[None]).squeeze(0)
    part = ((target - before) / (later - before).clamp(min=1e-9)).clamp(0, 1)
    return torch.where(reached.any(0), after - 1 + part, torch.nan)


def summaries(updates: dict[str, Tensor], probes: dict[str, Tensor], target: float) -> dict[str, Tensor]:
    """Compute the columns of the table from the measures of the runs, each ``(R,)`` or a series ``(R, points)``.

    Args:
        updates: ``(U, R)`` by measure.
        probes: reward and entropy of the policy before the first update and at equal distances after it,
            ``(P + 1, R)``.
        target: the target reward, for the number of updates to it.
    """
    reward, entropy, norm = probes["reward"], probes["entropy"], updates["grad_norm"]
    every = len(norm) / (len(reward) - 1)
    place = crossing(reward, target)
    after = place.nan_to_num().ceil().long()[None]
    columns = {
        "start_reward": reward[0],
        "mean_reward": reward[1:].mean(0),
        "updates_to_target": place * every,
        "entropy_at_target": torch.where(place.isnan(), torch.nan, entropy.gather(0, after).squeeze(0)),
        "entropy": entropy[-1],
        "mean_entropy": entropy[1:].mean(0),
        "norm_ratio": norm.amax(0) / norm.median(0).values,
    }
    means = ("effective_sample", "no_gradient_positive", "no_gradient_negative", "negative_above_3", "gradient_above_3")
    columns |= {key: updates[key].mean(0) for key in (*means, "rho")}
    columns |= {"c_low": updates["low"].mean(0), "c_high": updates["high"].mean(0)} | search_columns(updates)
    columns |= {f"{key}_series": thinned(values) for key, values in probes.items()}
    for key, source in (("rho_series", "rho"), ("c_low_series", "low"), ("c_high_series", "high")):
        columns[key] = updates[source].float().view(POINTS, -1, norm.shape[1]).mean(1).T
    return columns


def search_columns(updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rho before the search, how searches ended, as shares of the updates, and their candidates ``(R, U)``.

    Without a search the figures are NaN and the candidates ``(R, 0)``.
    """
    runs = updates["grad_norm"].shape[1]
    if "search_steps" not in updates:
        names = ("rho_start", "at_once", "on_the_way", "out_of_reach")
        return {key: torch.full((runs,), torch.nan) for key in names} | {"search_steps": torch.zeros(runs, 0)}
    steps, saturated = updates["search_steps"], updates["saturated"] > 0
    at_once = (steps == 0) & ~saturated
    return {
        "rho_start": updates["positive_contribution_start"].mean(0),
        "at_once": at_once.float().mean(0),
        "on_the_way": (~at_once & ~saturated).float().mean(0),
        "out_of_reach": saturated.float().mean(0),
        "search_steps": steps.T.int(),
    }


def thinned(values: Tensor) -> Tensor:
    """Keep about ``POINTS`` of the probes ``(P + 1, R)``, including the first and the last; ``(R, points)``."""
    return values[:: max(1, (len(values) - 1) // POINTS)].T
