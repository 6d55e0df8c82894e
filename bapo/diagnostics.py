# SPDX-License-Identifier: Apache-2.0
"""What the tokens of an update say beside the bounds: metrics that no decision depends on, and the count of bad input.

``Diagnostics`` follow from ``TokenSums``, which travel with the sums of the search, and cost no pass, collective or
host read of their own. A new metric gets a field of ``Diagnostics`` here, and where needed a sum in
``bapo.statistics``. But for the counts of bad input the fields' names are those of metrics (``actor/bapo/...``) and of
the bounds' record, which others read. The covariance is not among the sums: the loss computes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.search import ClipBounds
from bapo.statistics import ClipStatistics


@dataclass(frozen=True)
class Diagnostics:
    """Metrics of the response tokens of one optimizer update, 0-d float64 tensors.

    Attributes:
        positive_token_fraction: share of the response tokens with positive advantage.
        clipfrac_positive: share of the tokens with positive advantage whose ratio is at or above ``high``.
        clipfrac_negative: share of the tokens with negative advantage whose ratio is at or below ``low``.
        length_positive, length_negative: mean number of tokens with positive advantage of the responses that have any,
            and the same of negative advantage; 0 where there are none.
        effective_sample_size: (sum r)^2 / (tokens * sum r^2) of the response tokens, a share.
        negative_unbounded_share: share of tokens with negative advantage and a ratio above 3 in the sum of r*|A|, the
            size of the gradient before clipping.
        invalid_old_log_probs, invalid_log_probs, invalid_advantages: numbers of response tokens on which these are
            unusable: not finite or, as an old log-prob, above ``MAX_OLD_LOG_PROB``.
    """

    positive_token_fraction: Tensor
    clipfrac_positive: Tensor
    clipfrac_negative: Tensor
    length_positive: Tensor
    length_negative: Tensor
    effective_sample_size: Tensor
    negative_unbounded_share: Tensor
    invalid_old_log_probs: Tensor
    invalid_log_probs: Tensor
    invalid_advantages: Tensor


@torch.no_grad()
def diagnose(statistics: ClipStatistics, bounds: ClipBounds) -> Diagnostics:
    """The diagnostics of one optimizer update, from the sums that its bounds were found from."""
    sums = statistics.token_sums
    upper = statistics.config.upper.points(bounds.high.device)
    lower = statistics.config.lower.points(bounds.low.device)
    # Bucket b+1 of the positive tokens begins at point b of the range, bucket b of the negative tokens ends there.
    clipped_positive = torch.where(upper >= bounds.high, sums.positive_tokens[1:], 0).sum()
    clipped_negative = torch.where(lower <= bounds.low, sums.negative_tokens[:-2], 0).sum()
    positive_tokens, negative_tokens = sums.positive_tokens.sum(), sums.negative_tokens.sum()
    return Diagnostics(
        positive_token_fraction=_quotient(positive_tokens, sums.tokens),
        clipfrac_positive=_quotient(clipped_positive, positive_tokens),
        clipfrac_negative=_quotient(clipped_negative, negative_tokens),
        length_positive=_quotient(positive_tokens, sums.positive_responses),
        length_negative=_quotient(negative_tokens, sums.negative_responses),
        effective_sample_size=_quotient(sums.ratio**2, sums.tokens * sums.ratio_squared),
        negative_unbounded_share=_quotient(sums.unbounded_gradient, sums.gradient),
        invalid_old_log_probs=sums.invalid_old_log_probs,
        invalid_log_probs=sums.invalid_log_probs,
        invalid_advantages=sums.invalid_advantages,
    )


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where there is nothing to divide by."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


@torch.no_grad()
def entropy_covariance(log_prob: Tensor, advantages: Tensor, ratio: Tensor, mask: Tensor, clipped: Tensor) -> Tensor:
    """The covariance of Eq. 6, of ``log_prob`` and ``A``, under the policy that is trained, 0-d, in nats.

    Where it is positive, the update lowers the entropy. Tokens are weighted by their ratio, which turns a mean over the
    old policy's tokens into one under the policy that is trained.

    Args:
        log_prob: ``(B, T)``; what is masked may hold anything.
        advantages, ratio: ``(B, T)``, finite; the advantages are 0 where masked.
        mask: ``(B, T)`` bool, true where a token counts.
        clipped: ``(B, T)`` bool, true where the loss has no gradient; ``A`` counts as 0 there.
    """
    weighted = torch.where(clipped, 0, ratio * advantages).flatten()
    ratio, log_prob = (torch.where(mask, values, 0).flatten().to(weighted.dtype) for values in (ratio, log_prob))
    total = ratio.sum().clamp(min=torch.finfo(ratio.dtype).tiny)
    mean_log_prob = ratio.dot(log_prob) / total
    return (weighted.dot(log_prob) - weighted.sum() * mean_log_prob) / total
