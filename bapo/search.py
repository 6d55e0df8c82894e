# SPDX-License-Identifier: Apache-2.0
"""The search of Algorithm 1 over all its candidates at once, from the statistics of ``bapo.statistics``."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.statistics import TOKENS, WA, WAR, ClipStatistics, collect_clip_statistics, grid

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
        saturated: whether no candidate reaches the target (the bounds are then the last ones), bool.
        positive_token_fraction: share of the response tokens with positive advantage.
        clipfrac_positive: share of the tokens with positive advantage whose ratio is at or above ``high``.
        clipfrac_negative: share of the tokens with negative advantage whose ratio is at or below ``low``.
        length_positive, length_negative: mean number of tokens with positive advantage of the responses that have any,
            and the same of negative advantage; 0 where there are none.
        effective_sample_size: (sum r)^2 / (tokens * sum r^2) of the response tokens, a share.
        negative_unbounded_share: share of tokens with negative advantage and a ratio above 3 in the sum of r*|A|, the
            size of the gradient before clipping.
        invalid_counts: unusable old log-probs, log-probs and advantages on response tokens, ``(3,)`` float64.
    """

    low: Tensor
    high: Tensor
    positive_contribution: Tensor
    positive_contribution_start: Tensor
    search_steps: Tensor
    saturated: Tensor
    positive_token_fraction: Tensor
    clipfrac_positive: Tensor
    clipfrac_negative: Tensor
    length_positive: Tensor
    length_negative: Tensor
    effective_sample_size: Tensor
    negative_unbounded_share: Tensor
    invalid_counts: Tensor

    def read(self, **others: Tensor) -> dict[str, float]:
        """All 0-d fields, and ``others`` beside them, as Python numbers by name, in one transfer to the host.

        Raises:
            ValueError: names each tensor with a value on a response token that is not finite or, as an old log-prob,
                above 0 beyond rounding, and how many.
        """
        scalars = {field.name: getattr(self, field.name) for field in fields(self)} | others
        counts = scalars.pop("invalid_counts")
        values = torch.cat([counts, torch.stack([scalar.detach().double() for scalar in scalars.values()])]).tolist()
        names = ("old_log_prob", "log_prob", "advantages")
        found = ", ".join(f"{int(count)} in {name}" for name, count in zip(names, values, strict=False) if count)
        if found:
            raise ValueError(
                f"Non-finite values, or old log-probs above 0, on response tokens of this mini-batch: {found}. No clip "
                "bounds were found and no update was made; look for a diverged model or a broken rollout or reward."
            )
        return dict(zip(scalars, values[len(counts) :], strict=True))


@torch.no_grad()
def search_clip_bounds(statistics: ClipStatistics, config: BAPOConfig) -> ClipBounds:
    """Pick the first candidate on the path of Algorithm 1 that reaches the target, or the last one.

    Nothing is read back to the host, so non-finite input raises only in ``ClipBounds.read``.

    Args:
        statistics: of the whole mini-batch, collected with the same grids and token weight.
        config: the target, the grids, the order and the definition of the contribution.

    Raises:
        ValueError: the statistics were collected with other grids or another token weight.
    """
    tried = candidates(statistics, config)
    reached = reaches_target(tried.p, tried.n, config.positive_contribution_target)
    steps = (~reached).cumprod(0).sum()
    chosen = steps.clamp(max=len(reached) - 1)
    rho = torch.where(tried.p + tried.n > 0, tried.p / (tried.p + tried.n), 0.0)
    positive_tokens, negative_tokens = statistics.positive[TOKENS].sum(), statistics.negative[TOKENS].sum()
    ratios, squares, gradient, unbounded = statistics.totals
    tokens, *_, positive_responses, negative_responses = statistics.counts.clamp(min=1)
    return ClipBounds(  # take(chosen), not [chosen]: that would be a read by the host
        low=tried.low.take(chosen),
        high=tried.high.take(chosen),
        positive_contribution=rho.take(chosen),
        positive_contribution_start=rho[0],
        search_steps=chosen,
        saturated=steps == len(reached),
        positive_token_fraction=positive_tokens / tokens,
        clipfrac_positive=tried.clipped_positive.take(chosen) / positive_tokens.clamp(min=1),
        clipfrac_negative=tried.clipped_negative.take(chosen) / negative_tokens.clamp(min=1),
        length_positive=positive_tokens / positive_responses,
        length_negative=negative_tokens / negative_responses,
        effective_sample_size=torch.where(squares > 0, ratios**2 / (tokens * squares), 0.0),
        negative_unbounded_share=torch.where(gradient > 0, unbounded / gradient, 0.0),
        invalid_counts=statistics.counts[1:4],
    )


