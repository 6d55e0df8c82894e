# SPDX-License-Identifier: Apache-2.0
"""The methods of the study: their losses, batched over runs, and the bounds of those that have bounds.

Names of methods, with the settings that may follow ``@``:

- a file of configs/method with BAPO's options: ``grpo``, ``bapo@0.4`` (a target), ``bapo@0.4,ratio_upper_max=2.0``;
- a loss of verl's registry with the settings of ``VERL``: ``cispo``, ``cispo@clip_ratio_high=2.0``;
- ``topr`` and ``m2po``;
- ``schedule``: fixed bounds for each epoch on a rollout, from ``scripts.study.schedule``;
- bounds of an earlier run: ``other_seed:bapo@0.4`` (the bounds of the next seed's run at the same update) and
  ``own_mean:bapo@0.4`` (the mean bounds of the same seed's run, at every update);
- bounds of the previous rollout batch: ``previous_batch:bapo@0.4``, see ``previous_batch_bounds``.

``R`` is the number of runs, ``N`` of responses of an update in a run, ``T`` of tokens of a response (padded).
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from bapo import BAPOConfig, clipped_surrogate_loss
from bapo.search import reaches_target, search_path

ROOT = Path(__file__).parents[2]
PREVIOUS_BATCH = "previous_batch:"  # prefix of the name of a method that searches
M2PO_BUDGET = 0.04  # mean squared log-ratio (arXiv 2510.01161)

# Losses of verl 0.9.1's registry with their published settings. The advantages are GRPO's for all of them.
_SEQUENCE_MEAN = "seq-mean-token-mean"
VERL = {
    # arXiv 2507.18071; verl's examples/gspo_trainer. verl's loss recommends this aggregation.
    "gspo": dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg_mode=_SEQUENCE_MEAN),
    # arXiv 2511.20347; verl's defaults. verl's loss always aggregates like this.
    "sapo": dict(tau_pos=1.0, tau_neg=1.05, loss_agg_mode=_SEQUENCE_MEAN),
    # arXiv 2506.13585 has no lower bound and does not give the upper one. Both are from verl's examples/cispo_trainer.
    "cispo": dict(clip_ratio_low=10.0, clip_ratio_high=0.2),
    # arXiv 2602.04879; verl's examples/dppo_trainer. The loss needs a large clip_ratio_c; verl's default is 3.
    "dppo_tv": dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=1e4),
    "dppo_kl": dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=1e4),
    # GRPO with the aggregation of GSPO and SAPO, to see how much of their difference from GRPO it explains.
    "vanilla": dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, loss_agg_mode=_SEQUENCE_MEAN),
}


@dataclass(frozen=True)
class Tokens:
    """The arguments of a loss: ``old_log_prob``, ``log_prob``, ``advantages`` and bool ``mask``, each ``(R, N, T)``."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor

    def of_run(self, run: int) -> tuple[Tensor, ...]:
        """Return the four tensors of one run, ``(N, T)``."""
        return tuple(tensor[run] for tensor in (self.old_log_prob, self.log_prob.detach(), self.advantages, self.mask))

    def log_ratio(self) -> Tensor:
        """Compute the log of the importance ratio without a graph, clamped to +-20 as in the losses, ``(R, N, T)``."""
        return (self.log_prob.detach() - self.old_log_prob).clamp(-20, 20)


def loss_of(method: str, tokens: Tokens, bounds: dict[str, Tensor], dual_clip: float | None) -> Tensor:
    """Compute the loss, added up over the runs, so that every run has the gradient that it would have alone.

    Args:
        method: the method's name.
        tokens: the tokens, with a graph at ``log_prob``.
        bounds: ``low`` and ``high``, ``(R,)``. verl's losses, whose own limits are in ``VERL``, and TOPR ignore them.
        dual_clip: limit on the ratio of negative tokens. Ignored by verl's losses, whose settings are in ``VERL``, by
            M2PO, which has no dual clip, and by TOPR, which weights negative tokens by at most 1.
    """
    base = method.partition("@")[0]
    if base in VERL:
        return verl_loss(method, tokens)
    if base == "topr":  # arXiv 2503.14286, token by token
        weight = torch.where(tokens.advantages > 0, 1.0, tokens.log_ratio().exp().clamp(max=1))
        return per_run_mean(-tokens.advantages * weight * tokens.log_prob, tokens.mask)
    low, high = (bounds[key].float()[:, None, None] for key in ("low", "high"))
    return clipped_surrogate_loss(
        tokens.old_log_prob,
        tokens.log_prob,
        tokens.advantages,
        tokens.mask,
        low=low,
        high=high,
        clip_ratio_c=None if base == "m2po" else dual_clip,
        aggregate=per_run_mean,
    ).loss


