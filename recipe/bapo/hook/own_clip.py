# SPDX-License-Identifier: Apache-2.0
"""What one of verl's own losses clips, where its rule is the token's ratio."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnClip:
    """The limits of a loss on a token's ratio.

    Attributes:
        kind: ``clip``: a token beyond a limit has no gradient. ``cap``: it keeps one, with the limit as its weight.
        low, high: the limits. With ``clip``, ``low`` holds for tokens with A < 0 and ``high`` for those with A > 0;
            with ``cap`` both hold for all.
        dual_clip: limit of the ratios of tokens with A < 0.
    """

    kind: str
    low: float
    high: float
    dual_clip: float = math.inf

    def __call__(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the effective ratio in the gradient, in any shape: 0 where clipped, the limit where capped.

        Where A = 0 it means nothing.
        """
        if self.kind == "cap":
            return ratio.clamp(self.low, self.high)
        below, above = ratio < self.low, ratio > self.high
        clipped = torch.where(advantages > 0, above, below | (ratio > self.dual_clip))
        return torch.where(clipped, 0, ratio)


def own_clip_of(actor_config: Any) -> OwnClip | None:
    """Return the limits of a run's loss, or None if it does not clip by the token's ratio.

    ``geo_mean``, ``gspo`` and ``dppo_*`` clip by other quantities. ``sapo``, ``gpg``, ``dro``, ``kl_cov`` and
    ``bypass_mode`` with ``reinforce`` do not clip. Of ``clip_cov`` this is the clip of the ratio alone. The tokens that
    ``bypass_mode`` rejects are counted too.

    Args:
        actor_config: verl's ``ActorConfig``.
    """
    loss, mode = actor_config.policy_loss, actor_config.policy_loss.loss_mode
    low, high = (
        actor_config.clip_ratio if distance is None else distance
        for distance in (actor_config.clip_ratio_low, actor_config.clip_ratio_high)
    )
    bypass_clips = mode == "bypass_mode" and loss.rollout_correction.get("loss_type", "ppo_clip") == "ppo_clip"
    if mode == "vanilla" or bypass_clips:
        return OwnClip("clip", 1 - low, 1 + high, actor_config.clip_ratio_c or math.inf)
    if mode == "clip_cov":
        return OwnClip("clip", 1 - low, 1 + high)
    if mode == "cispo":
        return OwnClip("cap", 1 - low, 1 + high)
    return None
