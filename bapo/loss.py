"""The clipped surrogate of PPO with given bounds on the ratio, and verl's dual clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.ratio import LOG_RATIO_LIMIT, check_shapes, log_ratio_of


@dataclass(frozen=True)
class SurrogateLoss:
    """The loss to minimise and three fractions and means over the response tokens, all 0-d tensors.

    Attributes:
        loss: carries the graph.
        pg_clipfrac: share of the tokens whose surrogate a bound clips.
        ppo_kl: mean of ``old_log_prob - log_prob``.
        pg_clipfrac_lower: share of the tokens that the dual clip clips.
    """

    loss: Tensor
    pg_clipfrac: Tensor
    ppo_kl: Tensor
    pg_clipfrac_lower: Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` ``(B, T)`` where ``mask`` is true; 0 where nothing is."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


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
        low, high: bounds on the ratio, 0-d tensors or numbers.
        clip_ratio_c: dual clip (arXiv 1912.09729) of tokens with negative advantage, above 1; None: none.
        rollout_is_weights: factors on the loss of each token, ``(B, T)``, verl's rollout correction; None: 1.
        aggregate: maps the loss per token and the bool mask, both ``(B, T)``, to a 0-d loss; the default is token-mean.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1.
    """
    check_shapes(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c!r} is not usable: use a number above 1, or None for no dual clip."
        )
    mask = response_mask.bool()
    token_loss, log_ratio, clipped, dual_clipped = _ClippedSurrogate.apply(
        log_prob, old_log_prob, advantages, mask, low, high, clip_ratio_c
    )
    if rollout_is_weights is not None:
        token_loss = token_loss * rollout_is_weights.masked_fill(~mask, 0)
    tokens = mask.sum().clamp(min=1)
    return SurrogateLoss(
        loss=aggregate(token_loss, mask),
        pg_clipfrac=(clipped.sum() - dual_clipped.sum()) / tokens,
        ppo_kl=-log_ratio.sum() / tokens,
        pg_clipfrac_lower=dual_clipped.sum() / tokens,
    )


class _ClippedSurrogate(torch.autograd.Function):
    """The loss per token and, because d r / d log_prob = r, its gradient at once: ``-A*r`` where nothing clips.

    Autograd over the plain operations would keep and visit a (B, T) tensor for each of them.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask, low, high, clip_ratio_c):
        log_ratio = log_ratio_of(old_log_prob, log_prob).masked_fill_(~mask, 0)
        ratio = log_ratio.exp()
        minus_advantages = advantages.to(ratio.dtype).neg().masked_fill_(~mask, 0)
        negative = minus_advantages > 0
        raised = ratio.clamp(min=low)  # apart from the next line: a number beside a tensor would be a read by the host
        if clip_ratio_c is not None:
            raised.clamp_(max=clip_ratio_c)
        clipped_ratio = torch.where(negative, raised, ratio.clamp(max=high))
        clipped = (clipped_ratio != ratio).logical_and_(minus_advantages != 0)
        dual_clipped = negative.logical_and_(ratio > clip_ratio_c) if clip_ratio_c is not None else negative.zero_()
        gradient = ratio.mul_(minus_advantages).masked_fill_(clipped, 0)
        gradient.masked_fill_(log_ratio.abs() >= LOG_RATIO_LIMIT, 0)
        ctx.save_for_backward(gradient)
        ctx.dtype = log_prob.dtype
        ctx.mark_non_differentiable(log_ratio, clipped, dual_clipped)
        return clipped_ratio.mul_(minus_advantages), log_ratio, clipped, dual_clipped

    @staticmethod
    def backward(ctx, grad_loss, *unused):
        (gradient,) = ctx.saved_tensors
        return (grad_loss * gradient).to(ctx.dtype), None, None, None, None, None, None
