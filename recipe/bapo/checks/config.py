# SPDX-License-Identifier: Apache-2.0
"""The config: trainer, loss, watchdog and batch sizes, and what verl itself asks of it."""

from __future__ import annotations

from pathlib import Path

from recipe.bapo.checks import Concern
from recipe.bapo.records.tokens import refuse_earlier
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import import_external_libs


def check_trainer(config) -> str:
    """The trainer's mode and the actor's strategy."""
    actor, use_v1 = config.actor_rollout_ref.actor, config.trainer.use_v1
    _require(use_v1, "trainer.use_v1", "true: verl's legacy trainer would drop the BAPO loss", use_v1)
    modes = ("sync", "colocate_async", "separate_async")
    mode = config.trainer.v1.trainer_mode
    _require(mode in modes, "trainer.v1.trainer_mode", f"one of {', '.join(modes)}", mode)
    _require(
        actor.strategy in ("fsdp", "fsdp2"),
        "actor_rollout_ref.actor.strategy",
        "fsdp or fsdp2: in pipelines only the last stage calls the loss, and its collective would hang",
        actor.strategy,
    )
    loggers = config.trainer.logger
    _require(
        "file" in ([loggers] if isinstance(loggers, str) else loggers or []),
        "trainer.logger",
        "a list with file, such as [file,wandb]: console, watchdog and pictures read what it writes",
        loggers,
    )
    if mode == "separate_async":
        _check_separate(config)
    return f"{mode}, {actor.strategy}"


def _check_separate(config):
    # What verl asserts after Ray has started.
    rollout = config.actor_rollout_ref.rollout
    for name in ("nnodes", "n_gpus_per_node"):
        _require(rollout[name] > 0, f"actor_rollout_ref.rollout.{name}", "1 or more: those that sample", rollout[name])
    engine = rollout.checkpoint_engine
    backend = engine.backend
    _require(
        backend != "naive",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        "nccl (on a CPU gloo): naive cannot send weights to other devices",
        backend,
    )
    import_external_libs(engine.custom_backend_module or None)
    CheckpointEngineRegistry.get(backend)  # raises a ValueError that names what could not be imported
    steps, mini = (
        config.trainer.v1.separate_async.parameter_sync_step,
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
    )
    _require(
        config.data.train_batch_size == steps * mini,
        "data.train_batch_size",
        f"trainer.v1.separate_async.parameter_sync_step * ppo_mini_batch_size = {steps * mini}",
        config.data.train_batch_size,
    )


def check_watchdog(config) -> str:
    """The watchdog's times; a wrong one would leave the run without it."""
    for name, value in config.watchdog.items():
        if name == "max_silence_s" and value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(number and value > 0, f"watchdog.{name}", "a number of seconds above 0", str(value))
    silence, sync, grace = (config.watchdog[f"{name}_s"] for name in ("max_silence", "max_sync", "grace"))
    limit = "never for want of a finished step" if silence is None else f"if no step ends in {silence:g} s"
    return f"ends a run {limit}, {sync:g} s into one synchronisation, {grace:g} s after a process's death"


def check_loss(config) -> str:
    """The loss, its switches and its aggregation."""
    actor = config.actor_rollout_ref.actor
    _require(
        actor.loss_agg_mode != "seq-mean-token-sum-norm"
        or actor.loss_scale_factor is not None
        or one_micro_batch_on_one_rank(config),
        "actor_rollout_ref.actor.loss_scale_factor",
        "a constant such as the maximum response length: without it loss_agg_mode=seq-mean-token-sum-norm divides by "
        "each micro-batch's padded width",
        actor.loss_scale_factor,
    )
    _require(
        isinstance(actor.clip_ratio_c, int | float) and actor.clip_ratio_c > 1,
        "actor_rollout_ref.actor.clip_ratio_c",
        "a number above 1 (dual clip)",
        str(actor.clip_ratio_c),
    )
    _require(
        "BAPOPolicyLossConfig" in str(actor.policy_loss._target_),
        "actor_rollout_ref.actor.policy_loss._target_",
        "recipe.bapo.policy_loss.BAPOPolicyLossConfig; other losses start with verl.trainer.main_ppo",
        actor.policy_loss._target_,
    )
    if actor.policy_loss.get("token_dump_dir"):
        refuse_earlier(Path(actor.policy_loss.token_dump_dir))
    try:
        loss = omega_conf_to_dataclass(actor.policy_loss)
    except Exception as error:  # hydra wraps what the dataclass raises
        raise ValueError(_innermost(error)) from error
    return (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), per {loss.bound_scope.replace('_', '-')}"
    )


