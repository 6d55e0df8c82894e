# SPDX-License-Identifier: Apache-2.0
"""Token sums from which P and N follow at every candidate pair of bounds, and the sums of the diagnostics.

P and N are the contributions of the tokens with A > 0 and with A < 0 (Eq. 8); r is a token's ratio and w its weight.
P(c_high) = sum over A>0 of w*A*min(r, c_high) needs two sums at each candidate of ``c_high``: w*A*r of the tokens with
r < c_high, and w*A of the others. N(c_low) needs such sums of the tokens with A < 0: w*|A|*r of those with r > c_low,
and w*|A| of the others. Tokens are therefore put into buckets by their ratio, with the candidates as edges, and
``bapo.search`` adds up buckets.

To add a sum, give it a name in ``ContributionSums`` (read by the search) or in ``TokenSums`` (read by
``bapo.diagnostics``) and compute it in ``_sum_tokens``. The worker and the loss rely on three properties: the sums of
micro-batches and ranks add up, one collective reduces all of them, and nothing here makes the host wait for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.ratio import check_inputs, log_ratio_of

# No clip bound limits the gradient of a token with A < 0 and a large ratio. verl's dual clip does, by default from 3.
UNBOUNDED_RATIO = 3.0
# A log-prob is at most 0, but bfloat16 rounds some that are nearly 0 to slightly above it.
MAX_OLD_LOG_PROB = 0.5
# Number of tokens to sum at a time: few enough that their float64 copies fit the cache of a CPU, and many enough that a
# GPU launches few kernels.
CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 20


class ContributionSums(NamedTuple):
    """The sums from which P and N follow: float64, one entry a bucket.

    Attributes:
        positive_weight: sum of w*A where A > 0. Bucket b holds the ratios that are at or above exactly b candidates of
            ``c_high``: bucket 0 is below all of them, and there is one bucket more than there are candidates.
        positive_weighted_ratio: sum of w*A*r where A > 0, in the same buckets.
        negative_weight: sum of w*|A| where A < 0. Bucket b holds the ratios that are above exactly b candidates of
            ``c_low``. After these, a last bucket holds the tokens whose gradient the dual clip removes.
        negative_weighted_ratio: sum of w*|A|*r where A < 0, in the same buckets.
    """

    positive_weight: Tensor
    positive_weighted_ratio: Tensor
    negative_weight: Tensor
    negative_weighted_ratio: Tensor


class TokenSums(NamedTuple):
    """Additional float64 token sums for the diagnostics; scalars unless noted.

    Attributes:
        tokens: number of response tokens.
        positive_tokens: number of response tokens with A > 0, in the buckets of ``ContributionSums``.
        negative_tokens: number of response tokens with A < 0, in the buckets of ``ContributionSums``.
        positive_responses: number of responses that have a token with A > 0.
        negative_responses: number of responses that have a token with A < 0.
        ratio, ratio_squared: sums of r and of r^2.
        gradient: sum of r*|A|, the size of the gradient before clipping.
        unbounded_gradient: sum of r*|A| where A < 0 and r > ``UNBOUNDED_RATIO``.
        invalid_old_log_probs: number of old log-probs that are not finite, or above ``MAX_OLD_LOG_PROB``.
        invalid_log_probs, invalid_advantages: numbers of values that are not finite.
    """

    tokens: Tensor
    positive_tokens: Tensor
    negative_tokens: Tensor
    positive_responses: Tensor
    negative_responses: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    gradient: Tensor
    unbounded_gradient: Tensor
    invalid_old_log_probs: Tensor
    invalid_log_probs: Tensor
    invalid_advantages: Tensor


@dataclass(frozen=True)
class ClipStatistics:
    """Token sums of a micro-batch. ``+`` and ``all_reduce`` add the sums of micro-batches and of ranks.

    Attributes:
        contribution_sums: the sums that the search reads.
        token_sums: the sums that only the diagnostics read.
        config: the options that they were collected with. Only the ranges and the token weight affect the sums.
    """

    contribution_sums: ContributionSums
    token_sums: TokenSums
    config: BAPOConfig

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all sums in the order of their fields."""
        return *self.contribution_sums, *self.token_sums

    def _with_tensors(self, tensors) -> ClipStatistics:
        """Return a copy that holds other sums, given in the order of ``tensors``."""
        contributions = len(ContributionSums._fields)
        return replace(
            self,
            contribution_sums=ContributionSums(*tensors[:contributions]),
            token_sums=TokenSums(*tensors[contributions:]),
        )

    def check_config(self, config: BAPOConfig) -> None:
        """Raise a ValueError unless ``config`` would have collected the same sums."""
        ours, theirs = ((options.token_weight, options.lower, options.upper) for options in (self.config, config))
        if ours != theirs:
            raise ValueError(f"These statistics were collected with {ours}, not {theirs}.")

    def __add__(self, other: ClipStatistics) -> ClipStatistics:
        other.check_config(self.config)
        return self._with_tensors([ours + theirs for ours, theirs in zip(self.tensors, other.tensors, strict=True)])

    def all_reduce(self, group) -> ClipStatistics:
        """Sum over a ``torch.distributed`` process group (pass ``group.WORLD`` for the world group).

        This is one collective, so every rank of ``group`` must call it, whether it has tokens or not.
        """
        vector = torch.cat([tensor.flatten() for tensor in self.tensors])
        torch.distributed.all_reduce(vector, group=group)
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return self._with_tensors([part.view_as(own) for part, own in zip(parts, self.tensors, strict=True)])


