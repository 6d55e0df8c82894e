# SPDX-License-Identifier: Apache-2.0
"""The config: engine, trainer, loss, watchdog, batch sizes and parallelism, and what verl itself asks of it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from recipe.bapo.checks import Concern
from recipe.bapo.checks.inputs import hf_config_of
from recipe.bapo.records.tokens import refuse_earlier
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import import_external_libs

ENGINES = {
    "megatron": "in pipelines only the last stage calls the loss, and its collective would hang",
    "torchtitan": "it may use pipelines, in which only the last stage calls the loss, and its collective would hang",
    "veomni": "nobody has run it here, and our worker and checks read the settings of FSDP",
}


def check_engine(config) -> str:
    """The engine that trains, by either of verl's keys for it. The other checks read the settings of FSDP."""
    for field, usual in (("model_engine", "dp"), ("actor_rollout_ref.actor.strategy", "fsdp2")):
        value = OmegaConf.select(config, field)
        _require(config, (field, lambda value: value not in ENGINES, f"{usual}: {ENGINES.get(value)}"))
    _require(config, ("actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2").__contains__, "fsdp or fsdp2"))
    return config.actor_rollout_ref.actor.strategy


def check_trainer(config) -> str:
    """The trainer's mode and what verl asserts of it after Ray has started."""
    modes = ("sync", "colocate_async", "separate_async")
    _require(
        config,
        ("trainer.use_v1", bool, "true: verl's legacy trainer would drop the BAPO loss"),
        ("trainer.v1.trainer_mode", modes.__contains__, f"one of {', '.join(modes)}"),
        (
            "trainer.logger",
            lambda loggers: "file" in ([loggers] if isinstance(loggers, str) else loggers or []),
            "a list with file, such as [file,wandb]: console, watchdog and pictures read what it writes",
        ),
    )
    mode = config.trainer.v1.trainer_mode
    if mode != "separate_async":
        return mode
    steps, rollout = config.trainer.v1.separate_async.parameter_sync_step, "actor_rollout_ref.rollout"
    batch = steps * config.actor_rollout_ref.actor.ppo_mini_batch_size
    _require(
        config,
        (f"{rollout}.nnodes", _positive, "1 or more: those that sample"),
        (f"{rollout}.n_gpus_per_node", _positive, "1 or more: those that sample"),
        (
            f"{rollout}.checkpoint_engine.backend",
            lambda backend: backend != "naive",
            "nccl (on a CPU gloo): naive cannot send weights to other devices",
        ),
        (
            "data.train_batch_size",
            lambda size: size == batch,
            f"trainer.v1.separate_async.parameter_sync_step * ppo_mini_batch_size = {batch}",
        ),
    )
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    import_external_libs(engine.custom_backend_module or None)
    CheckpointEngineRegistry.get(engine.backend)  # raises a ValueError that names what could not be imported
    return mode


def check_watchdog(config) -> str:
    """The watchdog's times; a wrong one would leave the run without it."""
    for name, value in config.watchdog.items():
        if name == "max_silence_s" and value is None:
            continue
        _require(config, (f"watchdog.{name}", _positive, "a number of seconds above 0"))
    silence, sync, grace = (config.watchdog[f"{name}_s"] for name in ("max_silence", "max_sync", "grace"))
    limit = "never for want of a finished step" if silence is None else f"if no step ends in {silence:g} s"
    return f"ends a run {limit}, {sync:g} s into one synchronisation, {grace:g} s after a process's death"


