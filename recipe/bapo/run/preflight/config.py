# SPDX-License-Identifier: Apache-2.0
"""Check the config: what verl builds from it and looks up by name, and what verl accepts but a run cannot use.

A value that verl itself refuses needs no rule, because ``check_verls_rules`` names its field. Our own rules are in
``RULES`` if they concern one value, and otherwise in the checks below.
"""

import importlib.util
import math
from pathlib import Path

import torch
from omegaconf import OmegaConf

from recipe.bapo.compatibility import refuse_unusable_settings, uses_bypass_mode
from recipe.bapo.run.preflight import CheckWarning, blame_field, innermost, require, require_writable
from recipe.bapo.run.preflight.config_errors import verls_defaults
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.tracking import Tracking
from verl.workers.config import build_optimizer
from verl.workers.rollout.replica import get_rollout_replica_class

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _is_count(value):
    return type(value) is int and value >= 1


def _can_log(name):
    module = {"vemlp_wandb": "volcengine_ml_platform"}.get(name, name)
    installed = name in ("file", "console", "rl_insight") or importlib.util.find_spec(module) is not None
    return name in Tracking.supported_backend and installed


# What a value may be, and the fix.
COUNT_OR_NULL = (lambda value: value is None or _is_count(value)), "a whole number of 1 or more, or null"
POSITIVE = (lambda value: type(value) in (int, float) and 0 < value < math.inf), "a number above 0"
SECONDS = POSITIVE[0], "a number of seconds above 0"
# Keys that end like this are sizes. If verl's default is 1 or more, a smaller value is refused.
SIZES = (
    *(".n", "nnodes", "_step", "_per_node", "_per_gpu", "_size", "_length", "_epochs", "_seqs", "_tokens"),
    *(".num_workers", "_units"),
)
SMALLEST_LOWER_BOUND = 0.5  # the smallest bound on the ratio in the paper (method=figure7_low)
# The usable values of keys that verl and vLLM do not check. With any other value a run fails minutes later, or does
# nothing.
RULES = {
    f"{ACTOR}.policy_loss._target_": (
        lambda target: str(target).endswith(("BAPOPolicyLossConfig", "MonitorConfig")),
        "recipe.bapo.policy_loss.BAPOPolicyLossConfig, or MonitorConfig for one of verl's losses",
    ),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": COUNT_OR_NULL,
    f"{ACTOR}.optim.lr": POSITIVE,
    f"{ACTOR}.clip_ratio_c": (lambda clip: clip > 1, "a number above 1 (dual clip)"),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": COUNT_OR_NULL,
    f"{ROLLOUT}.gpu_memory_utilization": (lambda share: 0 < share <= 1, "a share above 0, at most 1"),
    "algorithm.adv_estimator": (
        lambda name: name in ADV_ESTIMATOR_REGISTRY,
        f"grpo, or one of {', '.join(sorted(map(str, ADV_ESTIMATOR_REGISTRY)))}",
    ),
    "data.truncation": (
        lambda name: name in ("error", "left"),
        "error or left: verl's V1 trainer cuts a prompt that is too long from the left, whatever this says",
    ),
    "ray_kwargs.ray_init.num_cpus": COUNT_OR_NULL,
    "ray_kwargs.ray_init.num_gpus": COUNT_OR_NULL,
    "trainer.use_v1": (bool, "true: this recipe starts verl's V1 trainer"),
    "distillation.enabled": (
        lambda enabled: not enabled,
        "false: with distillation verl trains with another loss function than its ppo_loss, which has no clip bounds",
    ),
    "trainer.remote_backend": (  # a key of later verl versions, which 0.9.1 would ignore
        lambda name: name is None,
        "null: a remote backend trains in a worker of its own, in which ours finds no clip bounds",
    ),
    "trainer.total_training_steps": COUNT_OR_NULL,
    "trainer.max_actor_ckpt_to_keep": COUNT_OR_NULL,
    "trainer.resume_mode": (lambda way: way in ("disable", "auto", "resume_path"), "disable, auto or resume_path"),
    "trainer.logger": (
        lambda names: "file" in (names or []) and all(map(_can_log, [names] if isinstance(names, str) else names)),
        f"a list of file, which console, watchdog and pictures read, and if you like of others that are installed "
        f"here: {', '.join(Tracking.supported_backend)}",
    ),
    "watchdog.max_silence_s": SECONDS,
    "watchdog.pending_notice_s": SECONDS,
    "watchdog.max_pending_s": SECONDS,
    "watchdog.max_sync_s": SECONDS,
    "watchdog.max_exit_s": SECONDS,
    "watchdog.grace_s": SECONDS,
}


