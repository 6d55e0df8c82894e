# SPDX-License-Identifier: Apache-2.0
"""The policy loss ``bapo`` and its config: the border between verl and ``bapo/``.

``bound_scope=mini_batch`` needs the whole mini-batch, and verl hands the policy loss one micro-batch. Our worker
(``recipe.bapo.worker``) knows the rest: around each update it sets the finder that gives the loss its bounds
(``bounds_from``). Without our worker the loss searches itself where it can tell that it sees the whole mini-batch;
everything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipBounds, Diagnostics, clipped_surrogate_loss, find_clip_bounds, read_values
from recipe.bapo.records.tokens import noting, write_dump
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig


@dataclass
class BAPOPolicyLossConfig(PolicyLossConfig, BAPOConfig):
    """verl's policy-loss config with the switches of ``bapo.BAPOConfig``; unknown and unusable ones are refused.

    Args:
        loss_mode: ``bapo``.
        bounds_record_dir: folder in which every rank writes the bounds of each update, bit for bit, as JSON lines
            (``rank<N>.jsonl``). None: no record.
        token_dump_dir: folder in which every call of the loss leaves its tokens' log-probs and advantages for
            ``recipe.bapo.replay``, 12 to 20 bytes a response token; for runs of a few steps. None: no dump.
    """

    loss_mode: str = "bapo"
    bounds_record_dir: str | None = None
    token_dump_dir: str | None = None

    def __post_init__(self):
        BAPOConfig.__post_init__(self)
        if self.loss_mode != "bapo":
            raise ValueError(
                f"loss_mode={self.loss_mode!r} is not usable with {type(self).__name__}: use loss_mode=bapo. With "
                "fixed bounds (start equal to max) it is verl's vanilla loss; others start with verl.trainer.main_ppo."
            )


@dataclass
class DumpConfig(PolicyLossConfig):
    """For a run with one of verl's own losses, whose tokens are dumped for ``recipe.bapo.replay``.

    Args:
        loss_mode: ``dump``.
        dumped_loss: the loss that trains, a name in verl's registry.
        token_dump_dir: as in ``BAPOPolicyLossConfig``.
    """

    loss_mode: str = "dump"
    dumped_loss: str = "vanilla"
    token_dump_dir: str | None = None

    def __post_init__(self):
        if self.token_dump_dir is None:
            raise ValueError("actor_rollout_ref.actor.policy_loss.token_dump_dir is not set: name a folder to dump to.")


# Maps the old log-probs, log-probs, advantages and mask of a micro-batch, ``(B, T)``, to the bounds of its update and
# the diagnostics of the tokens that they were found from.
BoundsFinder = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[ClipBounds, Diagnostics]]
_bounds_finder: ContextVar[BoundsFinder | None] = ContextVar("bounds_finder", default=None)


@contextmanager
def bounds_from(finder: BoundsFinder) -> Iterator[None]:
    """Within this context the loss takes its bounds from ``finder``.

    verl looks the loss up by name and hands it nothing of ours, but calls it in the thread that trains.
    """
    token = _bounds_finder.set(finder)
    try:
        yield
    finally:
        _bounds_finder.reset(token)


@register_policy_loss("bapo")
def compute_policy_loss_bapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss with bounds found by BAPO. One transfer to the host a call.

    Args:
        old_log_prob, log_prob, advantages, response_mask: one micro-batch, ``(B, T)``.
        loss_agg_mode: verl's aggregation mode.
        config: verl's ``ActorConfig``; ``policy_loss`` is a ``BAPOPolicyLossConfig``.
        rollout_is_weights: verl's rollout correction, ``(B, T)`` or None.

    Returns:
        The loss, and the metrics, with the same keys on every call.

    Raises:
        ValueError: the whole mini-batch is needed and not known; non-finite input on response tokens; a wrong config.
    """
    bapo_config = _bapo_config_of(config)
    _refuse_padded_width(log_prob, loss_agg_mode, config)
    tensors = (old_log_prob, log_prob, advantages, response_mask)
    if bapo_config.token_dump_dir is not None:
        _dump(bapo_config.token_dump_dir, tensors, rollout_is_weights, config, bapo_config)
    find_bounds = _bounds_finder.get() or partial(_find_without_our_worker, config)
    bounds, diagnostics = find_bounds(*tensors)
    surrogate = clipped_surrogate_loss(
        *tensors,
        low=bounds.low,
        high=bounds.high,
        clip_ratio_c=config.clip_ratio_c,
        rollout_is_weights=rollout_is_weights,
        aggregate=partial(agg_loss, loss_agg_mode=loss_agg_mode, **config.global_batch_info),
    )
    verls = {name: getattr(surrogate, name) for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")}
    values = read_values(bounds, diagnostics, **verls, entropy_covariance=surrogate.entropy_covariance)
    values["clip_low"], values["clip_high"] = values.pop("low"), values.pop("high")
    values["met_at_once"] = float(values["search_steps"] == 0 and not values["saturated"])
    return surrogate.loss, {
        f"actor/{name}" if name in verls else f"actor/bapo/{name}": value for name, value in values.items()
    }


@register_policy_loss("dump")
def compute_policy_loss_dump(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's loss ``dumped_loss`` as it is, after its tokens are dumped; arguments and results are that loss's."""
    chosen = config.policy_loss
    tensors = (old_log_prob, log_prob, advantages, response_mask)
    bounds = _vanillas_bounds(config) if chosen.dumped_loss == "vanilla" else None
    _dump(chosen.token_dump_dir, tensors, rollout_is_weights, config, bounds)
    loss_fn = get_policy_loss_fn(chosen.dumped_loss)
    return loss_fn(*tensors, loss_agg_mode=loss_agg_mode, config=config, rollout_is_weights=rollout_is_weights)


def _vanillas_bounds(config):
    """The bounds of verl's vanilla loss as fixed bounds; None where the report has no name for them."""
    low, high = (
        config.clip_ratio if of_side is None else of_side for of_side in (config.clip_ratio_low, config.clip_ratio_high)
    )
    if not (0 < low <= 1 and high > 0):
        return None
    fixed = {"lower": 1 - low, "upper": 1 + high}
    return BAPOConfig(**{f"ratio_{side}_{end}": fixed[side] for side in fixed for end in ("start", "max")})


def _dump(folder, tensors, rollout_is_weights, config, switches: BAPOConfig | None):
    about = {key: config.global_batch_info.get(key) for key in ("dp_size", "global_batch_size")}
    about["clip_ratio_c"] = config.clip_ratio_c
    if switches is not None:
        about["bound_scope"] = switches.bound_scope
        about["switches"] = json.dumps({field.name: getattr(switches, field.name) for field in fields(BAPOConfig)})
    with noting(**({} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights})):
        write_dump(folder, *tensors, about)


def _find_without_our_worker(config, *tensors):
    if config.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={config.strategy} is not usable with loss_mode=bapo: set it to fsdp or "
            "fsdp2, for which it is written. (In pipelines, for one, only the last stage calls the loss, and the "
            "collective of its search would hang.)"
        )
    if config.policy_loss.bound_scope == "mini_batch" and not _sees_mini_batch(tensors[0], config.global_batch_info):
        raise ValueError(_needs_mini_batch(tensors[0], config))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    return find_clip_bounds(*tensors, config.policy_loss, process_group=group, clip_ratio_c=config.clip_ratio_c)


