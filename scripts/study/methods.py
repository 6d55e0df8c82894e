# SPDX-License-Identifier: Apache-2.0
"""The methods of the study: those of configs/method with the project's loss, and two of the study alone.

A name may carry a target and other switches: ``bapo@0.4``, ``bapo@0.4,ratio_upper_max=2.0``.
``R`` runs, ``N`` responses, ``T`` tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from bapo import BAPOConfig, clipped_surrogate_loss
from bapo.ratio import log_ratio_of
from bapo.search import reaches_target, search_path

ROOT = Path(__file__).parents[2]
BALANCE = 0.4  # the positive contribution that ``balance`` scales to


@dataclass(frozen=True)
class Tokens:
    """What a loss sees: ``old_log_prob``, ``log_prob``, ``advantages`` and bool ``mask``, each ``(R, N, T)``."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor

    def of_run(self, run: int) -> tuple[Tensor, ...]:
        """The four tensors of one run, ``(N, T)``."""
        return tuple(tensor[run] for tensor in (self.old_log_prob, self.log_prob.detach(), self.advantages, self.mask))


@functools.cache
def config_of(name: str) -> BAPOConfig:
    """The switches of a method; ``topr`` has none, and ``balance`` those of GRPO."""
    name, _, switches = name.partition("@")
    path = ROOT / "configs" / "method" / f"{'grpo' if name in ('topr', 'balance') else name}.yaml"
    values = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("loss_mode", None)
    for switch in filter(None, switches.split(",")):
        key, _, value = switch.rpartition("=")
        values[key or "positive_contribution_target"] = float(value)
    return BAPOConfig(**values)


def searches(name: str) -> bool:
    """Whether the method has bounds to search for."""
    return not config_of(name).fixed


def per_run_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The token-mean of each run, added up over the runs: every run then has the gradient it would have alone."""
    return ((values * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)).sum()


def find_bounds(name: str, tokens: Tokens, dual_clip: float | None) -> dict[str, Tensor]:
    """The bounds of every run and, of a search, how it went; each value ``(R,)`` float64."""
    runs = tokens.mask.shape[0]
    config = config_of(name)
    if searches(name):
        return search(tokens, config, dual_clip)
    unclipped = {"low": 0.0, "high": torch.inf}
    fixed = {"low": config.ratio_lower_start, "high": config.ratio_upper_start} if name != "topr" else unclipped
    return {key: torch.full((runs,), value, dtype=torch.float64) for key, value in fixed.items()}


def search(tokens: Tokens, config: BAPOConfig, dual_clip: float | None) -> dict[str, Tensor]:
    """The bounds of ``bapo.find_clip_bounds``, for all runs at once: a call for each would double the time of a run.

    P and N at every point of their grids, then the first candidate of the path that reaches the target, or the last.
    """
    ratio, positive, negative = _weighted(tokens, config.token_weight)
    high, low = config.upper.points(), config.lower.points()
    p = torch.stack([_positive_sum(ratio, positive, bound, config.contribution) for bound in high])
    n = torch.stack([_negative_sum(ratio, negative, bound, config.contribution, dual_clip) for bound in low])
    upper, lower = search_path(config)
    p, n = p[upper], n[lower]
    reached = reaches_target(p, n, config.positive_contribution_target)
    saturated = ~reached.any(0)
    chosen = torch.where(saturated, len(upper) - 1, reached.int().argmax(0))
    rho = torch.where(p + n > 0, p / (p + n), 0.0)
    return {
        "low": low[lower[chosen]],
        "high": high[upper[chosen]],
        "positive_contribution": rho.gather(0, chosen[None]).squeeze(0),
        "positive_contribution_start": rho[0],
        "search_steps": chosen.double(),
        "saturated": saturated.double(),
    }


def _weighted(tokens, token_weight):
    """The ratio, and ``w |A|`` of positive and of negative tokens, each ``(R, N * T)`` float64."""
    ratio = log_ratio_of(tokens.old_log_prob, tokens.log_prob).exp_().double().flatten(1)
    weight = tokens.advantages.double() * tokens.mask
    if token_weight == "rollout_prob":
        weight = weight * tokens.old_log_prob.double().exp()
    return ratio, weight.clamp(min=0).flatten(1), -weight.clamp(max=0).flatten(1)


def _positive_sum(ratio, positive, high, contribution):
    counted = ratio.clamp(max=high) if contribution == "value" else ratio * (ratio < high)
    return (positive * counted).sum(1)


def _negative_sum(ratio, negative, low, contribution, dual_clip):
    if contribution == "value":
        return (negative * torch.clamp(ratio, min=low)).sum(1)
    return (negative * ratio * ((ratio > low) & (ratio < (torch.inf if dual_clip is None else dual_clip)))).sum(1)


def contribution_at(tokens: Tokens, low: Tensor, high: Tensor, contribution: str, dual_clip: float | None) -> Tensor:
    """The positive contribution ``(R,)`` at bounds ``(R,)``, with the paper's token weight."""
    ratio, positive, negative = _weighted(tokens, "rollout_prob")
    p = _positive_sum(ratio, positive, high[:, None], contribution)
    n = _negative_sum(ratio, negative, low[:, None], contribution, dual_clip)
    return torch.where(p + n > 0, p / (p + n), 0.0)


def loss_of(name: str, tokens: Tokens, dual_clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, added up over the runs, and the bounds of ``find_bounds``.

    ``topr`` (arXiv 2503.14286, per token): positive tokens count as they are, negative ones with min(r, 1); it has no
    bounds, and a dual clip above 1 changes nothing. ``balance``: GRPO's bounds, and advantages of negative tokens
    scaled down until the positive contribution is 0.4; where it is higher, nothing is scaled.
    """
    bounds = find_bounds(name, tokens, dual_clip)
    advantages = tokens.advantages
    if name == "topr":
        ratio = (tokens.log_prob.detach() - tokens.old_log_prob).clamp(-20, 20).exp()
        weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=1))
        return per_run_mean(-advantages * weight * tokens.log_prob, tokens.mask), bounds
    if name == "balance":
        rho = contribution_at(tokens, bounds["low"], bounds["high"], "value", dual_clip)
        scale = (rho * (1 - BALANCE) / (BALANCE * (1 - rho)).clamp(min=1e-9)).clamp(max=1).float()
        advantages = torch.where(advantages < 0, advantages * scale[:, None, None], advantages)
    low, high = (bounds[key].float()[:, None, None] for key in ("low", "high"))
    surrogate = clipped_surrogate_loss(
        tokens.old_log_prob,
        tokens.log_prob,
        advantages,
        tokens.mask,
        low=low,
        high=high,
        clip_ratio_c=dual_clip,
        aggregate=per_run_mean,
    )
    return surrogate.loss, bounds
