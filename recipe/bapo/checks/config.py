# SPDX-License-Identifier: Apache-2.0
"""The config: what verl builds of it, what it looks up by name, and what it accepts and should not."""

from __future__ import annotations

import importlib.util
import math
from contextlib import suppress
from pathlib import Path

import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf, open_dict

from recipe.bapo.checks import Concern, call, innermost, require, require_writable
from recipe.bapo.checks.model import hf_config_of
from recipe.bapo.records.tokens import refuse_earlier
from recipe.bapo.worker import refuse_unusable_settings
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import import_external_libs
from verl.utils.tracking import Tracking
from verl.workers.config import build_optimizer
from verl.workers.rollout.replica import get_rollout_replica_class

ENGINES = {
    "megatron": "in pipelines only the last stage calls the loss, and its collective would hang",
    "torchtitan": "it may use pipelines, in which only the last stage calls the loss, and its collective would hang",
    "veomni": "nobody has run it here, and our worker and checks read the settings of FSDP",
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
AT_LEAST_ONE = (
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
    *(f"trainer.{name}" for name in ("nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps")),
    *(f"{ACTOR}.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "ppo_micro_batch_size_per_gpu")),
    *(
        f"{ROLLOUT}.{name}"
        for name in ("n", "max_num_seqs", "max_num_batched_tokens", "log_prob_micro_batch_size_per_gpu")
    ),
    *(f"{ROLLOUT}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "data")),
)
MAY_BE_NULL = ("total_training_steps", "micro_batch_size_per_gpu")


def check_engine(config) -> str:
    """The engine that trains, by either of verl's keys for it. The other checks read the settings of FSDP."""
    for field, usual in (("model_engine", "dp"), (f"{ACTOR}.strategy", "fsdp2")):
        value = OmegaConf.select(config, field)
        require(config, field, lambda value: value not in ENGINES, f"{usual}: {ENGINES.get(value)}")
    require(config, f"{ACTOR}.strategy", lambda value: value in ("fsdp", "fsdp2"), "fsdp or fsdp2")
    return config.actor_rollout_ref.actor.strategy


def check_ranges(config) -> str:
    """Numbers that verl and vLLM take as they are, and with which a run fails minutes later or does nothing."""
    for field in AT_LEAST_ONE:
        value = OmegaConf.select(config, field)
        if not (value is None and field.endswith(MAY_BE_NULL)):
            require(config, field, lambda value: type(value) is int and value >= 1, "a whole number of 1 or more")
    require(config, f"{ACTOR}.optim.lr", lambda lr: 0 < lr < math.inf, "a number above 0")
    require(config, f"{ROLLOUT}.gpu_memory_utilization", lambda share: 0 < share <= 1, "a share above 0, at most 1")
    require(config, f"{ACTOR}.clip_ratio_c", lambda clip: clip > 1, "a number above 1 (dual clip)")
    require(
        config,
        "data.truncation",
        lambda value: value in ("error", "left"),
        "error or left: verl's V1 trainer cuts a prompt that is too long from the left, whatever this says",
    )
    for name, value in config.watchdog.items():
        if name != "max_silence_s" or value is not None:
            usable = type(value) in (int, float) and value > 0
            require(config, f"watchdog.{name}", lambda _, usable=usable: usable, "a number of seconds above 0")
    return "usable"


def check_names(config) -> str:
    """What verl looks up by name: registered, and importable."""
    choices = ", ".join(sorted(map(str, ADV_ESTIMATOR_REGISTRY)))
    field = "algorithm.adv_estimator"
    require(config, field, lambda name: name in ADV_ESTIMATOR_REGISTRY, f"grpo, or one of {choices}")
    require(
        config, field, lambda name: name != "gae" or need_critic(config), "grpo: gae needs a critic (critic.enable)"
    )
    rollout, loggers = config.actor_rollout_ref.rollout, config.trainer.logger
    if rollout.name != "vllm":  # whose import takes seconds; check_versions finds it
        call(f"{ROLLOUT}.name", rollout.name, "use vllm", get_rollout_replica_class, rollout.name)
    engine = rollout.checkpoint_engine
    module, backend = engine.custom_backend_module or None, engine.backend
    field, fix = f"{ROLLOUT}.checkpoint_engine.custom_backend_module", "name a module that can be imported"
    call(field, module, fix, import_external_libs, module)
    if config.trainer.v1.trainer_mode == "separate_async":
        field, fix = f"{ROLLOUT}.checkpoint_engine.backend", "use nccl (on a CPU gloo)"
        call(field, backend, fix, CheckpointEngineRegistry.get, backend)
    loggers = [loggers] if isinstance(loggers, str) else loggers or []
    require(
        config,
        "trainer.logger",
        lambda _: "file" in loggers,
        "a list with file, such as [file,wandb]: console, watchdog and pictures read what it writes",
    )
    for name in loggers:
        there = name in ("file", "console", "rl_insight") or importlib.util.find_spec(name) is not None
        if name not in Tracking.supported_backend or not there:
            known = f"use some of {', '.join(Tracking.supported_backend)}"
            fix = known if name not in Tracking.supported_backend else f"install {name}"
            raise ValueError(f"trainer.logger={loggers} is not usable: {name} is not there; {fix}.")
    return f"{config.algorithm.adv_estimator}, {rollout.name}, {', '.join(loggers)}"


def check_trainer(config) -> str:
    """verl's trainer of this mode, built of the config as a run builds it, without its workers."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    require(config, "trainer.use_v1", bool, "true: verl's legacy trainer would drop the BAPO loss")
    mode = config.trainer.v1.trainer_mode
    trainer = call("trainer.v1.trainer_mode", mode, "use sync or one of these", get_trainer_cls, mode)
    call("trainer.v1.trainer_mode", mode, "change that, or use sync", trainer, config.copy())
    return mode


def check_folders(config) -> str:
    """Where the run writes."""
    if not config.run_dir or "${" in str(config.run_dir):
        raise ValueError(f"run_dir (OUTPUT_DIR)={config.run_dir} is not usable: name a folder, without ${{}}.")
    require_writable("run_dir (OUTPUT_DIR)", Path(str(config.run_dir)))
    for field in (f"{ACTOR}.policy_loss.bounds_record_dir", f"{ACTOR}.policy_loss.token_dump_dir"):
        folder = OmegaConf.select(config, field)
        if folder:
            require_writable(field, Path(folder))
    dump = OmegaConf.select(config, f"{ACTOR}.policy_loss.token_dump_dir")
    if dump:
        refuse_earlier(Path(dump))
    return str(config.run_dir)


def check_loss(config) -> str:
    """The loss, its switches and its aggregation."""
    actor = config.actor_rollout_ref.actor
    any_width = actor.loss_agg_mode != "seq-mean-token-sum-norm" or one_micro_batch_on_one_rank(config)
    require(
        config,
        f"{ACTOR}.loss_scale_factor",
        lambda factor: any_width or factor is not None,
        "a constant such as the maximum response length: without it loss_agg_mode=seq-mean-token-sum-norm divides by "
        "each micro-batch's padded width",
    )
    require(
        config,
        f"{ACTOR}.policy_loss._target_",
        lambda target: "BAPOPolicyLossConfig" in str(target),
        "recipe.bapo.policy_loss.BAPOPolicyLossConfig; other losses start with verl.trainer.main_ppo",
    )
    try:
        loss = omega_conf_to_dataclass(actor.policy_loss)
    except Exception as error:  # hydra wraps what the dataclass raises
        raise ValueError(innermost(error)) from error
    with suppress(InstantiationException, AssertionError):  # of another field: the line "verl's rules" names it
        refuse_unusable_settings(omega_conf_to_dataclass(actor), config.actor_rollout_ref.model)
    return (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), per {loss.bound_scope.replace('_', '-')}"
    )


def check_verls_dataclasses(config) -> str:
    """What verl's own dataclasses, optimizer and validation say."""
    config = config.copy()
    with open_dict(config):  # check_loss has said what is wrong with ours
        config.actor_rollout_ref.actor.policy_loss = {"_target_": "verl.workers.config.PolicyLossConfig"}
    for field in (ROLLOUT, "algorithm"):
        section = OmegaConf.select(config, field)
        try:
            omega_conf_to_dataclass(section)
        except Exception as error:
            raise ValueError(f"{field}: {innermost(error)}") from error
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        optim = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim)
        build_optimizer([torch.zeros(1, requires_grad=True)], optim)
    except Exception as error:  # verl asserts
        raise ValueError(innermost(error)) from error
    return "hold"


def sequence_parallel(config) -> tuple[str, int]:
    """The key that sets Ulysses sequence parallelism, and its size. verl lets its deprecated one win above 1."""
    keys = [f"{ACTOR}.{name}ulysses_sequence_parallel_size" for name in ("", "fsdp_config.")]
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
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks, n = ranks_of(config), rollout.n
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    share = mini * n // max(ranks, 1)
    _divides("data.train_batch_size", batch, f"{ACTOR}.ppo_mini_batch_size", mini)
    _divides(
        f"{ACTOR}.ppo_mini_batch_size * rollout.n (={mini * n})", mini * n, "the number of data-parallel ranks", ranks
    )
    if actor.use_dynamic_bsz:
        _check_token_limits(config)
    else:
        micro = actor.ppo_micro_batch_size_per_gpu
        if micro is None:
            raise ValueError(f"{ACTOR}.ppo_micro_batch_size_per_gpu is not set: set it to a divisor of {share}.")
        _divides(f"a rank's share of the mini-batch (={share})", share, f"{ACTOR}.ppo_micro_batch_size_per_gpu", micro)
    micro = rollout.log_prob_micro_batch_size_per_gpu
    if not rollout.log_prob_use_dynamic_bsz and micro is not None:
        share = batch * n // ranks
        _divides(
            f"a rank's share of the batch (={share})", share, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", micro
        )
    require(
        config,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        lambda dynamic: dynamic == actor.use_dynamic_bsz,
        f"{actor.use_dynamic_bsz}, as {ACTOR}.use_dynamic_bsz: verl asserts that they are equal",
    )
    updates = batch // mini * actor.ppo_epochs
    return (
        f"{batch} prompts of {n} responses, staleness {updates} (updates on each batch), data-parallel ranks: {ranks}"
    )


def _divides(whole_name, whole, part_name, part):
    if part < 1 or whole % part:
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}: choose a divisor of {whole}.")


def _check_token_limits(config):
    longest = config.data.max_prompt_length + config.data.max_response_length
    field, parallel = sequence_parallel(config)
    least = -(-longest // parallel)
    fix = f"{least} or more: a sequence has up to {longest} tokens (data.max_prompt_length + max_response_length)"
    fix += f", on {parallel} GPUs ({field})" if parallel > 1 else ""
    for name in (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
        require(config, name, lambda limit: (limit or 0) >= least, fix)


def pools_of(config) -> list[tuple[str, int, int]]:
    """Nodes and GPUs per node of those that train and, where they are others, of those that sample: ``(verb, nodes,
    GPUs)``."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pools = [("train", trainer.nnodes, trainer.n_gpus_per_node)]
    if trainer.v1.trainer_mode == "separate_async":
        pools.append(("sample", rollout.nnodes, rollout.n_gpus_per_node))
    return pools


def check_parallel(config) -> str:
    """What verl and vLLM ask of a model that is spread over GPUs, in a worker and minutes later."""
    text = hf_config_of(config).get_text_config()
    rollout, gpus = config.actor_rollout_ref.rollout, config.trainer.nnodes * config.trainer.n_gpus_per_node
    heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    field, parallel = sequence_parallel(config)

    divides_heads = (lambda size: heads % size == 0, f"a divisor of the model's {heads} attention heads")
    fits_groups = (
        lambda size: groups % size == 0 or size % groups == 0,
        f"a divisor or a multiple of the model's {groups} key and value heads",
    )
    require(config, field, lambda size: gpus % size == 0, f"a divisor of the {gpus} GPUs that train")
    require(config, field, *divides_heads)
    require(config, field, *fits_groups)
    fix = f"true: verl's sequence parallelism ({field}={parallel}) needs packed sequences"
    require(config, "actor_rollout_ref.model.use_remove_padding", lambda packed: packed or parallel == 1, fix)
    field, copies = f"{ROLLOUT}.tensor_model_parallel_size", rollout.data_parallel_size
    copies *= rollout.pipeline_model_parallel_size
    require(config, field, *divides_heads)
    for verb, nodes, node in pools_of(config):
        whole = (nodes * node) % (rollout.tensor_model_parallel_size * copies) == 0
        require(config, field, lambda _, whole=whole: whole, f"a divisor of the {nodes * node} GPUs that {verb}")
        on_a_node = f"a divisor or a multiple of the {node} GPUs of a node"
        require(config, field, lambda size, node=node: node % size == 0 or size % node == 0, on_a_node)
    require(config, field, *fits_groups)
    served = rollout.tensor_model_parallel_size * copies
    return f"a sequence on {parallel}, a served model on {served} of {gpus} GPUs"


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
