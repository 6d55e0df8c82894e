# SPDX-License-Identifier: Apache-2.0
"""What is measured of a run: at the tokens of every update, and over the run. ``R`` runs, ``U`` updates."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.study.methods import Tokens, contribution_at

POINTS = 16  # of a series; of the probes there is one more, before the first update
PATH_PARTS = 12  # equal parts of the search's path, for the histogram of the chosen bounds
FAST = 0.8  # the reward whose update is recorded


@torch.no_grad()
def token_measures(tokens: Tokens, bounds: dict[str, Tensor], dual_clip: float | None) -> dict[str, Tensor]:
    """What the tokens of one update say, each ``(R,)``.

    ``effective_sample`` is (sum r)^2 / (n sum r^2), 1 where every ratio is the same; ``gradient_above_3`` is the share
    that negative tokens with r > 3 have of the sum of |A| r over the tokens that no clip leaves without a gradient.
    """
    ratio = (tokens.log_prob - tokens.old_log_prob).clamp(-20, 20).exp() * tokens.mask
    positive, negative = (tokens.advantages > 0) & tokens.mask, (tokens.advantages < 0) & tokens.mask
    low, high = (bounds[key].float()[:, None, None] for key in ("low", "high"))
    above, below, beyond = positive & (ratio > high), negative & (ratio < low), negative & (ratio > 3)
    clipped = above | below
    if dual_clip is not None:
        clipped = clipped | (negative & (ratio > dual_clip))
    kept = ratio * tokens.advantages.abs() * ~clipped

    def share(part, whole):
        return part.sum((1, 2)) / whole.sum((1, 2)).clamp(min=1e-12)

    return {
        "clipped_positive": share(above, positive),
        "clipped_negative": share(below, negative),
        "negative_above_3": share(beyond, negative),
        "gradient_above_3": share(kept * beyond, kept),
        "effective_sample": share(ratio, ratio.square()) * share(ratio, tokens.mask),
        "rho_value": contribution_at(tokens, bounds["low"], bounds["high"], "value", dual_clip),
        "rho_gradient": contribution_at(tokens, bounds["low"], bounds["high"], "gradient", dual_clip),
    }


def summaries(updates: dict[str, Tensor], probes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of the table that a run's course gives, each ``(R,)`` or a series ``(R, points)``.

    Args:
        updates: by measure, ``(U, R)``.
        probes: reward and entropy of the policy, ``(POINTS + 1, R)``.
    """
    reward, norm = probes["reward"], updates["grad_norm"]
    reached = reward >= FAST
    per_probe = norm.shape[0] // POINTS
    first = torch.where(reached.any(0), reached.int().argmax(0) * per_probe, torch.nan)
    columns = {
        "mean_reward": reward[1:].mean(0),
        "updates_to_08": first,
        "entropy": probes["entropy"][-1],
        "mean_entropy": probes["entropy"][1:].mean(0),
        "norm_ratio": norm.amax(0) / norm.median(0).values,
        "least_effective_sample": updates["effective_sample"].amin(0),
        "most_gradient_above_3": updates["gradient_above_3"].amax(0),
    }
    means = ("effective_sample", "clipped_positive", "clipped_negative", "negative_above_3", "gradient_above_3")
    columns |= {key: updates[key].mean(0) for key in (*means, "rho_value", "rho_gradient")}
    columns |= {"c_low": updates["low"].mean(0), "c_high": updates["high"].mean(0)}
    columns |= search_columns(updates)
    columns |= {f"{key}_series": values.T for key, values in probes.items()}
    columns["grad_norm_series"] = windows(norm, largest=True)
    for key, source in (("rho_series", "rho_value"), ("c_low_series", "low"), ("c_high_series", "high")):
        columns[key] = windows(updates[source])
    return columns


def search_columns(updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """How the search ended; for methods without one NaN and no histogram.

    ``search_path`` counts updates: met at once, met in each of 12 equal parts of the path, out of reach.
    """
    runs = updates["grad_norm"].shape[1]
    if "search_steps" not in updates:
        names = ("rho_start", "rho_bounds", "at_once", "on_the_way", "out_of_reach")
        return {**{key: torch.full((runs,), torch.nan) for key in names}, "search_path": torch.zeros(runs, 0)}
    steps, saturated = updates["search_steps"], updates["saturated"] > 0
    longest = steps.amax().clamp(min=1)
    part = (1 + (steps - 1) * PATH_PARTS / longest).long().clamp(1, PATH_PARTS)
    place = torch.where(saturated, PATH_PARTS + 1, torch.where(steps == 0, 0, part))
    path = torch.nn.functional.one_hot(place, PATH_PARTS + 2).sum(0)
    shares = path / steps.shape[0]
    return {
        "rho_start": updates["positive_contribution_start"].mean(0),
        "rho_bounds": updates["positive_contribution"].mean(0),
        "at_once": shares[:, 0],
        "on_the_way": shares[:, 1:-1].sum(1),
        "out_of_reach": shares[:, -1],
        "search_path": path,
    }


def windows(values: Tensor, largest: bool = False) -> Tensor:
    """A series of ``POINTS`` means, or largest values, for each run: ``(U, R)`` to ``(R, POINTS)``."""
    parts = values.float().view(POINTS, -1, values.shape[1])
    return (parts.amax(1) if largest else parts.mean(1)).T