class Candidates(NamedTuple):
    """What holds at every pair of bounds, in the order of the search: float64, ``(candidates,)`` each; P and N of Eq. 8
    or Eq. 5, and the number of tokens of either sign whose ratio a bound clips."""

    low: Tensor
    high: Tensor
    p: Tensor
    n: Tensor
    clipped_positive: Tensor
    clipped_negative: Tensor


def candidates(statistics: ClipStatistics, config: BAPOConfig) -> Candidates:
    """What holds at every candidate; see ``search_clip_bounds``."""
    statistics.check_config(config)
    device = statistics.vector.device
    high, low = grid(config, "upper", device), grid(config, "lower", device)

    # P and N at every point of their grids.
    positive_below, positive_above = _below_and_above(statistics.positive)
    negative_below, negative_above = _below_and_above(statistics.negative[:, :-1])
    dual_clipped = statistics.negative[:, -1]
    if config.contribution == "value":  # Eq. 8
        p = positive_below[WAR] + high * positive_above[WA]
        n = low * negative_below[WA] + negative_above[WAR] + dual_clipped[WAR]
    else:  # Eq. 5
        p, n = positive_below[WAR], negative_above[WAR]

    at_high, at_low = search_path(config, device)
    high, p, clipped_positive = torch.stack([high, p, positive_above[TOKENS]])[:, at_high]
    low, n, clipped_negative = torch.stack([low, n, negative_below[TOKENS]])[:, at_low]
    return Candidates(low, high, p, n, clipped_positive, clipped_negative)


def reaches_target(p: Tensor, n: Tensor, target: Tensor | float) -> Tensor:
    """Whether P / (P + N) is ``target`` or more; where P + N is 0 it is. The arguments broadcast."""
    return (1 - target) * p - target * n >= -TOLERANCE * (p + n)


def search_path(config: BAPOConfig, device=None) -> tuple[Tensor, Tensor]:
    """The candidates in the order of the search: their indices into the grids of ``c_high`` and ``c_low``.

    One bound runs through its grid, then the other (Algorithm 1), both int64 ``(upper_steps + lower_steps + 1,)``.
    """
    step = torch.arange(config.upper_steps + config.lower_steps + 1, device=device)
    if config.search_order == "upper_first":
        upper = step.clamp(max=config.upper_steps)
        return upper, step - upper
    lower = step.clamp(max=config.lower_steps)
    return step - lower, lower


def _below_and_above(sums):
    """Sums over the buckets below each grid point and over those above it, both ``(3, grid points)``."""
    # Both are added up: a difference to the total would leave the rounding of the large ratios in the small sums.
    return sums.cumsum(1)[:, :-1], sums.flip(1).cumsum(1).flip(1)[:, 1:]


def find_clip_bounds(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    process_group=None,
    clip_ratio_c: float | None = None,
) -> ClipBounds:
    """Find the clip bounds of one optimizer update from its whole mini-batch (Eq. 8, Algorithm 1).

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``, as in ``collect_clip_statistics``.
        config: the switches.
        process_group: the ranks that share the mini-batch; None: no communication. All of them must call this once.
        clip_ratio_c: verl's dual clip, which ``contribution="gradient"`` respects; None: no dual clip.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1. Non-finite input raises in ``read``.
    """
    statistics = collect_clip_statistics(old_log_prob, log_prob, advantages, response_mask, config, clip_ratio_c)
    if process_group is not None:
        statistics = statistics.all_reduce(process_group)
    return search_clip_bounds(statistics, config)