@torch.no_grad()
def collect_clip_statistics(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    clip_ratio_c: float | None = None,
) -> ClipStatistics:
    """Collect the statistics of one micro-batch without making the host wait for the device.

    Args:
        old_log_prob: log-probs of the policy in the ratio's denominator, ``(B, T)``, any float type.
        log_prob: log-probs of the policy that is trained, ``(B, T)``.
        advantages: ``(B, T)``.
        response_mask: ``(B, T)``, true or non-zero where a token counts. Masked positions may hold anything.
        config: the ranges of the bounds and the token weight.
        clip_ratio_c: verl's dual clip: negative tokens with a ratio from here on carry no gradient. None: no dual clip.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1.
    """
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    check_inputs(clip_ratio_c, **tensors)
    upper_edges, lower = config.upper.grid(log_prob.device), config.lower.grid(log_prob.device)
    # The dual clip is one more edge: r >= clip_ratio_c is the same as r > the number just below it.
    dual_clip = math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, 0)
    lower_edges = torch.cat([lower, lower.new_full((1,), dual_clip)])
    chunk = CPU_CHUNK if log_prob.device.type == "cpu" else GPU_CHUNK
    rows = max(1, chunk // max(1, log_prob.shape[1]))
    chunks = zip(*(tensor.split(rows) for tensor in tensors.values()), strict=True)
    first, *others = [
        _sum_tokens(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            config=config,
            lower_edges=lower_edges,
            upper_edges=upper_edges,
        )
        for old_log_prob, log_prob, advantages, response_mask in chunks
    ]
    return sum(others, start=first)


def empty_clip_statistics(config: BAPOConfig, device: torch.device | str | None = None) -> ClipStatistics:
    """Return the statistics of no token, all zero, with which a rank without tokens joins the collective."""
    nothing = torch.zeros(0, 0, device=device)
    return collect_clip_statistics(nothing, nothing, nothing, nothing, config)


def _sum_tokens(old_log_prob, log_prob, advantages, response_mask, config, lower_edges, upper_edges) -> ClipStatistics:
    """Collect the statistics of some rows; the edges are those of the buckets."""
    mask = response_mask.bool()
    ratio = torch.where(mask, log_ratio_of(old_log_prob, log_prob).exp().double(), 0)
    advantages = torch.where(mask, advantages.double(), 0)
    positive, negative = advantages > 0, advantages < 0
    size = advantages.abs()
    unbounded = torch.where(negative & (ratio > UNBOUNDED_RATIO), size, 0)
    weight = size
    if config.token_weight == "rollout_prob":
        weight = size * torch.where(mask, old_log_prob, 0).double().exp()

    # The ratios of tokens with A < 0 are negated, so that they lie to the left of 0 and the others to its right. Then
    # one search finds each token's bucket, and the buckets of A < 0 are in reverse order. Where A = 0 the weight is 0.
    edges = torch.cat([-lower_edges.flip(0), lower_edges.new_zeros(1), upper_edges])
    bucket = torch.bucketize(ratio.copysign(advantages), edges, right=True).flatten()
    sizes = [len(lower_edges) + 1, len(upper_edges) + 1]

    def sum_by_bucket(values):
        # One-dimensional scatter_add_ runs under deterministic algorithms on a GPU; bincount with weights does not.
        sums = values.new_zeros(sum(sizes)).scatter_add_(0, bucket, values.flatten())
        of_negative, of_positive = sums.split(sizes)
        return of_negative.flip(0), of_positive

    negative_weight, positive_weight = sum_by_bucket(weight)
    negative_weighted_ratio, positive_weighted_ratio = sum_by_bucket(weight * ratio)
    negative_tokens, positive_tokens = sum_by_bucket((positive | negative).double())
    contribution_sums = ContributionSums(
        positive_weight=positive_weight,
        positive_weighted_ratio=positive_weighted_ratio,
        negative_weight=negative_weight,
        negative_weighted_ratio=negative_weighted_ratio,
    )
    token_sums = TokenSums(
        tokens=_count(mask),
        positive_tokens=positive_tokens,
        negative_tokens=negative_tokens,
        positive_responses=_count(positive.any(1)),
        negative_responses=_count(negative.any(1)),
        ratio=ratio.sum(),
        ratio_squared=torch.tensordot(ratio, ratio),
        gradient=torch.tensordot(size, ratio),
        unbounded_gradient=torch.tensordot(unbounded, ratio),
        invalid_old_log_probs=_count(mask & ~((old_log_prob > -math.inf) & (old_log_prob <= MAX_OLD_LOG_PROB))),
        invalid_log_probs=_count(mask & ~(log_prob.abs() < math.inf)),  # false for NaN, in half of isfinite()'s time
        invalid_advantages=_count(~(size < math.inf)),
    )
    return ClipStatistics(contribution_sums, token_sums, config)


def _count(found):
    return found.count_nonzero().double()
