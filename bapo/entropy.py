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
