# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped surrogate with given bounds on the ratio, and the dual clip.

Gradients flow only through this module and ``log_ratio_of``. With fixed bounds the loss equals verl's ``vanilla`` loss,
and the loss of a token does not depend on the other tokens; tests check both. The loss accepts any pair of bounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.ratio import check_inputs, is_usable, log_ratio_of


@dataclass(frozen=True)
class SurrogateLoss:
    """The loss to minimise and the metrics of its response tokens, all 0-d tensors.

    Attributes:
        loss: carries the graph.
        pg_clipfrac: fraction of the tokens with A > 0 and a ratio at or above ``high``, or A < 0 and one at or below
            ``low``.
        ppo_kl: mean of ``old_log_prob - log_prob``.
        pg_clipfrac_lower: fraction of the tokens whose surrogate is clipped by the dual clip.
    """

    loss: Tensor
    pg_clipfrac: Tensor
    ppo_kl: Tensor
    pg_clipfrac_lower: Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average ``values`` over the tokens where ``mask`` is true; 0 if there are none."""
    return torch.where(mask, values, 0).sum() / mask.count_nonzero().clamp(min=1)


def is_clipped(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """Whether ``clipped_surrogate_loss`` gives a token no gradient because of its bounds or its dual clip.

    Any shape, one for all tensors; bool. Where A = 0 it means nothing.
    """
    below, above, _ = _beyond(log_ratio_of(old_log_prob, log_prob).exp(), advantages < 0, low, high, clip_ratio_c)
    return below | above


def _beyond(
    ratio: Tensor, negative: Tensor, low: Tensor | float, high: Tensor | float, clip_ratio_c: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether ratios are below and above what the surrogate allows, and the ratios within what it allows.

    What it allows depends on the sign of the advantage. A ratio exactly on a bound counts as clipped, as in the search.
    """
    low, high = (x.to(ratio.dtype) if isinstance(x, Tensor) else ratio.new_full((), x) for x in (low, high))
    floor = torch.where(negative, low, 0.0)
    ceiling = torch.where(negative, math.inf if clip_ratio_c is None else clip_ratio_c, high)
    below, above = ratio <= floor, ratio >= ceiling
    return below, above, torch.where(below, floor, torch.where(above, ceiling, ratio))


def clipped_surrogate_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    clip_ratio_c: float | None = None,
    rollout_is_weights: Tensor | None = None,
    aggregate: Callable[[Tensor, Tensor], Tensor] = masked_mean,
) -> SurrogateLoss:
    """Compute PPO's loss ``-min(r*A, clip(r, low, high)*A)`` per token, aggregated.

    For A > 0 that is ``-A*min(r, high)``; for A < 0 it is ``-A*max(r, low)``, with dual clip
    ``-A*min(max(r, low), clip_ratio_c)``.

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``, or in the other shapes that
            ``collect_clip_statistics`` takes. A gradient flows to ``log_prob`` alone, and none to masked positions,
            nor to tokens without a usable old log-prob.
        low, high: bounds on the ratio, numbers or tensors that broadcast to the shape of ``log_prob``.
        clip_ratio_c: dual clip (arXiv 1912.09729) of tokens with negative advantage, above 1. None: no dual clip.
        rollout_is_weights: factors on the loss of each token, ``(B, T)``, a rollout correction; None: 1.
        aggregate: maps the loss per token and the bool mask, both in the shape of ``log_prob``, to a 0-d loss. The
            default is the mean over the tokens of this call. Where an update has several calls (micro-batches, ranks),
            divide the sum of the losses per token by the number of tokens of the whole update (``bapo/README.md``).

    Raises:
        ValueError: the tensors have other shapes, or ``clip_ratio_c`` is not above 1.
    """
    advantages = check_inputs(old_log_prob, log_prob, advantages, response_mask, clip_ratio_c)
    # Where a token does not count, the log-ratio itself is set to 0. A loss of 0 alone would leave infinity times 0, a
    # NaN, in the backward.
    mask = response_mask.bool() & is_usable(old_log_prob)
    advantages = torch.where(mask, advantages.detach(), 0)
    log_ratio = torch.where(mask, log_ratio_of(old_log_prob.detach(), log_prob), 0)
    ratio = log_ratio.exp()

    negative = advantages < 0
    below, above, limited = _beyond(ratio, negative, low, high, clip_ratio_c)
    token_loss = -advantages * limited
    tokens = mask.count_nonzero().clamp(min=1)
    if rollout_is_weights is not None:
        token_loss = token_loss * torch.where(mask, rollout_is_weights, 0)

    clipped = ((below | above) & (advantages != 0)).count_nonzero()
    dual_clipped = (negative & above).count_nonzero()
    return SurrogateLoss(
        loss=aggregate(token_loss, mask),
        pg_clipfrac=(clipped - dual_clipped) / tokens,
        ppo_kl=-log_ratio.detach().sum() / tokens,
        pg_clipfrac_lower=dual_clipped / tokens,
    )