def _bapo_config_of(config):
    if not isinstance(config.policy_loss, BAPOConfig):
        raise ValueError(
            f"loss_mode=bapo needs actor_rollout_ref.actor.policy_loss._target_={__name__}.BAPOPolicyLossConfig, "
            f"but the config is a {type(config.policy_loss).__name__}."
        )
    return config.policy_loss


def _sees_mini_batch(log_prob, info):
    dp_size, global_batch_size = info.get("dp_size"), info.get("global_batch_size")
    return None not in (dp_size, global_batch_size) and log_prob.shape[0] * dp_size == global_batch_size


def _refuse_padded_width(log_prob, loss_agg_mode, config):
    # verl divides by the padded width of each micro-batch on each rank, so the sum would depend on the cut.
    if loss_agg_mode != "seq-mean-token-sum-norm" or config.loss_scale_factor is not None:
        return
    info = config.global_batch_info
    if info.get("dp_size") != 1 or not _sees_mini_batch(log_prob, info):
        raise ValueError(
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm divides by each micro-batch's padded width: "
            "set actor_rollout_ref.actor.loss_scale_factor, for example to the maximum response length."
        )


def _needs_mini_batch(log_prob, config):
    info = config.global_batch_info
    return (
        f"bound_scope=mini_batch needs the whole mini-batch (global_batch_size={info.get('global_batch_size')}), but "
        f"this micro-batch holds {log_prob.shape[0]} sequences on each of dp_size={info.get('dp_size')} ranks "
        f"(ppo_micro_batch_size_per_gpu={config.ppo_micro_batch_size_per_gpu}). Use one of: "
        "start the run with `python -m recipe.bapo.main_bapo`, which finds the bounds before each update; raise "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to the whole mini-batch of a rank; or set "
        "actor_rollout_ref.actor.policy_loss.bound_scope=micro_batch and accept that the bounds depend on the cut."
    )
