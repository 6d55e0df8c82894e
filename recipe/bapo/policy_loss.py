# SPDX-License-Identifier: Apache-2.0
"""The policy loss ``bapo``, and the configs that select it in a verl run.

verl instantiates ``policy_loss._target_`` in the actor process before it creates the worker. The config's
``__post_init__`` then has verl train with our worker (``hook/install.py``). The worker puts the bounds into the config
before the loss of each micro-batch, and verl passes the config to the loss. ``bapo_trainer.yaml`` lists the config's
keys with their defaults; a test compares the two.
"""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from bapo import BAPOConfig, clipped_surrogate_loss, read_scalars
from recipe.bapo.hook.install import install_worker
from recipe.bapo.hook.tell import tell
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import PolicyLossConfig


@dataclass
class BAPOPolicyLossConfig(PolicyLossConfig, BAPOConfig):
    """verl's policy-loss config with the options of ``bapo.BAPOConfig``.

    Args:
        loss_mode: ``bapo``.
        record_dir: an absolute path, since a worker's working directory is Ray's: folder in which a file with a line
            per update is written for ``recipe.bapo.report``. None: no record.
        token_dir: an absolute path: folder in which each data-parallel rank writes single tokens of some updates as
            Parquet for ``python -m recipe.bapo.report tokens``: at most 64 responses of every update of the training
            steps 1, 2, 4, 8 and so on, and at most 256 MiB a rank (``hook/tokens.py``). None: no tokens.

    Raises:
        ValueError: an option is invalid; ``BAPOConfig`` says which. (An unknown key raises in verl.)
    """

    loss_mode: str = "bapo"
    record_dir: str | None = None
    token_dir: str | None = None

    # Not an option: our worker sets it before each loss. verl freezes every attribute of a config that is not named in
    # ``_mutable_fields``. (ClassVar: the dataclass must not make it a field, which would be an option.)
    current_bounds: ClassVar[tuple[float, float] | None] = None
    _mutable_fields = PolicyLossConfig._mutable_fields | {"current_bounds"}

    def __post_init__(self):
        BAPOConfig.__post_init__(self)
        _check_folders(record_dir=self.record_dir, token_dir=self.token_dir)
        if self.loss_mode != "bapo":
            raise ValueError(
                f"invalid loss_mode={self.loss_mode!r} with {type(self).__name__}: use loss_mode=bapo. With "
                "fixed bounds (start equal to max) it is verl's vanilla loss; for another loss remove _target_ and use "
                "python -m verl.trainer.main_ppo."
            )
        install_worker()
        import recipe.bapo.verl_patches.fused_heads  # noqa: F401  it changes verl, which a monitored run must not


@dataclass
class MonitorConfig(PolicyLossConfig, BAPOConfig):
    """Log what BAPO would do in a run with one of verl's own losses (``loss_mode``), and change nothing in it.

    After this config is built, nothing of the monitor ends a run: what it cannot measure it leaves out, with a warning.
    Of the options of ``bapo.BAPOConfig``, ``bound_scope`` has no effect here.

    Args:
        record_dir, token_dir: as in ``BAPOPolicyLossConfig``.

    Raises:
        ValueError: ``loss_mode`` is ``bapo``, or an option is invalid.
    """

    record_dir: str | None = None
    token_dir: str | None = None

    def __post_init__(self):
        BAPOConfig.__post_init__(self)
        _check_folders(record_dir=self.record_dir, token_dir=self.token_dir)
        if self.loss_mode == "bapo":
            raise ValueError(
                "invalid loss_mode=bapo with MonitorConfig, which leaves the loss as it is: set loss_mode to one "
                "of verl's losses, or _target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig to train with BAPO."
            )
        try:
            install_worker()
        except Exception as error:
            tell(f"MonitorConfig does nothing in this run: {error} Training goes on without the monitor.")


def _check_folders(**folders: object) -> None:
    for name, folder in folders.items():
        if folder is not None and not (isinstance(folder, str) and os.path.isabs(folder)):
            raise ValueError(f"invalid {name}={folder!r}: name a folder by its absolute path, or null.")


@register_policy_loss("bapo")
def compute_policy_loss_bapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute verl's policy loss with the bounds that our worker found. Each call makes one transfer to the host.

    Args:
        old_log_prob, log_prob, advantages, response_mask: one micro-batch, ``(B, T)``.
        loss_agg_mode: verl's aggregation mode.
        config: verl's ``ActorConfig``; ``policy_loss`` is a ``BAPOPolicyLossConfig``.
        rollout_is_weights: verl's rollout correction, ``(B, T)`` or None.

    Returns:
        The loss, and the metrics of this micro-batch. The worker adds those of the bounds once an update.

    Raises:
        ValueError: the config is not ours, a worker other than ours calls the loss, shapes differ, or the dual clip is
            not above 1. Non-finite input raises in the worker, before the optimizer's step.
    """
    if not isinstance(config.policy_loss, BAPOPolicyLossConfig):
        raise ValueError(
            f"loss_mode=bapo needs actor_rollout_ref.actor.policy_loss._target_={__name__}.BAPOPolicyLossConfig, "
            f"but the config is a {type(config.policy_loss).__name__}."
        )
    if config.policy_loss.current_bounds is None:
        raise ValueError(
            "loss_mode=bapo was called without clip bounds: recipe.bapo.hook.worker.BAPOTrainingWorker finds them, but "
            "another worker trains here. Use verl's ActorRolloutRefWorker, or derive your worker from ours."
        )
    low, high = config.policy_loss.current_bounds
    surrogate = clipped_surrogate_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        low=low,
        high=high,
        clip_ratio_c=config.clip_ratio_c,
        rollout_is_weights=rollout_is_weights,
        aggregate=partial(agg_loss, loss_agg_mode=loss_agg_mode, **config.global_batch_info),
    )
    metrics = {f"actor/{name}": getattr(surrogate, name) for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")}
    return surrogate.loss, read_scalars(metrics)
