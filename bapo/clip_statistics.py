# SPDX-License-Identifier: Apache-2.0
"""Token sums of an update, from which P, N and the diagnostics follow at every candidate pair of bounds.

P and N are the contributions of the tokens with A > 0 and with A < 0 (Eq. 8); r is a token's ratio and w its weight.
P(c_high) = sum over A>0 of w*A*min(r, c_high) needs two sums at each candidate of ``c_high``: w*A*r of the tokens with
r < c_high, and w*A of the others. N(c_low) needs the same two sums of the tokens with A < 0. So tokens are put into
buckets by their ratio, with the candidates as edges. Only this file knows the layout of the buckets.

The worker and the loss rely on three properties: the sums of micro-batches and ranks add up, one collective reduces all
of them, and nothing but ``ClipStatistics.to`` makes the host wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bapo.config import BAPOConfig
from bapo.entropy import EntropySums
from bapo.ratio import check_inputs, is_usable, log_ratio_of

# A clip bound limits the gradient of a token with A < 0 only where its ratio is small. Above this ratio, a usual value
# of the dual clip, that dual clip alone limits it.
UNBOUNDED_RATIO = 3.0
# Number of tokens to sum at a time: few enough that their float64 copies fit the cache of a CPU, and many enough that a
# GPU launches few kernels.
CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 20

# A ratio above this, or below its inverse, is far from 1 where all ratios should be 1. Of 419 tokens of SmolLM2-135M
# none was above it in bfloat16, however the batch was cut; with attention_dropout=0.05 18 % of those with A > 0 were.
FAR_RATIO = 1.2

# What a loss other than BAPO's does to tokens. Maps old log-probs, log-probs, advantages and mask, ``(B, T)``, to the
# ratio that stands in the gradient in place of a token's own (0 where the token has no gradient), and to whether the
# loss clips or caps the token.
OwnClipFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class TokenSums(NamedTuple):
    """Float64 sums over response tokens: the first ten by bucket, the others 0-d.

    Bucket b of A > 0: exactly b candidates of ``c_high`` are at or below the ratio. Bucket b of A < 0: exactly b
    candidates of ``c_low`` are below the ratio, which is below the dual clip; ratios from the dual clip on are summed
    apart. Both compare in the ratio's type, with the candidate rounded to it, as the loss does (``bapo.loss``). So both
    agree about a token that lies exactly on a bound: it is clipped.

    Where the comment before them does not say otherwise, the sums leave out tokens without a usable old log-prob
    (``is_usable``).
    """

    # w*|A| and w*|A|*r, and the number of tokens
    positive_weight: Tensor
    positive_weighted_ratio: Tensor
    positive_tokens: Tensor
    negative_weight: Tensor
    negative_weighted_ratio: Tensor
    negative_tokens: Tensor
    # r*|A|, the size of the gradient before clipping, and r*|A|*log_prob
    positive_gradient: Tensor
    negative_gradient: Tensor
    positive_gradient_log_prob: Tensor
    negative_gradient_log_prob: Tensor
    # of the tokens from the dual clip on
    dual_clipped_weight: Tensor
    dual_clipped_weighted_ratio: Tensor
    dual_clipped_tokens: Tensor
    # number of response tokens, and of the responses that have a token with this sign of A
    tokens: Tensor
    positive_responses: Tensor
    negative_responses: Tensor
    # r, r^2 and r*|A| of all tokens; r*|A| where A < 0 and r > UNBOUNDED_RATIO
    ratio: Tensor
    ratio_squared: Tensor
    gradient: Tensor
    unbounded_gradient: Tensor
    # number of tokens with an advantage whose ratio is above FAR_RATIO or below its inverse
    far_from_1: Tensor
    # r*log_prob
    ratio_log_prob: Tensor
    # g*A and g*A*log_prob, where g is the ratio that own_clip returns; without it the ratio itself
    own_gradient: Tensor
    own_gradient_log_prob: Tensor
    # number of response tokens without a usable old log-prob
    invalid_old_log_probs: Tensor
    # number of log-probs that are not finite, also of tokens without a usable old log-prob, since the backward of a
    # softmax with a NaN gives NaN even for a gradient of zero
    invalid_log_probs: Tensor
    # number of advantages that are not finite
    invalid_advantages: Tensor
    # number of tokens with A > 0 and with A < 0 that the run's own loss, if it is not BAPO's, clips or caps (own_clip);
    # 0 without it
    own_clipped_positive: Tensor
    own_clipped_negative: Tensor
    # number of ranks that could not sum the tokens of one of their micro-batches, set by the monitor
    uncollected: Tensor


@dataclass(frozen=True)
class ClipStatistics:
    """Token sums of a micro-batch or an update. ``+`` and ``all_reduce`` add those of micro-batches and of ranks.

    Attributes:
        sums: the sums. All may have leading dimensions, such as one of updates: ``(..., buckets)`` and ``(...)``. What
            is derived from them here then has these too.
        config: the options that they were collected with. Only the ranges and the token weight affect the sums.
    """

    sums: TokenSums
    config: BAPOConfig

    def check_config(self, config: BAPOConfig) -> None:
        """Raise a ValueError unless ``config`` would have collected the same sums."""
        ours, theirs = ((options.token_weight, options.lower, options.upper) for options in (self.config, config))
        if ours != theirs:
            raise ValueError(f"These statistics were collected with {ours}, not {theirs}.")

    def __add__(self, other: ClipStatistics) -> ClipStatistics:
        other.check_config(self.config)
        return replace(self, sums=TokenSums(*(a + b for a, b in zip(self.sums, other.sums, strict=True))))

    def all_reduce(self, group: torch.distributed.ProcessGroup | None) -> ClipStatistics:
        """Sum over a ``torch.distributed`` process group (pass ``group.WORLD`` for the world group).

        This is one collective, so every rank of ``group`` must call it, whether it has tokens or not.
        """
        vector = self._as_vector()
        torch.distributed.all_reduce(vector, group=group)
        return self._with(vector)

    def to(self, device: torch.device | str) -> ClipStatistics:
        """Copy to a device in one transfer. The host waits for it."""
        return self._with(self._as_vector().to(device))

    @property
    def tokens_by_sign(self) -> tuple[Tensor, Tensor]:
        """Number of tokens with A > 0 and with A < 0, ``(...)`` each."""
        return self.sums.positive_tokens.sum(-1), self.sums.negative_tokens.sum(-1) + self.sums.dual_clipped_tokens

    @property
    def weight_by_sign(self) -> tuple[Tensor, Tensor]:
        """Sum of w*|A| of the tokens with A > 0 and with A < 0, ``(...)`` each; it does not depend on the ratios."""
        return self.sums.positive_weight.sum(-1), self.sums.negative_weight.sum(-1) + self.sums.dual_clipped_weight

    @property
    def own_entropy_sums(self) -> EntropySums:
        """The sums from which follows what an update with the run's own loss does to the entropy."""
        sums = self.sums
        return EntropySums(sums.ratio, sums.ratio_log_prob, sums.own_gradient, sums.own_gradient_log_prob)

    def entropy_sums(self, low: Tensor, high: Tensor) -> EntropySums:
        """The sums from which follows what an update with these bounds does to the entropy.

        Both bounds must be candidates, 0-d or ``(...)``. Factors on the loss of a token are left out.
        """
        sums = self.sums
        above, below = self._clipped_buckets(low, high)

        def of_both_signs(positive: Tensor, negative: Tensor) -> Tensor:
            return torch.where(above, 0, positive).sum(-1) - torch.where(below, 0, negative).sum(-1)

        gradient = of_both_signs(sums.positive_gradient, sums.negative_gradient)
        gradient_log_prob = of_both_signs(sums.positive_gradient_log_prob, sums.negative_gradient_log_prob)
        return EntropySums(sums.ratio, sums.ratio_log_prob, gradient, gradient_log_prob)

    def contributions(self, contribution: str) -> tuple[Tensor, Tensor]:
        """Compute P at each candidate of ``c_high`` and N at each of ``c_low``: float64, ``(..., candidates)``.

        Args:
            contribution: ``value`` (Eq. 8), in which a clipped token counts with its bound and the dual clip is
                ignored, or ``gradient`` (Eq. 5), in which only tokens with a gradient count.
        """
        sums = self.sums
        p = _sums_below(sums.positive_weighted_ratio)
        n = _sums_above(sums.negative_weighted_ratio)
        if contribution == "value":
            low, high = (bound.grid(p.device) for bound in (self.config.lower, self.config.upper))
            p = p + high * _sums_above(sums.positive_weight)
            n = n + low * _sums_below(sums.negative_weight) + sums.dual_clipped_weighted_ratio[..., None]
        return p, n

    def clipped_tokens(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens with A > 0 at or above ``high``, and those with A < 0 at or below ``low``.

        Both bounds must be candidates, 0-d or ``(...)``; the counts are float64 ``(...)``.
        """
        above, below = self._clipped_buckets(low, high)
        sums = self.sums
        return torch.where(above, sums.positive_tokens, 0).sum(-1), torch.where(below, sums.negative_tokens, 0).sum(-1)

    def _clipped_buckets(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return which buckets of A > 0 and of A < 0 two candidates clip, bool ``(..., buckets)``."""
        lower, upper = (bound.grid(low.device) for bound in (self.config.lower, self.config.upper))
        # Bucket k of A > 0 has the ratios from candidate k - 1 of c_high on, and bucket k of A < 0 those up to
        # candidate k of c_low. No bound clips the first bucket of the one, nor the last bucket of the other.
        above, below = upper >= high[..., None], lower <= low[..., None]
        return functional.pad(above, (1, 0)), functional.pad(below, (0, 1))

    def _as_vector(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self.sums])

    def _with(self, vector: Tensor) -> ClipStatistics:
        parts = vector.split([tensor.numel() for tensor in self.sums])
        return replace(self, sums=TokenSums(*(part.view_as(own) for part, own in zip(parts, self.sums, strict=True))))