def check_loss(config) -> str:
    """The loss, its switches and its aggregation."""
    actor = config.actor_rollout_ref.actor
    any_width = actor.loss_agg_mode != "seq-mean-token-sum-norm" or one_micro_batch_on_one_rank(config)
    _require(
        config,
        (
            "actor_rollout_ref.actor.loss_scale_factor",
            lambda factor: any_width or factor is not None,
            "a constant such as the maximum response length: without it loss_agg_mode=seq-mean-token-sum-norm "
            "divides by each micro-batch's padded width",
        ),
        (
            "actor_rollout_ref.actor.clip_ratio_c",
            lambda value: isinstance(value, int | float) and value > 1,
            "a number above 1 (dual clip)",
        ),
        (
            "actor_rollout_ref.actor.policy_loss._target_",
            lambda target: "BAPOPolicyLossConfig" in str(target),
            "recipe.bapo.policy_loss.BAPOPolicyLossConfig; other losses start with verl.trainer.main_ppo",
        ),
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


def _require(config, *rules):
    """Raise a ValueError at the first of ``(field, whether a value is usable, what to set it to)`` that fails."""
    for field, usable, fix in rules:
        value = OmegaConf.select(config, field)
        if not usable(value):
            raise ValueError(f"{field}={value} is not usable: set it to {fix}.")


def _positive(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _innermost(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def sequence_parallel(config) -> tuple[str, int]:
    """The key that sets Ulysses sequence parallelism, and its size. verl lets its deprecated one win above 1."""
    keys = [f"actor_rollout_ref.actor.{name}ulysses_sequence_parallel_size" for name in ("", "fsdp_config.")]
    sizes = [OmegaConf.select(config, key) or 1 for key in keys]
    return (keys[0], sizes[0]) if sizes[0] > 1 else (keys[1], sizes[1])


def ranks_of(config) -> int:
    """Number of data-parallel ranks of the actor."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node // max(1, sequence_parallel(config)[1])


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
    _check_tokens(config)
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


def _check_tokens(config):
    actor, data = config.actor_rollout_ref.actor, config.data
    _require(
        config,
        (
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            lambda dynamic: dynamic == actor.use_dynamic_bsz,
            f"{actor.use_dynamic_bsz}, as actor_rollout_ref.actor.use_dynamic_bsz: verl asserts that they are equal",
        ),
    )
    longest, (parallel_field, parallel) = data.max_prompt_length + data.max_response_length, sequence_parallel(config)
    for name in ("actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu"):
        least = -(-longest // parallel)
        fix = f"{least} or more: a sequence has up to {longest} tokens (data.max_prompt_length + max_response_length)"
        fix += f", on {parallel} GPUs ({parallel_field})" if parallel > 1 else ""
        if actor.use_dynamic_bsz:
            _require(config, (f"actor_rollout_ref.{name}", lambda limit, least=least: (limit or 0) >= least, fix))


def check_parallel(config) -> str:
    """What verl and vLLM ask of a model that is spread over GPUs, in a worker and minutes later."""
    text, trainer = hf_config_of(config).get_text_config(), config.trainer
    rollout, gpus = config.actor_rollout_ref.rollout, trainer.nnodes * trainer.n_gpus_per_node
    heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    field, parallel = sequence_parallel(config)

    def shared(size):
        return groups % size == 0 or size % groups == 0

    shared_heads = f"a divisor or a multiple of the model's {groups} key and value heads"
    _require(
        config,
        (field, lambda size: gpus % size == 0, f"a divisor of the {gpus} GPUs that train"),
        (field, lambda size: heads % size == 0, f"a divisor of the model's {heads} attention heads"),
        (field, shared, shared_heads),
        (
            "actor_rollout_ref.model.use_remove_padding",
            lambda packed: packed or parallel == 1,
            f"true: verl's sequence parallelism ({field}={parallel}) needs packed sequences",
        ),
    )
    pools = [(gpus, trainer.n_gpus_per_node, "GPUs that train")]
    if trainer.v1.trainer_mode == "separate_async":
        pools.append((rollout.nnodes * rollout.n_gpus_per_node, rollout.n_gpus_per_node, "GPUs that sample"))
    field, copies = "actor_rollout_ref.rollout.tensor_model_parallel_size", rollout.data_parallel_size
    copies *= rollout.pipeline_model_parallel_size
    _require(config, (field, lambda size: heads % size == 0, f"a divisor of the model's {heads} attention heads"))
    for pool, node, name in pools:
        _require(
            config,
            (field, lambda size, pool=pool: pool % (size * copies) == 0, f"a divisor of the {pool} {name}"),
            (
                field,
                lambda size, node=node: node % size == 0 or size % node == 0,
                f"a divisor or a multiple of the {node} GPUs of a node",
            ),
        )
    _require(config, (field, shared, shared_heads))
    served = rollout.tensor_model_parallel_size * copies
    return f"a sequence on {parallel}, a served model on {served} of {gpus} GPUs"


def _divides(whole_name, whole, part_name, part):
    for name, value in ((whole_name, whole), (part_name, part)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not usable: give a whole number of 1 or more.")
    if whole % part:
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}: choose a divisor of {whole}.")


NO_DUAL_CLIP = 100.0  # a dual clip above it has no effect that anybody could want


def check_ratio(config) -> str:
    """Against which policy the ratio is, hence the positive contribution."""
    correction = config.algorithm.rollout_correction
    bypass = correction.bypass_mode
    ignored = [name for name in ("rollout_is", "rollout_rs") if bypass and correction.get(name) is not None]
    if ignored:
        raise Concern(
            f"algorithm.rollout_correction.{ignored[0]}={correction[ignored[0]]} has no effect with bypass_mode=true, "
            "where the ratio itself is against the policy that sampled: remove it, or set bypass_mode=false."
        )
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
