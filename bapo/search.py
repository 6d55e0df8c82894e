# SPDX-License-Identifier: Apache-2.0
"""The search of Algorithm 1, without a loop: the first pair of bounds on its path that reaches the target.

The path runs through the candidates of one bound and then through those of the other. These are so few that P and N
are computed at all of them at once. ``tests/support/oracle.py`` has the literal loop. Every rank relies on the search
choosing the same bounds, bit for bit, from the same sums, and on nothing here making the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.clip_statistics import ClipStatistics
from bapo.config import BAPOConfig

# Relative to P + N. With r = 1 and rho0 = 0.5 the start is often the tie P = N, which rounding must not decide.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of one optimizer update and how the search went, 0-d tensors.

    Attributes:
        low, high: ``c_low`` and ``c_high``, bounds on the ratio itself, float64.
        positive_contribution: rho = P / (P + N) at these bounds; 0 if no token counts.
        positive_contribution_start: rho at the start of the search.
        positive_contribution_highest: the highest rho on the path of the search.
        search_steps: number of pairs that the search passed over, and so the index of the bounds on its path, int64.
        met_at_start, met_by_moving, saturated: how the search ended, bool: at the first pair, at a later pair, or
            nowhere, so that the bounds are the last pair. All are false if no token has an advantage; the bounds are
            then the first pair.
    """

    low: Tensor
    high: Tensor
    positive_contribution: Tensor
    positive_contribution_start: Tensor
    positive_contribution_highest: Tensor
    search_steps: Tensor
    met_at_start: Tensor
    met_by_moving: Tensor
    saturated: Tensor


class SearchPath(NamedTuple):
    """The pairs of bounds on the path, in its order, with P and N at each (Eq. 8, Eq. 5).

    The bounds are float64 ``(pairs,)``, P and N ``(..., pairs)`` with the leading dimensions of the statistics.
    """

    low: Tensor
    high: Tensor
    p: Tensor
    n: Tensor

    @property
    def positive_contribution(self) -> Tensor:
        """rho = P / (P + N); 0 where no token counts."""
        return torch.where(self.p + self.n > 0, self.p / (self.p + self.n), 0.0)


class SearchEnd(NamedTuple):
    """Where a search ends: the number of the pair on the path, int64, and how, bool (see ``ClipBounds``); ``(...)``."""

    pair: Tensor
    met_at_start: Tensor
    met_by_moving: Tensor
    saturated: Tensor


@torch.no_grad()
def search_clip_bounds(stats: ClipStatistics, config: BAPOConfig) -> ClipBounds:
    """Pick the first pair of bounds on the path of Algorithm 1 that reaches the target, or the last pair.

    Non-finite input gives meaningless bounds; ``bapo.read_and_validate`` raises for it.

    Args:
        stats: statistics of the whole mini-batch, collected with the same ranges and token weight.
        config: the target, the ranges, the order and the definition of the contribution.

    Raises:
        ValueError: the statistics were collected with other ranges or another token weight.
    """
    path = measure_search_path(stats, config)
    end = end_on_path(reaches_target(path.p, path.n, config.positive_contribution_target))
    searched = sum(stats.tokens_by_sign) > 0
    rho = path.positive_contribution
    return ClipBounds(  # take(pair), because [pair] would make the host wait for it
        low=path.low.take(end.pair),
        high=path.high.take(end.pair),
        positive_contribution=rho.take(end.pair),
        positive_contribution_start=rho[0],
        positive_contribution_highest=rho.max(),
        search_steps=end.pair,
        met_at_start=searched & end.met_at_start,
        met_by_moving=searched & end.met_by_moving,
        saturated=end.saturated,  # false where P + N is 0, as without a token with an advantage
    )


def measure_search_path(stats: ClipStatistics, config: BAPOConfig) -> SearchPath:
    """Compute P and N at every pair of bounds on the path; see ``search_clip_bounds``.

    ``config`` may differ from that of the statistics in the target, the order and the contribution.
    """
    stats.check_config(config)
    p, n = stats.contributions(config.contribution)
    low, high = config.lower.grid(n.device), config.upper.grid(p.device)
    index_of_high, index_of_low = path_indices(config, high.device)
    return SearchPath(low[index_of_low], high[index_of_high], p[..., index_of_high], n[..., index_of_low])


def end_on_path(reached: Tensor) -> SearchEnd:
    """Return where the search ends: at the first pair that reaches the target, or at the last pair if none does.

    Args:
        reached: whether each pair on the path reaches it, ``(..., pairs)`` bool.
    """
    met, at_start = reached.any(-1), reached[..., 0]
    pair = torch.where(met, reached.int().argmax(-1), reached.shape[-1] - 1)
    return SearchEnd(pair, at_start, met & ~at_start, ~met)


def reaches_target(p: Tensor, n: Tensor, target: Tensor | float) -> Tensor:
    """Whether P / (P + N) is at least ``target``; true where P + N is 0. The arguments broadcast."""
    return (1 - target) * p - target * n >= -TOLERANCE * (p + n)


def path_indices(config: BAPOConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the order of the search, as indices into the grids of ``c_high`` and ``c_low``.

    One bound runs through its range, then the other (Algorithm 1). Both results are int64 ``(pairs,)``.
    """
    step = torch.arange(config.upper.steps + config.lower.steps + 1, device=device)
    if config.search_order == "upper_first":
        upper = step.clamp(max=config.upper.steps)
        return upper, step - upper
    lower = step.clamp(max=config.lower.steps)
    return step - lower, lower
