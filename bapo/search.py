# SPDX-License-Identifier: Apache-2.0
"""The search of Algorithm 1: the first pair of bounds on its path that reaches the target, found without a loop.

The path runs through the candidates of one bound and then through those of the other, so few that P and N are computed
at all of them at once from ``ContributionSums``. The order of the path, the definitions of the contribution and the
test for reaching the target may be changed here, together with the literal loop in ``tests/support/oracle.py``. Every
rank of a run relies on this choosing the same bounds, bit for bit, from the same sums, and on nothing here reading the
host.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.statistics import ClipStatistics

# Relative to P + N. With r = 1 and rho0 = 0.5 the start often is the tie P = N, which rounding must not decide.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class ClipBounds:
    """Clip bounds of one optimizer update and how they were found: 0-d tensors on the inputs' device.

    Attributes:
        low, high: ``c_low`` and ``c_high``, bounds on the ratio itself, float64.
        positive_contribution: rho = P / (P + N) at these bounds; 0 where no token counts.
        positive_contribution_start: rho at the start of the search.
        search_steps: candidates passed over before this one, int64.
        saturated: whether no candidate reaches the target, bool; the bounds are then the last ones. Console and docs
            call such a target out of reach.
    """

    low: Tensor
    high: Tensor
    positive_contribution: Tensor
    positive_contribution_start: Tensor
    search_steps: Tensor
    saturated: Tensor


class Candidates(NamedTuple):
    """All pairs of bounds in the order of the search and P and N at each (Eq. 8, Eq. 5): float64 ``(candidates,)``."""

    low: Tensor
    high: Tensor
    p: Tensor
    n: Tensor

    @property
    def positive_contribution(self) -> Tensor:
        """rho = P / (P + N); 0 where no token counts."""
        return torch.where(self.p + self.n > 0, self.p / (self.p + self.n), 0.0)


@torch.no_grad()
def search_clip_bounds(statistics: ClipStatistics, config: BAPOConfig) -> ClipBounds:
    """Pick the first candidate on the path of Algorithm 1 that reaches the target, or the last one.

    Non-finite input gives bounds without a meaning; ``bapo.read_values`` raises for it.

    Args:
        statistics: of the whole mini-batch, collected with the same ranges and token weight.
        config: the target, the ranges, the order and the definition of the contribution.

    Raises:
        ValueError: the statistics were collected with other ranges or another token weight.
    """
    tried = candidates(statistics, config)
    reached = reaches_target(tried.p, tried.n, config.positive_contribution_target)
    saturated = ~reached.any()
    chosen = torch.where(saturated, len(reached) - 1, reached.int().argmax())  # argmax: the first that reaches it
    rho = tried.positive_contribution
    return ClipBounds(  # take(chosen), because [chosen] would make the host wait for the index
        low=tried.low.take(chosen),
        high=tried.high.take(chosen),
        positive_contribution=rho.take(chosen),
        positive_contribution_start=rho[0],
        search_steps=chosen,
        saturated=saturated,
    )


def candidates(statistics: ClipStatistics, config: BAPOConfig) -> Candidates:
    """P and N at every candidate; see ``search_clip_bounds``."""
    statistics.check_config(config)
    sums = statistics.contribution_sums
    high = config.upper.points(sums.positive_weight.device)
    low = config.lower.points(sums.negative_weight.device)

    # Positive tokens below c_high and negative tokens above c_low keep their ratio. The others have that of the bound.
    p_inside = _sums_below(sums.positive_weighted_ratio)
    n_inside = _sums_above(sums.negative_weighted_ratio[:-1])
    if config.contribution == "value":  # Eq. 8, which ignores the dual clip
        p = p_inside + high * _sums_above(sums.positive_weight)
        n = n_inside + low * _sums_below(sums.negative_weight[:-1]) + sums.negative_weighted_ratio[-1]
    else:  # Eq. 5: the others have no gradient
        p, n = p_inside, n_inside

    index_of_high, index_of_low = search_path(config, high.device)
    return Candidates(low[index_of_low], high[index_of_high], p[index_of_high], n[index_of_low])


def reaches_target(p: Tensor, n: Tensor, target: Tensor | float) -> Tensor:
    """Whether P / (P + N) is ``target`` or more; where P + N is 0 it is. The arguments broadcast."""
    return (1 - target) * p - target * n >= -TOLERANCE * (p + n)


def search_path(config: BAPOConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The candidates in the order of the search, as indices into the points of ``c_high`` and of ``c_low``.

    One bound runs through its range, then the other (Algorithm 1). Both are int64 ``(candidates,)``.
    """
    step = torch.arange(config.upper.steps + config.lower.steps + 1, device=device)
    if config.search_order == "upper_first":
        upper = step.clamp(max=config.upper.steps)
        return upper, step - upper
    lower = step.clamp(max=config.lower.steps)
    return step - lower, lower


# Both sums are added up from their own end: the difference to the total would leave the rounding of large ratios in
# small sums.
def _sums_below(buckets: Tensor) -> Tensor:
    """Of one sum by bucket, the sum of the buckets below each point of the range, ``(points,)``."""
    return buckets.cumsum(0)[:-1]


def _sums_above(buckets: Tensor) -> Tensor:
    """Of one sum by bucket, the sum of the buckets above each point of the range, ``(points,)``."""
    return buckets.flip(0).cumsum(0).flip(0)[1:]
