# SPDX-License-Identifier: Apache-2.0
"""What an update does to the entropy: the covariance of Eq. 6, from sums that add up over micro-batches and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EntropySums(NamedTuple):
    """Sums over response tokens, 0-d tensors or ``(...)``.

    The loss changes a token's log-prob by ``g*A``: g is the ratio r, or 0 where the loss clips the token.

    Attributes:
        ratio, ratio_log_prob: r and r*log_prob.
        gradient, gradient_log_prob: g*A and g*A*log_prob.
    """

    ratio: Tensor
    ratio_log_prob: Tensor
    gradient: Tensor
    gradient_log_prob: Tensor

    @property
    def covariance(self) -> Tensor:
        """The covariance of ``log_prob`` and ``g/r*A`` (Eq. 6) under the policy that is trained, in nats.

        An update with a positive covariance lowers the entropy. Tokens are weighted by their ratio, which turns a mean
        over the old policy's tokens into a mean under the policy that is trained.
        """
        total = self.ratio.clamp(min=torch.finfo(self.ratio.dtype).tiny)  # 0 if no token counts
        return (self.gradient_log_prob - self.gradient * (self.ratio_log_prob / total)) / total


@torch.no_grad()
def sum_for_entropy(log_prob: Tensor, ratio: Tensor, gradient: Tensor, mask: Tensor) -> EntropySums:
    """Add up the tokens of a micro-batch. All tensors are ``(B, T)``; the sums have the type of ``ratio``.

    Args:
        log_prob: masked positions may hold anything.
        ratio: finite.
        gradient: g*A, 0 where masked.
        mask: bool, true where a token counts.
    """
    log_prob, ratio = (torch.where(mask, values, 0).to(ratio.dtype).flatten() for values in (log_prob, ratio))
    gradient = gradient.flatten()
    return EntropySums(ratio.sum(), ratio.dot(log_prob), gradient.sum(), gradient.dot(log_prob))