def per_run_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Add up the token-means of the runs."""
    return ((values * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)).sum()


@functools.cache
def verl_settings(method: str):
    """Return the function of verl's registry and its ``ActorConfig``."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    base, _, options = method.partition("@")
    changed = {key: float(value) for key, _, value in (option.partition("=") for option in options.split(",")) if key}
    needed = dict(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)  # no loss reads these
    return get_policy_loss_fn(base), ActorConfig(**needed, **VERL[base] | changed)


def verl_loss(method: str, tokens: Tokens) -> Tensor:
    """Call verl's own loss once with the responses of all runs.

    verl multiplies the loss of each token by ``rollout_is_weights`` before it aggregates. The weights below turn its
    mean over all runs into the sum of the means of the runs.
    """
    function, config = verl_settings(method)
    tensors = [tokens.old_log_prob, tokens.log_prob, tokens.advantages, tokens.mask.float()]
    if config.loss_agg_mode == "token-mean":
        count = tokens.mask.sum((1, 2), keepdim=True)
        weights = (count.sum() / count).expand_as(tokens.mask)
    else:  # a mean over responses, of which all runs have the same number
        weights = torch.full_like(tokens.old_log_prob, len(tokens.mask))
    *flat, weights = (tensor.flatten(0, 1) for tensor in (*tensors, weights))
    loss, _ = function(*flat, loss_agg_mode=config.loss_agg_mode, config=config, rollout_is_weights=weights)
    return loss


@functools.cache
def config_of(method: str) -> BAPOConfig:
    """Load the options of a method that has a file in configs/method."""
    name, _, options = method.partition("@")
    files = ["bapo", name]  # every other file inherits bapo.yaml
    values = OmegaConf.merge(*(OmegaConf.load(ROOT / "configs" / "method" / f"{file}.yaml") for file in files))
    values = {key: value for key, value in values.items() if key in BAPOConfig.__dataclass_fields__}
    for option in filter(None, options.split(",")):
        key, _, value = option.rpartition("=")
        values[key or "positive_contribution_target"] = float(value)
    return BAPOConfig(**values)


def path_of(config: BAPOConfig) -> tuple[Tensor, Tensor]:
    """Return the candidates of the search in order: lower and upper bounds, both ``(candidates,)`` float64."""
    upper, lower = search_path(config)
    return config.lower.grid()[lower], config.upper.grid()[upper]


def find_bounds(method: str, tokens: Tokens, dual_clip: float | None) -> dict[str, Tensor]:
    """Find ``low`` and ``high`` of every run; a search adds the other entries of ``search``. All ``(R,)`` float64."""
    runs, base = len(tokens.mask), method.partition("@")[0]
    if base == "m2po":
        return m2po_bounds(tokens)
    if base == "topr" or base in VERL:
        return fixed_bounds(0.0, torch.inf, runs)
    config = config_of(method)
    if config.fixed:
        return fixed_bounds(config.ratio_lower_start, config.ratio_upper_start, runs)
    return search(tokens, config, dual_clip)


def previous_batch_bounds(
    method: str, tokens: Tokens, dual_clip: float | None, earlier: list[Tensor], updates_on_a_batch: int
) -> dict[str, Tensor]:
    """Return the bounds that the search found at the same update of the previous rollout batch.

    On the first batch these are the bounds of the latest search, and before any search the starts of the ranges.

    Args:
        method: ``previous_batch:`` and a method that searches.
        tokens: the tokens of this update. They are searched, too, but only later updates use the result.
        dual_clip: as in ``search``.
        earlier: the ``search_steps`` ``(R,)`` of all updates before this one.
        updates_on_a_batch: number of updates on one rollout batch.

    Returns:
        ``low`` and ``high`` are the bounds to use; the other entries describe the search of these tokens. All ``(R,)``.
    """
    searching = method.removeprefix(PREVIOUS_BATCH)
    found = find_bounds(searching, tokens, dual_clip)
    del found["positive_contribution"]  # measured at bounds that this update does not use
    if len(earlier) >= updates_on_a_batch:
        steps = earlier[-updates_on_a_batch]
    else:
        steps = earlier[-1] if earlier else torch.zeros_like(found["search_steps"])
    low, high = (bound[steps.long()] for bound in path_of(config_of(searching)))
    return found | {"low": low, "high": high}


