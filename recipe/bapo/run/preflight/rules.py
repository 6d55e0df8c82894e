# SPDX-License-Identifier: Apache-2.0
"""Settings with which a run would hang, fail late or with an error that names no setting, or train something else.

A rule is a row: a condition that a usable config meets, and what to say if it does not. ``REFUSED`` ends the run,
``DOUBTED`` only warns. Before you add a row, look for the function of verl, vLLM or transformers that would refuse the
config: a stage can call it. The message names the field, its value and the fix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from recipe.bapo.compatibility import uses_bypass_mode
from recipe.bapo.run.preflight import CheckWarning
from verl.trainer.ppo.utils import need_critic

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALLEST_LOWER_BOUND = 0.5  # the smallest bound on the ratio in the paper (method=figure7_low)
COUNTS = (
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.total_epochs", "data.train_batch_size"),
    "data.max_prompt_length",
    *("data.max_response_length", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ROLLOUT}.n"),
    *(f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.agent.num_workers"),
    *("reward.num_workers", "transfer_queue.backend.SimpleStorage.num_data_storage_units"),
)


@dataclass(frozen=True)
class Settings:
    """A resolved config, and the numbers that follow from it."""

    config: Any

    @property
    def actor(self):
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self):
        return self.config.actor_rollout_ref.rollout

    @property
    def loss(self):
        return self.actor.policy_loss

    @property
    def correction(self):
        """verl's rollout correction; null means none."""
        return self.config.algorithm.rollout_correction or {}

    @property
    def fsdp(self) -> bool:
        return self.config.model_engine == "dp"

    @property
    def longest(self) -> int:
        """The largest number of tokens of a prompt with its response."""
        return self.rollout.prompt_length + self.rollout.response_length

    @property
    def gpus(self) -> int:
        """The number of GPUs that train."""
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    @property
    def pools(self) -> list[tuple[str, int, int]]:
        """``(verb, nodes, GPUs per node)`` of the GPUs that train, and of others that sample or run a reward model."""
        pools = [("train", self.config.trainer.nnodes, self.config.trainer.n_gpus_per_node)]
        if self.config.trainer.v1.trainer_mode == "separate_async":
            pools.append(("sample", self.rollout.nnodes, self.rollout.n_gpus_per_node))
        scorer = self.config.reward.reward_model
        if scorer.enable_resource_pool:
            pools.append(("score", scorer.nnodes, scorer.n_gpus_per_node))
        return pools

    @property
    def served(self) -> int:
        """The number of GPUs that hold one served model."""
        return self.rollout.tensor_model_parallel_size * self.rollout.data_parallel_size

    @property
    def sequence_parallel(self) -> int:
        """Ulysses sequence parallelism. verl's deprecated key wins if it is above 1."""
        deprecated = self.actor.get("ulysses_sequence_parallel_size", 1)
        return deprecated if deprecated > 1 else self.actor.fsdp_config.ulysses_sequence_parallel_size

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of FSDP."""
        return max(1, self.gpus // self.sequence_parallel)

    @property
    def update_rows(self) -> int:
        """The responses of a rank in an update."""
        return self.actor.ppo_mini_batch_size * self.rollout.n // self.ranks

    @property
    def log_prob_rows(self) -> int:
        """The responses for which a rank computes old log-probs at once: one call's share of the rollout batch."""
        calls = self.config.trainer.v1.get(self.config.trainer.v1.trainer_mode, {}).get("parameter_sync_step", 1)
        return self.config.data.train_batch_size // calls * self.rollout.n // self.ranks


class Rule(NamedTuple):
    """A row of the table; ``says`` is formatted with the ``Settings`` as ``s``."""

    is_met: Callable[[Settings], Any]
    says: str


def _divides(part, whole):
    return part is not None and part >= 1 and whole % part == 0


def _positive(value):
    return type(value) in (int, float) and 0 < value < math.inf