def check_verls_rules(config) -> str:
    """What verl itself asks of a config."""
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except Exception as error:  # verl asserts
        raise ValueError(_innermost(error)) from error
    return "hold"


def _require(holds, field, fix, value=None):
    if not holds:
        shown = f"{field}={value}" if value is not None else field
        raise ValueError(f"{shown} is not usable: set it to {fix}.")


def _innermost(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def ranks_of(config) -> int:
    """Number of data-parallel ranks of the actor."""
    return (
        config.trainer.nnodes
        * config.trainer.n_gpus_per_node
        // max(1, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size)
    )


def one_micro_batch_on_one_rank(config) -> bool:
    """Whether a whole mini-batch is surely one micro-batch."""
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    return ranks_of(config) == 1 and not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu == rows


def check_batches(config) -> str:
    """Raise a ValueError where verl would assert, in a worker and minutes later, that a batch does not divide."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks = ranks_of(config)
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    _divides("data.train_batch_size", batch, "actor_rollout_ref.actor.ppo_mini_batch_size", mini)
    _divides("actor_rollout_ref.rollout.n", n, "1", 1)
    per_rank = f"actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n (={mini * n})"
    _divides(per_rank, mini * n, "the number of data-parallel ranks", ranks)
    if not actor.use_dynamic_bsz:
        micro = actor.ppo_micro_batch_size_per_gpu
        field = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
        if micro is None:
            raise ValueError(f"{field} is not set: set it to a divisor of {mini * n // ranks}.")
        _divides(f"a rank's share of the mini-batch (={mini * n // ranks})", mini * n // ranks, field, micro)
    if not config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz:
        field = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
        micro = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        if micro is not None:
            _divides(f"a rank's share of the batch (={batch * n // ranks})", batch * n // ranks, field, micro)
    updates = batch // mini * actor.ppo_epochs
    return (
        f"{batch} prompts of {n} responses, staleness {updates} (updates on each batch), data-parallel ranks: {ranks}"
    )


def _divides(whole_name, whole, part_name, part):
    for name, value in ((whole_name, whole), (part_name, part)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not usable: give a whole number of 1 or more.")
    if whole % part:
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}: choose a divisor of {whole}.")


NO_DUAL_CLIP = 100.0  # a dual clip above it has no effect that anybody could want


def check_ratio(config) -> str:
    """Against which policy the ratio is, hence the positive contribution."""
    bypass = config.algorithm.rollout_correction.bypass_mode
    if config.trainer.v1.trainer_mode != "sync" and not bypass:
        raise Concern(
            "algorithm.rollout_correction.bypass_mode=false in an asynchronous mode: the ratio, hence the positive "
            "contribution, is measured against the recomputed policy, not the one that sampled."
        )
    clip = config.actor_rollout_ref.actor.clip_ratio_c
    if bypass and clip > NO_DUAL_CLIP:
        raise Concern(
            f"actor_rollout_ref.actor.clip_ratio_c={clip:g} is no dual clip, and the ratio is against the policy that "
            "sampled: nothing bounds r*|A| of tokens with A < 0 and r > 1. Set it to 3.0, or watch "
            "actor/bapo/negative_unbounded_share."
        )
    return f"against {'the policy that sampled' if bypass else 'the policy before the updates of each step'}"