def check_values(config) -> str:
    """Check the sizes and the values in ``RULES``."""
    for field, default in verls_defaults(config.model_engine).items():
        section, _, name = field.rpartition(".")
        # ``~key`` on the command line removes a key. Then verl's dataclass uses its own default.
        if field.endswith(SIZES) and _is_count(default) and name in (OmegaConf.select(config, section) or ()):
            require(config, field, _is_count, "a whole number of 1 or more")
    for field, (usable, fix) in RULES.items():
        require(config, field, usable, fix)
    if config.model_engine == "dp":  # with FSDP 0 makes every gradient 0; Megatron then does not clip
        require(config, f"{ACTOR}.optim.clip_grad", *POSITIVE)
    for part in ("prompt", "response"):  # the other checks use the lengths of ``data``
        length = config.data[f"max_{part}_length"]
        fix = f"{length}, the value of data.max_{part}_length, which it has by default"
        require(config, f"{ROLLOUT}.{part}_length", lambda value, length=length: value == length, fix)
    return "usable"


def check_names(config) -> str:
    """Check that what verl looks up by name is registered and can be imported."""
    from verl.trainer.ppo.v1 import get_trainer_cls  # its import warns of engines that are not installed

    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    fix = "grpo: gae needs a critic (critic.enable)"
    require(config, "algorithm.adv_estimator", lambda name: name != "gae" or need_critic(config), fix)
    if rollout.name != "vllm":  # importing vLLM takes seconds, and check_versions has found it
        blame_field(f"{ROLLOUT}.name", rollout.name, "use vllm", get_rollout_replica_class, rollout.name)
    field = "trainer.v1.trainer_mode"
    trainer = blame_field(field, mode, "use sync or one of these", get_trainer_cls, mode)
    blame_field(f"the config of {field}", mode, "change the key that the message names", trainer, config.copy())
    return f"{config.algorithm.adv_estimator}, {rollout.name}, {mode}"


def check_intent(config) -> str:
    """Warn of values with which a run does something other than what was most likely meant."""
    loss = config.actor_rollout_ref.actor.policy_loss
    doubts, defaults = [], verls_defaults(config.model_engine)
    unread = [(f"{ACTOR}.grad_clip", f"verl's engines read {ACTOR}.optim.clip_grad")]
    if loss.loss_mode == "bapo":
        bounds = f"loss_mode=bapo reads ratio_lower_* and ratio_upper_* of {ACTOR}.policy_loss"
        unread += [(f"{ACTOR}.{key}", bounds) for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    if config.trainer.resume_mode != "resume_path":
        unread.append(("trainer.resume_from_path", "it is read with trainer.resume_mode=resume_path"))
    for field, why in unread:
        value = OmegaConf.select(config, field)
        if value != defaults.get(field):
            doubts.append(f"{field}={value} has no effect: {why}.")
    if loss.ratio_lower_max < SMALLEST_LOWER_BOUND:
        doubts.append(
            f"{ACTOR}.policy_loss.ratio_lower_max={loss.ratio_lower_max} is a bound on the ratio, and a ratio of "
            f"1 means no change. If you meant an epsilon, set {1 - loss.ratio_lower_max:g}."
        )
    if config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        doubts.append(f"{ROLLOUT}.n=1 with algorithm.adv_estimator=grpo leaves no other response to compare with.")
    if doubts:
        raise CheckWarning(" ".join(doubts))
    return "every key that is set is read"


def check_folders(config) -> str:
    """Check that the folders to which the run writes can be created and written to."""
    require(config, "run_dir", bool, "a folder (OUTPUT_DIR)")
    require_writable("run_dir (OUTPUT_DIR)", Path(str(config.run_dir)))
    loss, trainer = config.actor_rollout_ref.actor.policy_loss, config.trainer
    if trainer.save_freq > 0:
        require_writable("trainer.default_local_dir", Path(trainer.default_local_dir))
    if loss.record_dir:
        require_writable(f"{ACTOR}.policy_loss.record_dir", Path(loss.record_dir))
    return str(config.run_dir)


def check_verls_rules(config) -> str:
    """Build the actor's config as verl does and call verl's validation. Returns the loss's settings as text."""
    try:
        loss = _build_as_verl_does(config).policy_loss
    except Exception as error:  # verl asserts, and Hydra wraps what a dataclass raises
        raise ValueError(f"{_field_at_fault(config, innermost(error))}{innermost(error)}") from error
    scope = loss.bound_scope
    if loss.loss_mode != "bapo":
        scope = f"none, because loss_mode={loss.loss_mode} is only monitored"
    elif scope == "mini_batch":
        scope += ", with an extra forward in each update that is cut into micro-batches (previous_batch saves it)"
    return (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), bound_scope={scope}"
    )


def _build_as_verl_does(config):
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    if actor.policy_loss.loss_mode == "bapo":
        refuse_unusable_settings(actor, config.actor_rollout_ref.model)
    for section in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(section)
    validate_config(config, need_reference_policy(config), need_critic(config))
    if config.model_engine == "dp":  # Megatron's optimizer needs its process groups
        build_optimizer([torch.zeros(1, requires_grad=True)], actor.optim)
        PrecisionType.to_dtype(actor.fsdp_config.model_dtype or "fp32")
    return actor