def _saves_weights(contents):
    return {"model", "hf_model"} & set(contents) and set(contents) <= {"model", "hf_model", "optimizer", "extra"}


def _attention(config):
    return (config.actor_rollout_ref.model.override_config or {}).get("attn_implementation", "flash_attention_2")


def _samples_from_all(rollout):
    return rollout.top_p in (None, 1) and (rollout.top_k or -1) <= 0


# Only with FSDP: Megatron's own classes check its parallelism and batches.
REFUSED_WITH_FSDP = (
    Rule(
        lambda s: _positive(s.actor.optim.clip_grad),
        ACTOR + ".optim.clip_grad={s.actor.optim.clip_grad} makes every gradient 0: set it to a number above 0.",
    ),
    Rule(
        lambda s: _divides(s.sequence_parallel, s.gpus),
        ACTOR + ".fsdp_config.ulysses_sequence_parallel_size={s.sequence_parallel} does not divide the {s.gpus} GPUs "
        "that train: choose a divisor.",
    ),
    Rule(
        lambda s: _divides(s.actor.ppo_mini_batch_size, s.config.data.train_batch_size),
        ACTOR + ".ppo_mini_batch_size={s.actor.ppo_mini_batch_size} does not divide data.train_batch_size="
        "{s.config.data.train_batch_size}: choose a divisor.",
    ),
    Rule(
        lambda s: _divides(s.ranks, s.actor.ppo_mini_batch_size * s.rollout.n),
        "{s.ranks} data-parallel ranks do not divide " + ACTOR + ".ppo_mini_batch_size * rollout.n="
        "{s.actor.ppo_mini_batch_size} * {s.rollout.n}: change one of the two, or the number of GPUs.",
    ),
    Rule(
        lambda s: s.actor.use_dynamic_bsz or _divides(s.actor.ppo_micro_batch_size_per_gpu, s.update_rows),
        ACTOR + ".ppo_micro_batch_size_per_gpu={s.actor.ppo_micro_batch_size_per_gpu} does not divide a rank's "
        "{s.update_rows} responses of an update: choose a divisor.",
    ),
    Rule(
        lambda s: (
            s.actor.use_dynamic_bsz
            or uses_bypass_mode(s.config)
            or _divides(s.rollout.log_prob_micro_batch_size_per_gpu, s.log_prob_rows)
        ),
        ROLLOUT + ".log_prob_micro_batch_size_per_gpu={s.rollout.log_prob_micro_batch_size_per_gpu} does not divide a "
        "rank's {s.log_prob_rows} responses: choose a divisor.",
    ),
    Rule(  # verl asserts it at the first sequence that is too long, perhaps after hours
        lambda s: (
            not s.actor.use_dynamic_bsz or (s.actor.ppo_max_token_len_per_gpu or 0) * s.sequence_parallel >= s.longest
        ),
        ACTOR + ".ppo_max_token_len_per_gpu={s.actor.ppo_max_token_len_per_gpu} on {s.sequence_parallel} GPUs does not "
        "hold a sequence of {s.longest} tokens (data.max_prompt_length + max_response_length): raise it.",
    ),
    Rule(
        lambda s: (
            not s.actor.use_dynamic_bsz
            or uses_bypass_mode(s.config)
            or (s.rollout.log_prob_max_token_len_per_gpu or 0) * s.sequence_parallel >= s.longest
        ),
        ROLLOUT + ".log_prob_max_token_len_per_gpu={s.rollout.log_prob_max_token_len_per_gpu} on {s.sequence_parallel} "
        "GPUs does not hold a sequence of {s.longest} tokens (data.max_prompt_length + max_response_length): raise it.",
    ),
    # Wrong training of verl 0.9.1 that nothing reports: docs/dev/upstream/silent_faults.md
    Rule(
        lambda s: s.actor.strategy != "fsdp" or s.actor.fsdp_config.fsdp_size != 1 or s.gpus == 1,
        ACTOR + ".fsdp_config.fsdp_size=1 on {s.gpus} GPUs is not usable with strategy=fsdp: verl 0.9.1 then trains "
        "other weights on each GPU. Set it to -1, or strategy=fsdp2.",
    ),
    Rule(
        lambda s: (
            s.config.trainer.v1.trainer_mode != "separate_async"
            or uses_bypass_mode(s.config)
            or s.actor.strategy != "fsdp2"
            or not (s.actor.fsdp_config.param_offload or s.config.trainer.device == "cpu")
        ),
        "trainer.v1.trainer_mode=separate_async without algorithm.rollout_correction.bypass_mode is not usable with "
        "strategy=fsdp2 on weights in CPU memory: the copy that verl 0.9.1 makes of them before old log-probs is no "
        "copy, so they are computed with the newest weights. Set bypass_mode=true, or fsdp_config.param_offload=false.",
    ),
)
REFUSED = (
    Rule(
        lambda s: isinstance(s.config.run_dir, str) and s.config.run_dir and "${" not in s.config.run_dir,
        "run_dir (OUTPUT_DIR)={s.config.run_dir} is not usable: set it to a folder, without ${{.",
    ),
    Rule(
        lambda s: _positive(s.actor.optim.lr),
        ACTOR + ".optim.lr={s.actor.optim.lr} trains nothing: set it to a number above 0.",
    ),
    Rule(
        lambda s: s.config.trainer.total_training_steps is None or s.config.trainer.total_training_steps >= 1,
        "trainer.total_training_steps={s.config.trainer.total_training_steps} trains nothing: set it to 1 or more, or "
        "null.",
    ),
    Rule(  # verl saves only what it knows of this list: tried with [modle], a checkpoint had no weights
        lambda s: s.config.trainer.save_freq <= 0 or _saves_weights(s.actor.checkpoint.save_contents),
        ACTOR + ".checkpoint.save_contents={s.actor.checkpoint.save_contents} is not usable: list model (or hf_model), "
        "optimizer and extra.",
    ),
    Rule(
        lambda s: all(_positive(limit) for name, limit in s.config.watchdog.items() if name.endswith("_s")),
        "watchdog={s.config.watchdog} is not usable: each limit is a number of seconds above 0.",
    ),
    Rule(
        lambda s: isinstance(s.config.watchdog.min_arrived, int | float) and 0 <= s.config.watchdog.min_arrived <= 1,
        "watchdog.min_arrived={s.config.watchdog.min_arrived} is not usable: it is a share between 0 and 1.",
    ),
    Rule(
        lambda s: all(_divides(s.served, nodes * gpus) for verb, nodes, gpus in s.pools if verb != "score"),
        ROLLOUT + ".tensor_model_parallel_size * data_parallel_size={s.served} does not divide the GPUs that train, or "
        "sample: choose a divisor.",
    ),
    Rule(  # verl/utils/model.py:649; what verl says instead is "please install trl"
        lambda s: not need_critic(s.config) or _attention(s.config) == "flash_attention_2",
        "algorithm.adv_estimator={s.config.algorithm.adv_estimator} needs a critic, which verl loads with flash "
        "attention alone: use grpo, or train on a GPU with flash-attn.",
    ),
    Rule(  # verl would fail at the first batch, minutes later, with a KeyError
        lambda s: not uses_bypass_mode(s.config) or s.rollout.calculate_log_probs,
        "algorithm.rollout_correction.bypass_mode=true needs the log-probs of the rollout engine: set "
        + ROLLOUT
        + ".calculate_log_probs=true.",
    ),
    Rule(
        lambda s: not uses_bypass_mode(s.config) or _samples_from_all(s.rollout),
        ROLLOUT + ".top_p={s.rollout.top_p}, top_k={s.rollout.top_k} is not usable with bypass_mode=true: the rollout "
        "engine's log-probs are those of the truncated distribution and the trainer's are not, so ratios differ from 1 "
        "on fresh data. Set top_p=1 and top_k=-1, or bypass_mode=false.",
    ),
    # Options that are asked for and would have no effect.
    Rule(
        lambda s: not s.correction.get("rollout_is") or s.rollout.calculate_log_probs,
        "algorithm.rollout_correction.rollout_is={s.correction[rollout_is]} has no effect without "
        + ROLLOUT
        + ".calculate_log_probs=true: set it, or rollout_is=null.",
    ),
    Rule(
        lambda s: not s.config.trainer.val_only or s.config.trainer.val_before_train,
        "trainer.val_only=true has no effect with val_before_train=false: verl would train. Set val_before_train=true.",
    ),
    Rule(
        lambda s: s.config.trainer.critic_warmup <= 1 or need_critic(s.config),
        "trainer.critic_warmup={s.config.trainer.critic_warmup} without a critic keeps the actor from training before "
        "that step: set it to 0.",
    ),
)
DOUBTED = (
    Rule(
        lambda s: (
            s.loss.loss_mode != "bapo"
            or (s.actor.clip_ratio, s.actor.clip_ratio_low, s.actor.clip_ratio_high) == (0.2, 0.2, 0.2)
        ),
        "clip_ratio, clip_ratio_low and clip_ratio_high of " + ACTOR + " have no effect: loss_mode=bapo reads "
        "ratio_lower_* and ratio_upper_* of its policy_loss.",
    ),
    Rule(
        lambda s: s.loss.ratio_lower_max >= SMALLEST_LOWER_BOUND,
        ACTOR + ".policy_loss.ratio_lower_max={s.loss.ratio_lower_max} is a bound on the ratio, and a ratio of 1 means "
        "no change. If you meant an epsilon, set 1 minus it.",
    ),
    Rule(
        lambda s: s.rollout.n > 1 or s.config.algorithm.adv_estimator != "grpo",
        ROLLOUT + ".n=1 with algorithm.adv_estimator=grpo leaves no other response to compare with.",
    ),
    Rule(
        lambda s: s.config.trainer.v1.trainer_mode == "sync" or uses_bypass_mode(s.config),
        "algorithm.rollout_correction.bypass_mode=false in an asynchronous mode: the ratio, hence the positive "
        "contribution, is measured against the recomputed policy, not the one that sampled.",
    ),
)


