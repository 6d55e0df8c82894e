# SPDX-License-Identifier: Apache-2.0
"""Settings with which a run trains something else than its command says, waits for ever, loses data, or fails late.

A rule is a row: a condition that a usable config meets, and what to say if it does not. ``REFUSED`` ends the run and is
for what nobody else reports. ``DOUBTED`` only warns, also of what verl reports minutes later. The message names the
field, its value and the fix.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from packaging.version import Version

from recipe.bapo.preflight import CheckWarning
from recipe.bapo.preflight.settings import ACTOR, ROLLOUT, Settings
from verl.trainer.ppo.utils import need_critic

SMALLEST_LOWER_BOUND = 0.5  # the smallest bound on the ratio in the paper (method=figure7_low)
# Estimators that compare the responses to one prompt with each other.
WITHIN_GROUPS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg"),
)
PEFT = Version("0.21")  # from this version on it finds no adapter in the layers that FSDP1 wraps
FROM_TRAINED_TOKENS = ("gae", "reinforce_plus_plus")  # estimators that sum the rewards of the tokens that are trained


class Rule(NamedTuple):
    """A row of the table; ``says`` is formatted with the ``Settings`` as ``s``."""

    is_met: Callable[[Settings], Any]
    says: str


def _saves_weights(contents):
    return {"model", "hf_model"} & set(contents) and set(contents) <= {"model", "hf_model", "optimizer", "extra"}


def _log_probs_are_of_all_tokens(rollout):
    """Whether the log-probs of the rollout engine are those of the whole distribution."""
    whole = rollout.top_p in (None, 1) and (rollout.top_k or -1) <= 0
    return whole or rollout.name != "vllm" or rollout.logprobs_mode != "processed_logprobs"


def _corrects(correction):
    """Whether verl's rollout correction is to weigh or drop tokens, or to use another loss."""
    return correction.get("rollout_is") or correction.get("rollout_rs") or correction.get("loss_type") == "reinforce"


