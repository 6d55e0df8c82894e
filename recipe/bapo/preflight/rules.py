# SPDX-License-Identifier: Apache-2.0
"""Settings with which a run trains something else than its command says, waits for ever, loses data, or fails late.

A rule is a row: a condition that a usable config meets, and what to say if it does not. ``REFUSED`` ends the run and is
for what nobody else reports. ``DOUBTED`` only warns, also of what verl reports minutes later. The message names the
field, its value and the fix.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from recipe.bapo.preflight import CheckWarning
from recipe.bapo.preflight.settings import ACTOR, ROLLOUT, Settings
from verl.trainer.ppo.utils import need_critic

SMALLEST_LOWER_BOUND = 0.5  # the smallest bound on the ratio in the paper (method=figure7_low)
COUNTS = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.agent.num_workers",
    "reward.num_workers",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)


class Rule(NamedTuple):
    """A row of the table; ``says`` is formatted with the ``Settings`` as ``s``."""

    is_met: Callable[[Settings], Any]
    says: str


def _is_limit(seconds):
    return isinstance(seconds, int | float) and 0 < seconds < math.inf


def _saves_weights(contents):
    return {"model", "hf_model"} & set(contents) and set(contents) <= {"model", "hf_model", "optimizer", "extra"}


def _attention(config):
    return (config.critic.model.override_config or {}).get("attn_implementation", "flash_attention_2")


def _log_probs_are_of_all_tokens(rollout):
    """Whether the log-probs of the rollout engine are those of the whole distribution."""
    whole = rollout.top_p in (None, 1) and (rollout.top_k or -1) <= 0
    return whole or rollout.name != "vllm" or rollout.logprobs_mode != "processed_logprobs"


def _corrects(correction):
    """Whether verl's rollout correction is to weigh or drop tokens, or to use another loss."""
    return correction.get("rollout_is") or correction.get("rollout_rs") or correction.get("loss_type") == "reinforce"


