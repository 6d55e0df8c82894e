# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate of PPO with given bounds on the ratio, and verl's dual clip.

With ``log_ratio_of`` this is all through which a gradient flows. At fixed bounds it has to stay equal to verl's
``vanilla`` loss, and the loss of a token must not depend on the tokens beside it; tests hold both. How the bounds were
found is not its business: it takes any two numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.diagnostics import entropy_covariance
from bapo.ratio import check_inputs, log_ratio_of


@dataclass(frozen=True)
class SurrogateLoss:
    """The loss to minimise and what the response tokens say of it, all 0-d tensors.

    Attributes:
        loss: carries the graph.
        pg_clipfrac: share of the tokens whose surrogate a bound clips.
        ppo_kl: mean of ``old_log_prob - log_prob``.
        pg_clipfrac_lower: share of the tokens that the dual clip clips.
        entropy_covariance: that of ``bapo.diagnostics``, with the tokens that this loss clips.
    """

    loss: Tensor
    pg_clipfrac: Tensor
    ppo_kl: Tensor
    pg_clipfrac_lower: Tensor
    entropy_covariance: Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` ``(B, T)`` where ``mask`` is true; 0 where nothing is."""
    return torch.where(mask, values, 0).sum() / mask.count_nonzero().clamp(min=1)


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
    """PPO's loss ``-min(r*A, clip(r, low, high)*A)`` per token, aggregated.

    For A > 0 that is ``-A*min(r, high)``; for A < 0 it is ``-A*max(r, low)``, with dual clip
    ``-A*min(max(r, low), clip_ratio_c)``: one clamp per token.

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``, as in ``collect_clip_statistics``. A gradient
            flows to ``log_prob`` alone, and none to what is masked.
        low, high: bounds on the ratio, numbers or tensors that broadcast to ``(B, T)``.
        clip_ratio_c: dual clip (arXiv 1912.09729) of tokens with negative advantage, above 1; None: none.
        rollout_is_weights: factors on the loss of each token, ``(B, T)``, verl's rollout correction; None: 1.
        aggregate: maps the loss per token and the bool mask, both ``(B, T)``, to a 0-d loss; the default is token-mean.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1.
    """
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    check_inputs(clip_ratio_c, **tensors)
    # What is masked is gone before exp, not only after it: infinity times 0 would be NaN.
    mask = response_mask.bool()
    advantages = torch.where(mask, advantages.detach(), 0)
    log_ratio = torch.where(mask, log_ratio_of(old_log_prob.detach(), log_prob), 0)
    ratio = log_ratio.exp()

    # One clamp a token, with bounds of its own.
    negative = advantages < 0
    low, high = (x.to(ratio.dtype) if isinstance(x, Tensor) else ratio.new_full((), x) for x in (low, high))
    floor = torch.where(negative, low, 0.0)
    ceiling = torch.where(negative, math.inf if clip_ratio_c is None else clip_ratio_c, high)
    clipped_ratio = ratio.clamp(floor, ceiling)
    token_loss = -advantages * clipped_ratio
    is_clipped = clipped_ratio != ratio
    tokens = mask.count_nonzero().clamp(min=1)
    covariance = entropy_covariance(log_prob, advantages, ratio, mask, is_clipped)
    if rollout_is_weights is not None:
        token_loss = token_loss * torch.where(mask, rollout_is_weights, 0)

    clipped = (is_clipped & (advantages != 0)).count_nonzero()
    dual_clipped = (negative & (ratio > ceiling)).count_nonzero()
    return SurrogateLoss(
        loss=aggregate(token_loss, mask),
        pg_clipfrac=(clipped - dual_clipped) / tokens,
        ppo_kl=-log_ratio.detach().sum() / tokens,
        pg_clipfrac_lower=dual_clipped / tokens,
        entropy_covariance=covariance,
    )