def fixed_bounds(low: float, high: float, runs: int) -> dict[str, Tensor]:
    """Return the same bounds for every run."""
    return {"low": torch.full((runs,), low).double(), "high": torch.full((runs,), high).double()}


def m2po_bounds(tokens: Tokens) -> dict[str, Tensor]:
    """Compute the bounds that clip the same tokens as M2PO's mask (arXiv 2510.01161, Algorithm 1).

    M2PO drops tokens whose update would move the ratio further from 1 (A > 0 and r > 1, or A < 0 and r < 1). Of these
    it drops the largest (log r)^2 first, until the mean of (log r)^2 over those that remain is at most ``M2PO_BUDGET``.
    A clipped token has no gradient either, so each update's mask is equivalent to a pair of bounds exp(-t) and exp(t).
    """
    log_ratio = tokens.log_ratio().double()
    outward = (log_ratio * tokens.advantages > 0) & tokens.mask
    size = torch.where(outward, log_ratio.abs(), 0.0).flatten(1).sort(1).values
    size = torch.nn.functional.pad(size, (1, 0))  # a zero, which is always kept
    counted = (size > 0).cumsum(1)
    kept = size.square().cumsum(1) <= M2PO_BUDGET * counted  # the sizes are sorted, so their running mean never falls
    last = kept.sum(1, keepdim=True) - 1
    next_size = size.gather(1, (last + 1).clamp(max=size.shape[1] - 1)).squeeze(1)
    limit = torch.where(kept.all(1), torch.inf, (size.gather(1, last).squeeze(1) + next_size) / 2)
    return {"low": (-limit).exp(), "high": limit.exp()}


def search(tokens: Tokens, config: BAPOConfig, dual_clip: float | None) -> dict[str, Tensor]:
    """Find the same bounds as ``bapo.find_clip_bounds``, for all runs at once. A call per run would take twice as long.

    Returns the fields of ``ClipBounds`` and ``positive_contribution_start``, each ``(R,)`` float64.

    Compute P and N at every candidate of the path, then take the first that reaches the target, or the last.
    """
    ratio, positive, negative = _weighted(tokens, config.token_weight)
    low, high = config.lower.grid(), config.upper.grid()
    p = torch.stack([_positive_sum(ratio, positive, bound, config.contribution) for bound in high])
    n = torch.stack([_negative_sum(ratio, negative, bound, config.contribution, dual_clip) for bound in low])
    upper, lower = search_path(config)
    p, n, low, high = p[upper], n[lower], low[lower], high[upper]
    reached = reaches_target(p, n, config.positive_contribution_target)
    saturated = ~reached.any(0)
    chosen = torch.where(saturated, len(high) - 1, reached.int().argmax(0))
    rho = torch.where(p + n > 0, p / (p + n), 0.0)
    return {
        "low": low[chosen],
        "high": high[chosen],
        "positive_contribution": rho.gather(0, chosen[None]).squeeze(0),
        "positive_contribution_start": rho[0],
        "search_steps": chosen.double(),
        "saturated": saturated.double(),
    }


def _weighted(tokens, token_weight):
    """Return the ratio, and ``w |A|`` of positive and of negative tokens, each ``(R, N * T)`` float64."""
    ratio = tokens.log_ratio().exp().double().flatten(1)
    weight = tokens.advantages.double() * tokens.mask
    if token_weight == "rollout_prob":
        weight = weight * tokens.old_log_prob.double().exp()
    return ratio, weight.clamp(min=0).flatten(1), -weight.clamp(max=0).flatten(1)


def _positive_sum(ratio, positive, high, contribution):
    counted = ratio.clamp(max=high) if contribution == "value" else ratio * (ratio < high)
    return (positive * counted).sum(1)


def _negative_sum(ratio, negative, low, contribution, dual_clip):
    if contribution == "value":
        return (negative * ratio.clamp(min=low)).sum(1)
    return (negative * ratio * ((ratio > low) & (ratio < (torch.inf if dual_clip is None else dual_clip)))).sum(1)


def contribution_at(tokens: Tokens, low: Tensor, high: Tensor) -> Tensor:
    """Compute the positive contribution of Eq. 8 ``(R,)`` at bounds ``(R,)``, with the paper's token weight."""
    ratio, positive, negative = _weighted(tokens, "rollout_prob")
    p = _positive_sum(ratio, positive, high[:, None], "value")
    n = _negative_sum(ratio, negative, low[:, None], "value", None)
    return torch.where(p + n > 0, p / (p + n), 0.0)
