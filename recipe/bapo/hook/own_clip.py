# SPDX-License-Identifier: Apache-2.0
"""What one of verl's own losses clips: which tokens get no gradient from it, or a capped one."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo.ratio import log_ratio_of


@dataclass(frozen=True)
class OwnClip:
    """The limits of a loss.

    Attributes:
        kind: ``clip``: a token beyond a limit has no gradient. ``cap``: it keeps one, with the limit as its weight.
        low, high: the limits. With ``clip``, ``low`` holds for tokens with A < 0 and ``high`` for those with A > 0;
            with ``cap`` both hold for all.
        dual_clip: limit of the ratios of tokens with A < 0. With ``probability`` and ``divergence`` it caps the ratio
            of every token, and no token loses its gradient by it.
        of: what the limits are about, a key of ``QUANTITIES``.
    """

    kind: str
    low: float
    high: float
    dual_clip: float = math.inf
    of: str = "ratio"

    def __call__(
        self, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ratio in the gradient of each token, and whether the loss clips or caps it, ``(B, T)`` each.

        The gradient of the loss of a token by its log-prob is minus advantage times this ratio, times factors that are
        the same for all tokens of a response. Where A = 0 or the mask is false both mean nothing.
        """
        ratio = log_ratio_of(old_log_prob, log_prob).exp()
        if self.kind == "cap":
            capped = ratio.clamp(self.low, self.high)
            return capped, capped != ratio
        quantity = QUANTITIES[self.of](old_log_prob, log_prob, mask)
        clipped = torch.where(advantages > 0, quantity > self.high, quantity < self.low)
        if self.of == "ratio":
            clipped |= (advantages < 0) & (ratio > self.dual_clip)
        elif self.of == "sequence ratio":
            ratio = quantity
        elif self.of == "log-ratio":  # clipped tokens count in the mean of their response
            limited = torch.where(advantages > 0, quantity.clamp(max=self.high), quantity.clamp(min=self.low))
            ratio = _mean(limited, mask).exp()
        else:
            ratio = ratio.clamp(max=self.dual_clip)
        return torch.where(clipped, 0, ratio), clipped


def _log_ratio(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    """Compute log r; 0 where the mask is false. verl does not clamp it in losses of whole responses."""
    return torch.where(mask.bool(), log_prob - old_log_prob, 0)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of a response, at each of them."""
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    return (torch.where(mask.bool(), values, 0).sum(-1, keepdim=True) / tokens).expand_as(values)


def _ratio(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    return log_ratio_of(old_log_prob, log_prob).exp()


def _sequence_ratio(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    return _mean(_log_ratio(old_log_prob, log_prob, mask), mask).clamp(max=10.0).exp()


def _probability(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    return log_prob.exp() - old_log_prob.exp()


def _divergence(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    """Compute the KL divergence between "this token" and "any other", with the sign of the change."""
    new, old = log_prob.exp(), old_log_prob.exp()
    others = (1.0 - old) * torch.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
    divergence = old * (old_log_prob - log_prob) + others
    # By rounding it can be below 0, or not a number where a probability is above 1, which verl takes as too large.
    return torch.sign(new - old) * divergence.nan_to_num(nan=math.inf).clamp(min=0)


# What a loss compares with its limits.
QUANTITIES = {
    "ratio": _ratio,
    "sequence ratio": _sequence_ratio,  # the geometric mean of the ratios of a response: gspo
    "log-ratio": _log_ratio,  # geo_mean
    "probability": _probability,  # its change: dppo_tv
    "divergence": _divergence,  # dppo_kl
}


def own_clip_of(actor_config: Any) -> OwnClip | None:
    """Return the limits of a run's loss, or None if it has none.

    ``sapo``, ``gpg``, ``dro``, ``kl_cov`` and ``bypass_mode`` with ``reinforce`` do not clip. Of ``clip_cov`` this is
    the clip of the ratio alone. The tokens that ``bypass_mode`` rejects are counted too.

    Args:
        actor_config: verl's ``ActorConfig``.
    """
    loss, mode = actor_config.policy_loss, actor_config.policy_loss.loss_mode
    low, high = (
        actor_config.clip_ratio if distance is None else distance
        for distance in (actor_config.clip_ratio_low, actor_config.clip_ratio_high)
    )
    most = actor_config.clip_ratio_c or math.inf
    bypass_clips = mode == "bypass_mode" and loss.rollout_correction.get("loss_type", "ppo_clip") == "ppo_clip"
    if mode == "vanilla" or bypass_clips:
        return OwnClip("clip", 1 - low, 1 + high, most)
    if mode == "clip_cov":
        return OwnClip("clip", 1 - low, 1 + high)
    if mode == "cispo":
        return OwnClip("cap", 1 - low, 1 + high)
    if mode == "gspo":
        return OwnClip("clip", 1 - low, 1 + high, of="sequence ratio")
    if mode == "geo_mean":
        return OwnClip("clip", -low, high, of="log-ratio")
    if mode in ("dppo_tv", "dppo_kl"):
        return OwnClip("clip", -low, high, most, "probability" if mode == "dppo_tv" else "divergence")
    return None
