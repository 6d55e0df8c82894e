# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens from which the positive contribution follows at every pair of bounds, and the diagnostics.

P(c_high) = sum over A>0 of w*A*min(r, c_high) needs two sums at each candidate of ``c_high``: w*A*r of the tokens with
r < c_high and w*A of the others; N(c_low) needs the same two of the tokens with A<0. So tokens are put into buckets of
their ratio between the candidates, and ``bapo.search`` adds up buckets.

A new sum gets a name in ``ContributionSums`` (what the search reads) or in ``TokenSums`` (what ``bapo.diagnostics``
reads) and a line in ``_sums_of``. The worker and the loss rely on sums of micro-batches and ranks adding up, on one
collective for all of them, and on the host reading none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.ratio import check_inputs, log_ratio_of

# No bound limits the gradient of a token with A < 0 and a large ratio; verl's dual clip does, by default from here on.
UNBOUNDED_RATIO = 3.0
# A log-prob is at most 0, but bfloat16 rounds some that are nearly 0 to a little above it.
MAX_OLD_LOG_PROB = 0.5
# How many tokens are summed at a time: float64 copies of so many fit a CPU's cache, or take few kernels on a GPU.
CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 20


class ContributionSums(NamedTuple):
    """What P and N follow from: float64 sums over the tokens of each bucket.

    Attributes:
        positive_weight: sum of w*A where A > 0. Bucket b holds the ratios that are at or above exactly b candidates of
            ``c_high``, so bucket 0 is below all of them, and there is one bucket more than candidates.
        positive_weighted_ratio: sum of w*A*r where A > 0, in the same buckets.
        negative_weight: sum of w*|A| where A < 0. Bucket b holds the ratios that are above exactly b candidates of
            ``c_low``; one bucket more than candidates, and a last one of the tokens whose gradient the dual clip takes.
        negative_weighted_ratio: sum of w*|A|*r where A < 0, in the same buckets.
    """

    positive_weight: Tensor
    positive_weighted_ratio: Tensor
    negative_weight: Tensor
    negative_weighted_ratio: Tensor