def check_rules(config) -> str:
    """Check all rules. Returns how a rollout batch is cut into updates.

    Raises:
        ValueError: what ``REFUSED`` says, all of it.
        CheckWarning: what ``DOUBTED`` says.
    """
    settings = Settings(config)
    refused = [
        rule.says.format(s=settings)
        for rule in (*(REFUSED_WITH_FSDP if settings.fsdp else ()), *REFUSED)
        if not rule.is_met(settings)
    ]
    if refused:
        raise ValueError(" ".join(refused))
    doubted = [rule.says.format(s=settings) for rule in DOUBTED if not rule.is_met(settings)]
    if doubted:
        raise CheckWarning(" ".join(doubted))
    batch, mini, epochs = config.data.train_batch_size, settings.actor.ppo_mini_batch_size, settings.actor.ppo_epochs
    against = "the policy that sampled" if uses_bypass_mode(config) else "the policy before the updates of each step"
    return (
        f"{batch} prompts of {settings.rollout.n} responses, {batch // mini * epochs} updates on each batch; the ratio "
        f"is against {against}"
    )


def check_counts(config) -> None:
    """Check that the numbers in ``COUNTS``, by which others are divided, are whole numbers of 1 or more.

    Raises:
        ValueError: names the first that is not.
    """
    for key in COUNTS:
        value = OmegaConf.select(config, key)
        if type(value) is not int or value < 1:
            raise ValueError(f"{key}={value!r} is not usable: set it to a whole number of 1 or more.")