REFUSED = (
    Rule(
        lambda s: not s.fsdp or s.actor.optim.clip_grad is None or s.actor.optim.clip_grad > 0,
        ACTOR + ".optim.clip_grad={s.actor.optim.clip_grad} is not usable: 0 makes every gradient 0, and a negative "
        "number reverses it. Set it to a number above 0.",
    ),
    Rule(  # verl saves only what it knows of this list: tried with [modle], a checkpoint had no weights
        lambda s: s.config.trainer.save_freq <= 0 or _saves_weights(s.actor.checkpoint.save_contents),
        ACTOR + ".checkpoint.save_contents={s.actor.checkpoint.save_contents} is not usable: list model (or hf_model), "
        "optimizer and extra.",
    ),
    # Wrong training of verl 0.9.1 that nothing reports: docs/dev/upstream/silent_faults.md
    Rule(
        lambda s: s.actor.strategy != "fsdp" or s.actor.fsdp_config.fsdp_size != 1 or s.gpus == 1,
        ACTOR + ".fsdp_config.fsdp_size=1 on {s.gpus} GPUs is not usable with strategy=fsdp: verl 0.9.1 then trains "
        "other weights on each GPU. Set it to -1, or strategy=fsdp2.",
    ),
    Rule(
        lambda s: (
            s.mode != "separate_async"
            or s.bypass
            or s.actor.strategy != "fsdp2"
            or not (s.actor.fsdp_config.param_offload or s.config.trainer.device == "cpu")
        ),
        "trainer.v1.trainer_mode=separate_async without algorithm.rollout_correction.bypass_mode is not usable with "
        "strategy=fsdp2 on weights in CPU memory: the copy that verl 0.9.1 makes of them before old log-probs is no "
        "copy, so they are computed with the newest weights. Set bypass_mode=true, or fsdp_config.param_offload=false.",
    ),
    Rule(
        lambda s: not s.bypass or _log_probs_are_of_all_tokens(s.rollout),
        ROLLOUT + ".top_p={s.rollout.top_p}, top_k={s.rollout.top_k} is not usable with bypass_mode=true: the rollout "
        "engine's log-probs are those of the truncated distribution and the trainer's are not, so ratios differ from 1 "
        "on fresh data. Set top_p=1 and top_k=-1, or bypass_mode=false.",
    ),
    # Options that are asked for and would have no effect.
    Rule(
        lambda s: not s.old_reward_keys,
        "{s.old_reward_keys}: verl.trainer.main_ppo 0.9.1 does not read these keys of verl's older reward config. Set "
        "the same below reward, such as reward.custom_reward_function.path and reward.reward_manager.name.",
    ),
    Rule(
        lambda s: (
            s.rollout.calculate_log_probs or not (s.correction.get("rollout_is") or s.correction.get("rollout_rs"))
        ),
        "rollout_is and rollout_rs of algorithm.rollout_correction have no effect without "
        + ROLLOUT
        + ".calculate_log_probs=true: set it, or leave them out.",
    ),
    Rule(
        lambda s: not (s.v1 and s.bypass and _corrects(s.correction)) or s.loss.loss_mode == "bypass_mode",
        "rollout_is, rollout_rs and loss_type of algorithm.rollout_correction have no effect with bypass_mode=true: in "
        "verl's V1 trainer only loss_mode=bypass_mode reads them, and from " + ACTOR + ".policy_loss."
        "rollout_correction. Leave them out, set them there, or set bypass_mode=false.",
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
# Of our trainer alone.
REFUSED_IN_OURS = (
    Rule(
        lambda s: s.v1,
        "trainer.use_v1=false has no effect in recipe.bapo.main_bapo, which runs verl's V1 trainer: leave it out, or "
        "run python -m verl.trainer.main_ppo with the lines of BAPO.",
    ),
    Rule(
        lambda s: all(_is_limit(limit) for name, limit in s.config.watchdog.items() if name.endswith("_s")),
        "watchdog={s.config.watchdog} is not usable: each limit is a number of seconds above 0.",
    ),
    Rule(
        lambda s: isinstance(s.config.watchdog.min_arrived, int | float) and 0 <= s.config.watchdog.min_arrived <= 1,
        "watchdog.min_arrived={s.config.watchdog.min_arrived} is not usable: it is a share between 0 and 1.",
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
        lambda s: s.loss.get("ratio_lower_max", 1) >= SMALLEST_LOWER_BOUND,
        ACTOR + ".policy_loss.ratio_lower_max={s.loss.ratio_lower_max} is a bound on the ratio, and a ratio of 1 means "
        "no change. If you meant an epsilon, set 1 minus it.",
    ),
    Rule(
        lambda s: s.rollout.n > 1 or s.config.algorithm.adv_estimator != "grpo",
        ROLLOUT + ".n=1 with algorithm.adv_estimator=grpo leaves no other response to compare with.",
    ),
    Rule(
        lambda s: s.mode == "sync" or s.bypass,
        "algorithm.rollout_correction.bypass_mode=false in an asynchronous mode: the ratio, hence the positive "
        "contribution, is measured against the recomputed policy, not the one that sampled.",
    ),
    # What verl, torch or vLLM refuse, but minutes later or in words that name no setting.
    Rule(  # verl/utils/model.py:649; what verl says instead is "please install trl"
        lambda s: not need_critic(s.config) or not s.fsdp or _attention(s.config) == "flash_attention_2",
        "algorithm.adv_estimator={s.config.algorithm.adv_estimator} needs a critic, which verl loads with flash "
        "attention alone: use grpo, or train on a GPU with flash-attn.",
    ),
    Rule(  # a KeyError at the first batch
        lambda s: not s.bypass or s.rollout.calculate_log_probs,
        "algorithm.rollout_correction.bypass_mode=true needs the log-probs of the rollout engine: set "
        + ROLLOUT
        + ".calculate_log_probs=true.",
    ),
    Rule(  # at the first sequence that is too long, perhaps after hours
        lambda s: not (s.fsdp and s.actor.use_dynamic_bsz) or s.longest <= s.micro_batch_tokens,
        "a micro-batch holds {s.micro_batch_tokens} tokens (the smaller one of "
        + ACTOR
        + ".ppo_max_token_len_per_gpu and "
        + ROLLOUT
        + ".log_prob_max_token_len_per_gpu, times the sequence parallelism), and a sequence can have {s.longest} (data."
        "max_prompt_length + max_response_length): the first one that is too long ends the run.",
    ),
    # An option without effect that most scripts set, to its default.
    Rule(
        lambda s: not s.fsdp or s.actor.grad_clip in (1.0, s.actor.optim.clip_grad),
        ACTOR + ".grad_clip={s.actor.grad_clip} has no effect: verl 0.9.1 reads " + ACTOR + ".optim.clip_grad.",
    ),
)


def check_rules(config) -> str:
    """Check all rules. Returns how a rollout batch is cut into updates.

    Raises:
        ValueError: what ``REFUSED`` and ``REFUSED_IN_OURS`` say, all of it.
        CheckWarning: what ``DOUBTED`` says, and which number does not divide another.
    """
    settings = Settings(config)

    def unmet(rules):
        return [rule.says.format(s=settings) for rule in rules if not rule.is_met(settings)]

    refused = unmet((*REFUSED, *(REFUSED_IN_OURS if settings.ours else ())))
    if refused:
        raise ValueError(" ".join(refused))
    doubted = unmet(DOUBTED) + [
        f"{name}={part} does not divide {whole_name}={whole}."
        for name, part, whole_name, whole in settings.divisions()
        if not part or whole % part
    ]
    if doubted:
        raise CheckWarning(" ".join(doubted))
    batch, mini, epochs = config.data.train_batch_size, settings.actor.ppo_mini_batch_size, settings.actor.ppo_epochs
    against = "the policy that sampled" if settings.bypass else "the policy before the updates of each step"
    return (
        f"{batch} prompts of {settings.rollout.n} responses, {-(-batch // mini) * epochs} updates on each batch; the "
        f"ratio is against {against}"
    )


def check_counts(config) -> None:
    """Check that the numbers in ``COUNTS`` are whole numbers of 1 or more: with 0 a run trains nothing, or hangs.

    Raises:
        ValueError: names the first that is not.
    """
    for key in COUNTS:
        value = OmegaConf.select(config, key)
        if type(value) is not int or value < 1:
            raise ValueError(f"{key}={value!r} is not usable: set it to a whole number of 1 or more.")
