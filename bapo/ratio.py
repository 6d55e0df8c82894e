# SPDX-License-Identifier: Apache-2.0
"""The importance ratio and the checks of its inputs, the same in the search and in the loss.

Search, diagnostics and loss take the ratio from here, so that a change of the clamp or of the type changes all of them.
Otherwise the search would measure another loss than the one that is minimised.
"""

import math

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # as in verl's losses; exp(20) is 4.9e8
# A log-prob is at most 0, but bfloat16 rounds some that are nearly 0 to slightly above it.
MAX_OLD_LOG_PROB = 0.5


def log_ratio_of(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """Compute ``log r = log_prob - old_log_prob``, clamped to +-20. Any shape; the inputs' type, at least float32."""
    # Widened first: the difference of two bfloat16 numbers in bfloat16 is mostly rounding.
    dtype = torch.promote_types(torch.promote_types(old_log_prob.dtype, log_prob.dtype), torch.float32)
    return (log_prob.to(dtype) - old_log_prob.to(dtype)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def is_usable(old_log_prob: Tensor) -> Tensor:
    """Whether an old log-prob can be used: it is finite and not above ``MAX_OLD_LOG_PROB``. Any shape; bool.

    A rollout engine now and then reports NaN or -inf for a token. Search and loss leave such tokens out, as if they
    were masked.
    """
    return (old_log_prob > -math.inf) & (old_log_prob <= MAX_OLD_LOG_PROB)


def check_inputs(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, clip_ratio_c: float | None
) -> Tensor:
    """Refuse what neither the search nor the loss can use, and return the advantages, one for each token.

    Args:
        old_log_prob, log_prob, response_mask: ``(B, T)``, or ``(N,)``: tokens without padding, of any responses.
        advantages: in the same shape, or ``(B, 1)``: one for each response.

    Raises:
        ValueError: the tensors have other shapes, or the dual clip is not above 1.
    """
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    shape = log_prob.shape
    one_each = (shape[0], 1) if len(shape) == 2 else shape
    same = old_log_prob.shape == response_mask.shape == shape and advantages.shape in (shape, one_each)
    if not same or len(shape) not in (1, 2):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"All tensors must have the same shape, (B, T) or (N,), and advantages may be (B, 1), but got: {shapes}."
        )
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"invalid clip_ratio_c={clip_ratio_c!r}: use a number above 1, or None: no dual clip.")
    return advantages.expand(shape)