@torch.no_grad()
def collect_clip_statistics(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    clip_ratio_c: float | None = None,
    own_clip: OwnClipFunction | None = None,
) -> ClipStatistics:
    """Collect the statistics of one micro-batch without making the host wait for the device.

    Factors on the loss of a token, such as importance weights of a rollout correction, do not enter the sums.

    Args:
        old_log_prob: log-probs of the policy in the ratio's denominator, ``(B, T)``, any float type. Packed tokens may
            be ``(N,)``; all of them then count as one response.
        log_prob: log-probs of the policy that is trained, in the same shape.
        advantages: in the same shape, or ``(B, 1)``: one for each response.
        response_mask: in the same shape, true or non-zero where a token counts. Masked positions may hold anything.
        config: the ranges of the bounds and the token weight.
        clip_ratio_c: the dual clip: negative tokens with a ratio from here on carry no gradient. None: no dual clip.
        own_clip: in a run that trains with another loss, what that loss does to tokens. Only the sums ``own_*`` use it.

    Raises:
        ValueError: the tensors have other shapes, or ``clip_ratio_c`` is not above 1.
    """
    advantages = check_inputs(old_log_prob, log_prob, advantages, response_mask, clip_ratio_c)
    tensors = [torch.atleast_2d(tensor) for tensor in (old_log_prob, log_prob, advantages, response_mask)]
    chunk = CPU_CHUNK if log_prob.device.type == "cpu" else GPU_CHUNK
    rows = max(1, chunk // max(1, log_prob.shape[-1]))
    chunks = (Tokens(*parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True))
    first, *others = [ClipStatistics(_sum_tokens(tokens, config, clip_ratio_c, own_clip), config) for tokens in chunks]
    return sum(others, start=first)


def empty_clip_statistics(config: BAPOConfig, device: torch.device | str | int | None = None) -> ClipStatistics:
    """Return the statistics of no token, all zero, with which a rank without tokens joins the collective."""
    nothing = torch.zeros(0, 0, device=device)
    return collect_clip_statistics(nothing, nothing, nothing, nothing, config)


class Tokens(NamedTuple):
    """The arguments of ``collect_clip_statistics`` for some rows, ``(rows, T)`` each."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor


def _sum_tokens(
    tokens: Tokens, config: BAPOConfig, clip_ratio_c: float | None, own_clip: OwnClipFunction | None
) -> TokenSums:
    """Sum the tokens of some rows; see ``TokenSums``."""
    response, usable = tokens.response_mask.bool(), is_usable(tokens.old_log_prob)
    mask = response & usable
    ratio = log_ratio_of(tokens.old_log_prob, tokens.log_prob).exp()
    buckets = _Buckets(config, clip_ratio_c, ratio)
    own_ratio, own_clipped = ratio, torch.zeros_like(mask)
    if own_clip is not None:
        own_ratio, own_clipped = own_clip(tokens.old_log_prob, tokens.log_prob, tokens.advantages, mask)
    # From here on in float64. Where a token does not count, both numbers are 0, and so are its terms of the sums.
    ratio = torch.where(mask, ratio.double(), 0)
    advantages = torch.where(mask, tokens.advantages.double(), 0)
    positive, negative = advantages > 0, advantages < 0
    log_prob = torch.where(mask, tokens.log_prob, 0).double()
    size = advantages.abs()
    gradient, own_gradient = ratio * size, torch.where(mask, own_ratio * advantages, 0)
    weight = size
    if config.token_weight == "rollout_prob":
        weight = size * torch.where(mask, tokens.old_log_prob, 0).double().exp()
    bucket = buckets.index_of(ratio, advantages)
    positive_weight, negative_weight, dual_clipped_weight = buckets.sum_by_bucket(weight, bucket)
    positive_weighted_ratio, negative_weighted_ratio, dual_clipped_ratio = buckets.sum_by_bucket(weight * ratio, bucket)
    positive_tokens, negative_tokens, dual_clipped_tokens = buckets.sum_by_bucket(
        (positive | negative).double(), bucket
    )
    positive_gradient, negative_gradient, _ = buckets.sum_by_bucket(gradient, bucket)
    positive_log_prob, negative_log_prob, _ = buckets.sum_by_bucket(gradient * log_prob, bucket)
    return TokenSums(
        positive_weight=positive_weight,
        positive_weighted_ratio=positive_weighted_ratio,
        positive_tokens=positive_tokens,
        negative_weight=negative_weight,
        negative_weighted_ratio=negative_weighted_ratio,
        negative_tokens=negative_tokens,
        positive_gradient=positive_gradient,
        negative_gradient=negative_gradient,
        positive_gradient_log_prob=positive_log_prob,
        negative_gradient_log_prob=negative_log_prob,
        dual_clipped_weight=dual_clipped_weight,
        dual_clipped_weighted_ratio=dual_clipped_ratio,
        dual_clipped_tokens=dual_clipped_tokens,
        tokens=_count(mask),
        positive_responses=_count(positive.any(1)),
        negative_responses=_count(negative.any(1)),
        ratio=ratio.sum(),
        ratio_squared=torch.tensordot(ratio, ratio),  # the sum of the products, without a tensor of them
        gradient=gradient.sum(),
        unbounded_gradient=torch.where(negative & (ratio > UNBOUNDED_RATIO), gradient, 0).sum(),
        far_from_1=_count((positive | negative) & ((ratio > FAR_RATIO) | (ratio < 1 / FAR_RATIO))),
        ratio_log_prob=torch.tensordot(ratio, log_prob),
        own_gradient=own_gradient.sum(),
        own_gradient_log_prob=torch.tensordot(own_gradient, log_prob),
        invalid_old_log_probs=_count(response & ~usable),
        invalid_log_probs=_count(response & ~(tokens.log_prob.abs() < math.inf)),  # half of isfinite()'s time
        invalid_advantages=_count(~(size < math.inf)),
        own_clipped_positive=_count(own_clipped & positive),
        own_clipped_negative=_count(own_clipped & negative),
        uncollected=ratio.new_zeros(()),
    )


class _Buckets:
    """The buckets of ``TokenSums``, and sums by bucket.

    The ratio of a token with A < 0 counts as negative here, so that one sorted list of edges serves both signs::

        -dual clip | -c_low, largest to smallest candidate | 0 | c_high, smallest to largest candidate

    One search for all tokens takes half the time of one for each sign.
    """

    def __init__(self, config: BAPOConfig, clip_ratio_c: float | None, ratio: Tensor):
        """Make the edges. ``ratio`` gives the device, and the type in which ratios and candidates are compared."""
        lower, upper = (bound.grid(ratio.device).to(ratio.dtype).double() for bound in (config.lower, config.upper))
        dual_clip = ratio.new_full((1,), math.inf if clip_ratio_c is None else clip_ratio_c).double()
        # bucketize leaves a ratio on this edge above it, so the edge is the number before the dual clip.
        below_dual_clip = torch.nextafter(dual_clip, torch.zeros_like(dual_clip))
        self.edges = torch.cat([-below_dual_clip, -lower.flip(0), lower.new_zeros(1), upper])
        self.sizes = [1, len(lower) + 1, len(upper) + 1]  # from left to right: the dual clip, A < 0, A > 0

    def index_of(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the number of each token's bucket, ``(tokens,)``. Where A = 0 it does not matter."""
        return torch.bucketize(ratio.copysign(advantages), self.edges, right=True).flatten()

    def sum_by_bucket(self, values: Tensor, bucket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums by bucket: for A > 0, for A < 0, and of the tokens from the dual clip on (0-d)."""
        # One-dimensional scatter_add_ runs under deterministic algorithms on a GPU; bincount with weights does not.
        sums = values.new_zeros(sum(self.sizes)).scatter_add_(0, bucket, values.flatten())
        dual_clipped, of_negative, of_positive = sums.split(self.sizes)
        return of_positive, of_negative.flip(0), dual_clipped.squeeze()


def _count(found: Tensor) -> Tensor:
    return found.count_nonzero().double()


# Both sums are added up from their own end. Subtracting one from the total would leave the rounding error of large
# ratios in small sums.
def _sums_below(buckets: Tensor) -> Tensor:
    """Add up the buckets below each edge, ``(..., edges)``."""
    return buckets.cumsum(-1)[..., :-1]


def _sums_above(buckets: Tensor) -> Tensor:
    """Add up the buckets above each edge, ``(..., edges)``."""
    return buckets.flip(-1).cumsum(-1).flip(-1)[..., 1:]
