# SPDX-License-Identifier: Apache-2.0
"""Per-update diagnostics: logged metrics that never affect the bounds, and counts of invalid inputs.

They follow from the same sums as the search, so they cost no extra forward pass, collective or host read. To add a
metric, add a field to ``Diagnostics`` and, if needed, a sum to ``bapo.clip_statistics`` (``recipe.bapo.hook.record``
then has to know what older records have in its place). A figure for the verdict alone belongs in
``recipe.bapo.hook.verdict_inputs``. Apart from the counts of invalid input, each field is logged as
``actor/bapo/<field>``; renaming one breaks its readers.
No name may contain "min" or "max": verl, which logs them, would log the extreme and not the mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.clip_statistics import ClipStatistics
from bapo.search import ClipBounds


@dataclass(frozen=True)
class Diagnostics:
    """Metrics of the response tokens of one optimizer update: 0-d float64 tensors.

    Except for ``masked_token_fraction``, ``invalid_old_log_probs`` and ``invalid_log_probs`` they count only tokens
    with a usable old log-prob.

    Attributes:
        positive_token_fraction: fraction of the response tokens with A > 0.
        zero_advantage_fraction: fraction of those with A = 0, which train nothing.
        clipfrac_positive: fraction of the tokens with A > 0 whose ratio is at or above ``high``.
        clipfrac_negative: fraction of the tokens with A < 0 whose ratio is at or below ``low``.
        length_positive: mean number of tokens with A > 0 in the responses that have such a token; 0 if none has.
            Packed tokens ``(N,)`` count as one response.
        length_negative: the same for A < 0.
        effective_sample_size: (sum r)^2 / (tokens * sum r^2) over the response tokens, between 0 and 1.
        negative_unbounded_share: fraction of sum(r * abs(A)) contributed by tokens with A < 0 and a ratio above
            ``UNBOUNDED_RATIO``, which no clip bound limits. A dual clip limits them.
        masked_token_fraction: fraction of the response tokens that search and loss (in a monitored run the search
            alone) leave out, because their old log-prob is not usable (``bapo.ratio.is_usable``).
        invalid_old_log_probs: number of these tokens.
        invalid_log_probs, invalid_advantages: numbers of response tokens where these are not finite.
    """

    positive_token_fraction: Tensor
    zero_advantage_fraction: Tensor
    clipfrac_positive: Tensor
    clipfrac_negative: Tensor
    length_positive: Tensor
    length_negative: Tensor
    effective_sample_size: Tensor
    negative_unbounded_share: Tensor
    masked_token_fraction: Tensor
    invalid_old_log_probs: Tensor
    invalid_log_probs: Tensor
    invalid_advantages: Tensor


@torch.no_grad()
def diagnose(stats: ClipStatistics, bounds: ClipBounds) -> Diagnostics:
    """Compute the diagnostics of an optimizer update that uses these bounds, from the statistics of all its tokens."""
    sums = stats.sums
    clipped_positive, clipped_negative = stats.clipped_tokens(bounds.low, bounds.high)
    positive_tokens, negative_tokens = stats.tokens_by_sign
    return Diagnostics(
        positive_token_fraction=_quotient(positive_tokens, sums.tokens),
        zero_advantage_fraction=_quotient(sums.tokens - positive_tokens - negative_tokens, sums.tokens),
        clipfrac_positive=_quotient(clipped_positive, positive_tokens),
        clipfrac_negative=_quotient(clipped_negative, negative_tokens),
        length_positive=_quotient(positive_tokens, sums.positive_responses),
        length_negative=_quotient(negative_tokens, sums.negative_responses),
        effective_sample_size=_quotient(sums.ratio**2, sums.tokens * sums.ratio_squared),
        negative_unbounded_share=_quotient(sums.unbounded_gradient, sums.gradient),
        masked_token_fraction=_quotient(sums.invalid_old_log_probs, sums.invalid_old_log_probs + sums.tokens),
        invalid_old_log_probs=sums.invalid_old_log_probs,
        invalid_log_probs=sums.invalid_log_probs,
        invalid_advantages=sums.invalid_advantages,
    )


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide. Return 0 if the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)