REFUSED = (
    Rule(
        lambda s: not s.fsdp or s.clip_grad is None or s.clip_grad > 0,
        "invalid " + ACTOR + ".optim.clip_grad={s.clip_grad}: 0 makes every gradient 0, and a negative "
        "number reverses it. Set it to a number above 0.",
    ),
    Rule(  # verl saves only what it knows of this list: tried with [modle], a checkpoint had no weights
        lambda s: s.config.trainer.save_freq <= 0 or _saves_weights(s.actor.checkpoint.save_contents),
        "invalid " + ACTOR + ".checkpoint.save_contents={s.actor.checkpoint.save_contents}: list model (or hf_model), "
        "optimizer and extra.",
    ),
    # Wrong training of verl 0.9.1 that nothing reports: docs/silent_faults.md
    Rule(
        lambda s: s.actor.strategy != "fsdp" or s.actor.fsdp_config.fsdp_size != 1 or s.gpus == 1,
        "invalid " + ACTOR + ".fsdp_config.fsdp_size=1 on {s.gpus} GPUs with strategy=fsdp: verl 0.9.1 then trains "
        "other weights on each GPU. Set it to -1, or strategy=fsdp2.",
    ),
    Rule(
        lambda s: not s.fsdp or s.sequence_parallel == 1 or s.attention.startswith("flash_attention"),
        "invalid " + ACTOR + ".fsdp_config.ulysses_sequence_parallel_size={s.sequence_parallel} with "
        "attn_implementation={s.attention}: the GPUs exchange their parts of a sequence only in flash attention. "
        "Install flash-attn, or set the size to 1.",
    ),
    Rule(
        lambda s: (
            s.mode != "separate_async"
            or s.bypass
            or s.actor.strategy != "fsdp2"
            or not (s.actor.fsdp_config.param_offload or s.config.trainer.device == "cpu")
        ),
        "invalid trainer.v1.trainer_mode=separate_async without algorithm.rollout_correction.bypass_mode with "
        "strategy=fsdp2 on weights in CPU memory: the copy that verl 0.9.1 makes of them before old log-probs is no "
        "copy, so they are computed with the newest weights. Set bypass_mode=true, or fsdp_config.param_offload=false.",
    ),
    Rule(
        lambda s: not s.bypass or _log_probs_are_of_all_tokens(s.rollout),
        "invalid " + ROLLOUT + ".top_p={s.rollout.top_p}, top_k={s.rollout.top_k} with bypass_mode=true: the rollout "
        "engine's log-probs are those of the truncated distribution and the trainer's are not, so ratios differ from 1 "
        "on fresh data. Set top_p=1 and top_k=-1, or bypass_mode=false.",
    ),
    Rule(
        lambda s: s.mode != "separate_async" or not s.adapter,
        "invalid actor_rollout_ref.model.lora.merge=false with LoRA and trainer.v1.trainer_mode=separate_async: verl "
        "0.9.1 sends the frozen weights alone and under peft's names. vLLM 0.28 fails to load them, and a server "
        "that loads them samples without the adapter. Set merge=true, with another rollout.checkpoint_engine.backend "
        "than delta_sharded.",
    ),
    Rule(
        lambda s: (
            s.actor.strategy != "fsdp" or s.mode == "separate_async" or not s.adapter or Version(version("peft")) < PEFT
        ),
        "invalid actor_rollout_ref.model.lora_rank={s.config.actor_rollout_ref.model.lora_rank} with "
        "strategy=fsdp and peft 0.21 or newer, which finds no adapter in the layers that FSDP1 wraps, so the rollout "
        "servers sample without it. Set " + ACTOR + ".strategy=fsdp2 or actor_rollout_ref.model.lora.merge=true, or "
        "install peft<0.21.",
    ),
    Rule(
        lambda s: not (s.v1 and s.estimator == "gae" and s.config.algorithm.use_pf_ppo),
        "algorithm.use_pf_ppo=true with adv_estimator=gae: verl 0.9.1's V1 trainer gives a response the advantage of "
        "another one. Set use_pf_ppo=false.",
    ),
    Rule(
        lambda s: not s.rejects_tokens or s.estimator not in FROM_TRAINED_TOKENS,
        "algorithm.rollout_correction.rollout_rs={s.correction[rollout_rs]} with adv_estimator={s.estimator}: a "
        "rejected last token takes the reward of its response with it. Set rollout_rs=seq_mean_k1, seq_mean_k2 or "
        "seq_mean_k3, or adv_estimator=grpo.",
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
        lambda s: s.rollout.n > 1 or s.estimator not in WITHIN_GROUPS,
        ROLLOUT + ".n=1 with algorithm.adv_estimator={s.estimator} leaves no other response to compare with: set n=2 "
        "or more.",
    ),
    Rule(
        lambda s: s.mode == "sync" or s.bypass,
        "algorithm.rollout_correction.bypass_mode=false in an asynchronous mode: the ratio, hence the positive "
        "contribution, is measured against the recomputed policy, not the one that sampled.",
    ),
    Rule(
        lambda s: not s.our_lines or s.bypass or s.updates > 1,
        ACTOR
        + ".ppo_mini_batch_size={s.actor.ppo_mini_batch_size} gives one update on each batch, whose log-probs are "
        "computed just before it, so every ratio is 1 and no bound has an effect: set a smaller one, set ppo_epochs=2, "
        "or leave out the lines of BAPO and its monitor.",
    ),
    Rule(  # docs/silent_faults.md has how much of it
        lambda s: not s.fsdp or s.actor.fsdp_config.model_dtype in ("fp32", "float32"),
        ACTOR + ".fsdp_config.model_dtype={s.actor.fsdp_config.model_dtype} keeps the weights in 16 bits, where most "
        "of a small step of the optimizer is rounded away. Set it to fp32: FSDP computes in bfloat16 all the same.",
    ),
    Rule(  # verl #3741
        lambda s: s.actor.loss_agg_mode != "seq-mean-token-sum-norm" or s.actor.loss_scale_factor is not None,
        ACTOR + ".loss_agg_mode=seq-mean-token-sum-norm with loss_scale_factor=null divides by the width of each "
        "micro-batch, so the loss depends on how a mini-batch is cut: set loss_scale_factor to a constant.",
    ),
    Rule(
        lambda s: not s.of_trainer_alone,
        "actor_rollout_ref.model.override_config changes {s.of_trainer_alone} of the trainer's model alone: vLLM reads "
        "config.json. If it changes what the model computes, set the same in +" + ROLLOUT + ".engine_kwargs.vllm."
        "hf_overrides.",
    ),
    Rule(
        lambda s: s.actor.optim.lr > 0,
        ACTOR + ".optim.lr={s.actor.optim.lr} trains nothing, or backwards: set it to a number above 0.",
    ),
    Rule(
        lambda s: s.loss.loss_mode != "vanilla" or all(0 <= one < 1 for one in s.epsilons),
        ACTOR + ".clip_ratio, clip_ratio_low and clip_ratio_high are distances of the ratio from 1, and {s.epsilons} "
        "are not all between 0 and 1: for a bound of 1.28 set 0.28.",
    ),
    # What verl, torch or vLLM refuse, but minutes later or in words that name no setting.
    Rule(  # a TypeError in the first update
        lambda s: s.loss.loss_mode != "vanilla" or s.actor.clip_ratio_c is not None,
        ACTOR + ".clip_ratio_c=null ends the first update of loss_mode=vanilla: set it to a number above 1, such as "
        "3.0.",
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
        lambda s: not s.fsdp or s.actor.grad_clip in (1.0, s.clip_grad),
        ACTOR + ".grad_clip={s.actor.grad_clip} has no effect: verl 0.9.1 reads " + ACTOR + ".optim.clip_grad.",
    ),
)


def check_rules(config) -> str:
    """Check all rules. Returns how a rollout batch is cut into updates.

    Raises:
        ValueError: what ``REFUSED`` says, all of it.
        CheckWarning: what ``DOUBTED`` says.
    """
    settings = Settings(config)

    def unmet(rules):
        return [rule.says.format(s=settings) for rule in rules if not rule.is_met(settings)]

    refused = unmet(REFUSED)
    if refused:
        raise ValueError(" ".join(refused))
    doubted = unmet(DOUBTED)
    if doubted:
        raise CheckWarning(" ".join(doubted))
    against = "the policy that sampled" if settings.bypass else "the policy before the updates of each step"
    return (
        f"{config.data.train_batch_size} prompts of {settings.rollout.n} responses, {settings.updates} updates on each "
        f"batch; the ratio is against {against}"
    )
