# SPDX-License-Identifier: Apache-2.0
"""Forecast the bounds of an update before its forward pass, and say whether the forecast can be trusted.

Where a search ends depends on two things: which tokens are in the mini-batch, whose advantages and old log-probs are
known before any forward, and how far their ratios have moved from 1, which changes little from one update to the next.
So the forecast takes the weight of the update's own tokens, and the ratios of an earlier update.

An update that follows a forecast stays exact, because its caller checks it: the training forwards give the sums of the
update's own tokens, and a search on these gives the exact bounds. If ``same_tokens_are_clipped`` at both pairs of
bounds, the gradient is that of the exact bounds, because a clipped token has no gradient wherever the bound lies.
Otherwise the caller runs the update's forwards and backwards again, with the exact bounds. A forecast therefore
decides what an update costs, and not what is trained. (Only the value of the loss, which is logged, has the forecast
bounds in the terms of clipped tokens.)

Everything here works on sums that are already reduced over all ranks and on the host, so every rank decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bapo.clip_statistics import ClipStatistics
from bapo.config import BAPOConfig
from bapo.search import ClipBounds, end_on_path, measure_search_path, reaches_target, search_clip_bounds

# What recomputing an update costs, in forward passes. A forward takes 0.25 to 0.45 of an update (docs/performance.md).
REPEAT_COST = 4.0
# What a wrong forecast costs more than a forward before the update would have, in forward passes.
COST_OF_A_MISS = REPEAT_COST - 1
# How much more than a forward before each update may be spent in the long run, as a share of a forward.
ALLOWED_OVERHEAD = 0.05
# What right forecasts can save up at most for wrong ones, in forward passes: two repeated updates.
MOST_CREDIT = 2 * REPEAT_COST
MEMORY = 0.8  # weight of the past in the running mean of the error


@dataclass(frozen=True)
class Forecast:
    """The forecast of an update.

    Attributes:
        bounds: the result of the search on the forecast sums.
        trusted: whether to train with these bounds at once. Otherwise a forward pass before the update is cheaper.
    """

    bounds: ClipBounds
    trusted: bool


class BoundsForecaster:
    """Forecasts the bounds of one update after another, and learns from what each of them measured.

    The first update on a rollout batch takes its ratios from the first update on the batch before, any other from the
    update before it. (With old log-probs that are recomputed by the current weights, all ratios of first updates are
    1.)

    A forecast is trusted if

    - the search on its sums would clip the same tokens with the target higher and lower by the recent error, and
    - the credit covers a miss. In forward passes, a forecast that is right earns the one that it saves, one that is
      wrong costs ``COST_OF_A_MISS``, and each update earns ``ALLOWED_OVERHEAD``. However the updates behave, n of
      them then cost at most ``(1 + ALLOWED_OVERHEAD) * n + COST_OF_A_MISS`` forward passes.
    """

    def __init__(self, config: BAPOConfig):
        self.config = config
        # The latest first update on a batch (True), and the latest update of all (False).
        self._latest: dict[bool, ClipStatistics] = {}
        # Running means of the error in rho, of first updates and of the others.
        self._errors: dict[bool, float] = {}
        self._credit = COST_OF_A_MISS  # in forward passes, enough to try a first forecast

    @torch.no_grad()
    def forecast(self, own: ClipStatistics, first: bool) -> Forecast:
        """Forecast the bounds of the next update.

        Args:
            own: statistics of the update's tokens over all ranks, on the host. Only their weight and their number by
                sign are used, so they can be collected before the forward, with every ratio 1.
            first: whether this is the first update on a rollout batch.
        """
        earlier = self._latest.get(first)
        if earlier is None:  # no update of this kind was measured: only bounds that cannot move are known
            return Forecast(search_clip_bounds(at_ratio_1(own), self.config), trusted=self.config.fixed)
        stats = spread_like(own, earlier)
        sure = self._same_tokens_within(stats, self._errors.get(first, 1.0))
        return Forecast(search_clip_bounds(stats, self.config), trusted=sure and self._credit >= COST_OF_A_MISS)

    @torch.no_grad()
    def learn(self, forecast: Forecast, stats: ClipStatistics, exact: ClipBounds, first: bool) -> None:
        """Learn from an update that has been measured.

        Args:
            forecast: what ``forecast`` returned for it.
            stats: statistics of its tokens over all ranks, on the host.
            exact: the search's result on ``stats``.
            first: as in ``forecast``.
        """
        start = forecast.bounds.positive_contribution_start - exact.positive_contribution_start
        highest = forecast.bounds.positive_contribution_highest - exact.positive_contribution_highest
        off = (abs(start) + abs(highest)).item() / 2
        if first in self._latest:  # else the forecast had no ratios
            self._errors[first] = MEMORY * self._errors.get(first, off) + (1 - MEMORY) * off
        if forecast.trusted:
            right = same_tokens_are_clipped(stats, forecast.bounds, exact)
            self._credit += 1 if right else -COST_OF_A_MISS
        self._credit = min(self._credit + ALLOWED_OVERHEAD, MOST_CREDIT)
        self._latest[False] = stats
        if first:
            self._latest[True] = stats

    def _same_tokens_within(self, stats: ClipStatistics, error: float) -> bool:
        """Whether the same tokens are clipped where the search ends with the target higher and lower by ``error``."""
        path = measure_search_path(stats, self.config)
        target = self.config.positive_contribution_target
        ends = [end_on_path(reaches_target(path.p, path.n, target + off)).pair for off in (-error, error)]
        lower, higher = (stats.clipped_tokens(path.low.take(end), path.high.take(end)) for end in ends)
        return lower == higher


def same_tokens_are_clipped(stats: ClipStatistics, one: ClipBounds, other: ClipBounds) -> bool:
    """Whether two pairs of bounds clip the same tokens, so that both give the same gradient. The host waits.

    Bounds on one side are nested, so equal counts mean equal sets of tokens.

    Args:
        stats: statistics of the tokens.
        one, other: both pairs are candidates of the config of ``stats``.
    """
    return stats.clipped_tokens(one.low, one.high) == stats.clipped_tokens(other.low, other.high)


def spread_like(own: ClipStatistics, earlier: ClipStatistics) -> ClipStatistics:
    """Return the sums that the tokens of ``own`` would have if their ratios were spread as those of ``earlier``.

    For each sign of A: ``sum[b] = weight of own / weight of earlier * sum of earlier[b]``, with the same factor for
    every bucket b and every sum that a search reads. Where ``earlier`` has no token of a sign, every ratio of that sign
    is 1. All other sums are those of ``own``.
    """
    scaled: dict[str, torch.Tensor] = {}
    still = at_ratio_1(own)
    signs = zip(("positive", "negative"), own.weight_by_sign, earlier.weight_by_sign, strict=True)
    for sign, weight, earlier_weight in signs:
        names = [f"{sign}_weight", f"{sign}_weighted_ratio", f"{sign}_tokens"]
        if sign == "negative":
            names += ["dual_clipped_weight", "dual_clipped_weighted_ratio", "dual_clipped_tokens"]
        source, factor = (earlier, weight / earlier_weight) if earlier_weight > 0 else (still, 1.0)
        scaled |= {name: getattr(source.sums, name) * factor for name in names}
    return ClipStatistics(own.sums._replace(**scaled), own.config)


def at_ratio_1(stats: ClipStatistics) -> ClipStatistics:
    """Return the sums by bucket that the tokens of ``stats`` would have if every ratio were 1."""
    sums = stats.sums
    weights, tokens = stats.weight_by_sign, stats.tokens_by_sign
    positive, negative = torch.zeros_like(sums.positive_weight), torch.zeros_like(sums.negative_weight)
    positive[0] = negative[-1] = 1  # below every candidate of c_high, and above every candidate of c_low
    none = torch.zeros_like(sums.dual_clipped_weight)
    return ClipStatistics(
        sums._replace(
            positive_weight=positive * weights[0],
            positive_weighted_ratio=positive * weights[0],
            positive_tokens=positive * tokens[0],
            negative_weight=negative * weights[1],
            negative_weighted_ratio=negative * weights[1],
            negative_tokens=negative * tokens[1],
            dual_clipped_weight=none,
            dual_clipped_weighted_ratio=none,
            dual_clipped_tokens=none,
        ),
        stats.config,
    )