class TokenSums(NamedTuple):
    """What the diagnostics follow from besides: float64 sums over response tokens, 0-d where nothing else is said.

    Attributes:
        tokens: number of response tokens.
        positive_tokens: of those with A > 0, in the buckets of ``ContributionSums``.
        negative_tokens: of those with A < 0, in the buckets of ``ContributionSums``.
        positive_responses: number of responses with a token of A > 0.
        negative_responses: number of responses with a token of A < 0.
        ratio, ratio_squared: of r and of r^2.
        gradient: of r*|A|, the size of the gradient before clipping.
        unbounded_gradient: of r*|A| where A < 0 and r > ``UNBOUNDED_RATIO``.
        invalid_old_log_probs: number that are not finite, or above ``MAX_OLD_LOG_PROB``.
        invalid_log_probs, invalid_advantages: numbers that are not finite.
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
    """Sums over the tokens of a micro-batch. ``+`` and ``all_reduce`` add those of micro-batches and ranks.

    Attributes:
        contribution_sums: what the search reads.
        token_sums: what only the diagnostics read.
        config: the switches they were collected with; of these the ranges and the token weight enter the sums.
    """

    contribution_sums: ContributionSums
    token_sums: TokenSums
    config: BAPOConfig

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All sums, in the order of their names."""
        return *self.contribution_sums, *self.token_sums

    def _with_tensors(self, tensors) -> ClipStatistics:
        """The same with other sums, in the order of ``tensors``."""
        contributions = len(ContributionSums._fields)
        return replace(
            self,
            contribution_sums=ContributionSums(*tensors[:contributions]),
            token_sums=TokenSums(*tensors[contributions:]),
        )

    def check_config(self, config: BAPOConfig) -> None:
        """Raise a ValueError unless ``config`` would have collected the same sums."""
        ours, theirs = ((switches.token_weight, switches.lower, switches.upper) for switches in (self.config, config))
        if ours != theirs:
            raise ValueError(f"These statistics were collected with {ours}, not {theirs}.")

    def __add__(self, other: ClipStatistics) -> ClipStatistics:
        other.check_config(self.config)
        return self._with_tensors([ours + theirs for ours, theirs in zip(self.tensors, other.tensors, strict=True)])

    def all_reduce(self, group) -> ClipStatistics:
        """The sum over a ``torch.distributed`` process group, the world group passed by name (``group.WORLD``).

        One collective: every rank of ``group`` must call it, tokens or not.
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
    """Collect the statistics of one micro-batch. Reads nothing back to the host.

    Args:
        old_log_prob: log-probs of the policy that the ratio is against, ``(B, T)``, any float type.
        log_prob: log-probs of the policy that is trained, ``(B, T)``.
        advantages: ``(B, T)``.
        response_mask: ``(B, T)``, true or non-zero where a token counts; what is masked may hold anything.
        config: the ranges of the bounds and the token weight.
        clip_ratio_c: verl's dual clip: negative tokens with a ratio from here on carry no gradient. None: no dual clip.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1.
    """
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    check_inputs(clip_ratio_c, **tensors)
    upper, lower = config.upper.points(log_prob.device), config.lower.points(log_prob.device)
    # The dual clip is one more edge: r >= clip_ratio_c is the same as r > the number just below it.
    dual_clip = math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, 0)
    lower_edges = torch.cat([lower, lower.new_full((1,), dual_clip)])
    rows = max(1, (CPU_CHUNK if log_prob.device.type == "cpu" else GPU_CHUNK) // max(1, log_prob.shape[1]))
    chunks = zip(*(tensor.split(rows) for tensor in tensors.values()), strict=True)
    first, *others = [_sums_of(chunk, lower_edges, upper, config) for chunk in chunks]
    return sum(others, start=first)


def _sums_of(responses, lower_edges, upper_edges, config) -> ClipStatistics:
    """The statistics of whole responses: the four tensors of ``collect_clip_statistics``, ``(rows, T)``."""
    old_log_prob, log_prob, advantages, mask = responses
    mask = mask.bool()
    ratio = torch.where(mask, log_ratio_of(old_log_prob, log_prob).exp().double(), 0)
    advantages = torch.where(mask, advantages.double(), 0)
    positive, negative = advantages > 0, advantages < 0
    size = advantages.abs()
    unbounded = torch.where(negative & (ratio > UNBOUNDED_RATIO), size, 0)
    weight = size
    if config.token_weight == "rollout_prob":
        weight = size * torch.where(mask, old_log_prob, 0).double().exp()

    # Ratios of tokens with A < 0 are negated, so that they lie to the left of 0 and the others to its right. Then each
    # token needs one search for its bucket, and the buckets of A < 0 are in reverse order. Where A = 0 the weight is 0.
    edges = torch.cat([-lower_edges.flip(0), lower_edges.new_zeros(1), upper_edges])
    bucket = torch.bucketize(ratio.copysign(advantages), edges, right=True).flatten()
    buckets = [len(lower_edges) + 1, len(upper_edges) + 1]

    def sums_by_bucket(values):
        # One-dimensional scatter_add_ runs under deterministic algorithms on a GPU; bincount with weights does not.
        sums = values.new_zeros(sum(buckets)).scatter_add_(0, bucket, values.flatten())
        of_negative, of_positive = sums.split(buckets)
        return of_negative.flip(0), of_positive

    negative_weight, positive_weight = sums_by_bucket(weight)
    negative_weighted_ratio, positive_weighted_ratio = sums_by_bucket(weight * ratio)
    negative_tokens, positive_tokens = sums_by_bucket((positive | negative).double())
    contribution = ContributionSums(positive_weight, positive_weighted_ratio, negative_weight, negative_weighted_ratio)
    tokens = TokenSums(
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
    return ClipStatistics(contribution, tokens, config)


def _count(found):
    return found.count_nonzero().double()