def _field_at_fault(config, message):
    """Find the field whose default verl would accept, and format it as the start of a message.

    Returns an empty text if there is no such field, or if the message already names it.
    """
    changed = config.copy()
    for key, default in verls_defaults(config.model_engine).items():
        value = OmegaConf.select(config, key)
        if value == default or isinstance(default, dict) or str(default).startswith(("${", "?")):
            continue
        if OmegaConf.select(changed, key.rpartition(".")[0]) is None:  # the section was removed
            continue
        OmegaConf.update(changed, key, default)
        try:
            _build_as_verl_does(changed)
        except Exception:  # another field is at fault
            OmegaConf.update(changed, key, value)
            continue
        return "" if key in message else f"{key}={value} is not usable (verl's default is {default}): "
    return ""


def sequence_parallel(config) -> tuple[str, int]:
    """Return the key that sets Ulysses sequence parallelism, and its size. verl's deprecated key wins if above 1."""
    keys = [f"{ACTOR}.{name}ulysses_sequence_parallel_size" for name in ("", "fsdp_config.")]
    sizes = [OmegaConf.select(config, key) for key in keys]
    return (keys[0], sizes[0]) if sizes[0] > 1 else (keys[1], sizes[1])


def longest_sequence(config) -> int:
    """Return the largest number of tokens of a prompt with its response."""
    return config.data.max_prompt_length + config.data.max_response_length


def check_batches(config) -> str:
    """Check that batches divide. verl asserts it minutes later, inside a worker."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    batch, mini, mode = config.data.train_batch_size, actor.ppo_mini_batch_size, config.trainer.v1.trainer_mode
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // sequence_parallel(config)[1]
    _divides("data.train_batch_size", batch, f"{ACTOR}.ppo_mini_batch_size", mini)
    _divides(f"{ACTOR}.ppo_mini_batch_size * rollout.n", mini * n, "the number of data-parallel ranks", ranks)
    dynamic = f"{actor.use_dynamic_bsz}, as {ACTOR}.use_dynamic_bsz: verl asserts that they are equal"
    require(config, f"{ROLLOUT}.log_prob_use_dynamic_bsz", lambda value: value == actor.use_dynamic_bsz, dynamic)
    _check_micro_batches(config, f"{ACTOR}.ppo_", mini * n // ranks)
    if not uses_bypass_mode(config):  # verl computes log-probs for one trainer call's share of the batch
        at_once = batch // config.trainer.v1.get(mode, {}).get("parameter_sync_step", 1)
        _check_micro_batches(config, f"{ROLLOUT}.log_prob_", at_once * n // ranks)
    updates = batch // mini * actor.ppo_epochs
    return (
        f"{batch} prompts of {n} responses, staleness {updates} (updates on each batch), data-parallel ranks: {ranks}"
    )


def _check_micro_batches(config, prefix, responses):
    """Check the limits on the micro-batches of a forward.

    Args:
        config: resolved.
        prefix: beginning of the keys of the limits.
        responses: number of responses of each rank in this forward.
    """
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        longest, (key, parallel) = longest_sequence(config), sequence_parallel(config)
        least = -(-longest // parallel)
        fix = f"{least} or more: a sequence has up to {longest} tokens (data.max_prompt_length + max_response_length)"
        fix += f", on {parallel} GPUs ({key})" if parallel > 1 else ""
        require(config, f"{prefix}max_token_len_per_gpu", lambda limit: (limit or 0) >= least, fix)
        return
    field = f"{prefix}micro_batch_size_per_gpu"
    require(config, field, lambda micro: micro is not None, f"a divisor of {responses}")
    _divides("a rank's responses", responses, field, OmegaConf.select(config, field))


def _divides(whole_name, whole, part_name, part):
    if whole % part:
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}: choose a divisor of {whole}.")


def pools_of(config) -> list[tuple[str, int, int]]:
    """Return ``(verb, nodes, GPUs per node)`` of the GPUs that train and, if other GPUs sample, also of those."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pools = [("train", trainer.nnodes, trainer.n_gpus_per_node)]
    if trainer.v1.trainer_mode == "separate_async":
        pools.append(("sample", rollout.nnodes, rollout.n_gpus_per_node))
    return pools


def check_parallel(config) -> str:
    """Check that each pool's GPUs divide among served models, and the training GPUs also among parts of a sequence."""
    key, parallel = sequence_parallel(config)
    rollout, names = config.actor_rollout_ref.rollout, f"{ROLLOUT}.tensor_model_parallel_size * data_parallel_size"
    served = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for verb, nodes, gpus in pools_of(config):
        _divides(f"GPUs that {verb}", nodes * gpus, names, served)
    _divides("GPUs that train", config.trainer.nnodes * config.trainer.n_gpus_per_node, key, parallel)
    return f"a sequence on {parallel}, a served model on {served}"


def check_ratio(config) -> str:
    """Say which policy the ratio compares with. Warn if an asynchronous run recomputes the old log-probs."""
    bypass = uses_bypass_mode(config)
    if config.trainer.v1.trainer_mode != "sync" and not bypass:
        raise CheckWarning(
            "algorithm.rollout_correction.bypass_mode=false in an asynchronous mode: the ratio, hence the positive "
            "contribution, is measured against the recomputed policy, not the one that sampled."
        )
    return f"against {'the policy that sampled' if bypass else 'the policy before the updates of each step'}"
