# SPDX-License-Identifier: Apache-2.0
"""Check that the advantages of a run follow its rewards."""

import numpy as np
import torch

from recipe.bapo.preflight import CheckSkipped, CheckWarning, blame
from recipe.bapo.preflight.settings import Settings
from verl import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.utils import need_critic, need_reference_policy

RESPONSES = 16  # at least; PF-PPO draws them at random, and would have to draw a right one for each right one
TOKENS = 3


def check_advantages(config) -> str:
    """Call verl's rollout correction and the advantage function of its V1 trainer on responses of three tokens.

    The last token has the reward: 1 for one response to each prompt, 0 for the others. The critic's values are 0. So
    every estimator has to give the right responses higher advantages than the wrong ones, in the mean of the tokens
    that are trained. One right response ends with a token that rejection drops.

    Raises:
        ValueError: one of verl's own estimators does not.
        CheckWarning: one of the user's own does not, it trains nothing, or a function fails. An estimator of the user's
            own may want fields that only a run has.
    """
    settings = Settings(config)
    name, per_prompt = config.algorithm.adv_estimator, settings.rollout.n
    prompts = np.repeat([str(number) for number in range(max(2, -(-RESPONSES // per_prompt)))], per_prompt)
    right = torch.arange(len(prompts)) % max(2, per_prompt) == 0
    rows = _correct(_responses(settings, prompts, right), settings)
    if not settings.v1:
        raise CheckSkipped("they are computed as verl's V1 trainer does, and this is its older one (use_v1=false)")
    mask = rows.batch["response_mask"]
    advantages = _advantages(rows, prompts, settings)
    means = advantages.sum(-1) / mask.sum(-1)
    trained = mask.any(-1)
    lowest, highest = means[right & trained].min(), means[~right & trained].max()
    if not advantages.any():
        raise CheckWarning(
            f"algorithm.adv_estimator={name} gives every response the advantage 0 with actor_rollout_ref.rollout.n="
            f"{per_prompt}, which trains nothing: set n=2 or more."
        )
    if not lowest > highest:
        kind = ValueError if name in list(AdvantageEstimator) else CheckWarning
        raise kind(_explain(settings, f"a right response an advantage of {lowest:.3g} and a wrong one {highest:.3g}"))
    return f"{name}, {advantages.abs().max():.3g} at most if one of {per_prompt} responses has reward 1, the others 0"


def _responses(settings, prompts, right):
    config = settings.config
    ones = torch.ones(len(prompts), TOKENS)
    rewards = torch.zeros_like(ones)
    rewards[right, -1] = 1.0
    sampled = -ones
    sampled[0, -1] = -20.0  # the trainer finds it e^19 times as likely, which every threshold rejects
    tensors = {"response_mask": ones, "token_level_scores": rewards, "token_level_rewards": rewards.clone()}
    tensors |= {"old_log_probs": -ones, "rollout_log_probs": sampled}
    tensors |= {"ref_log_prob": -ones} if need_reference_policy(config) else {}
    tensors |= {"values": torch.zeros_like(ones)} if need_critic(config) else {}
    return DataProto.from_dict(tensors, non_tensors={"uid": prompts.astype(object)})


def _correct(rows, settings):
    """Return the responses after rollout correction, where verl's trainer applies it before advantages."""
    correction = settings.correction
    if not correction or settings.bypass or not settings.rollout.calculate_log_probs:
        return rows
    given = {key: value for key, value in correction.items() if key.startswith("rollout_") and value}
    fix = "set rollout_rs_threshold, as '0.5_2.0' for k1 or 2.0 for k2 and k3, or leave rollout_rs out"
    with blame("algorithm.rollout_correction", given, fix, CheckWarning):
        rows, _ = compute_rollout_correction_and_add_to_batch(rows, correction)
        if not rows.batch["response_mask"][1:].any():
            raise ValueError("it rejects every token, also where both policies agree")
    return rows


def _advantages(rows, prompts, settings):
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    algorithm = settings.config.algorithm
    fix = "use grpo, or another that verl's V1 trainer has the fields for"
    with blame("algorithm.adv_estimator", algorithm.adv_estimator, fix, CheckWarning):
        found = compute_advantage_for_multi_trajectories(
            rows,
            batch_keys=[f"{prompt}_{number}_0" for number, prompt in enumerate(prompts)],
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=settings.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        return found.batch["advantages"] * rows.batch["response_mask"]


def _explain(settings, given):
    """Say which setting takes the advantages from the rewards."""
    name, rejection = settings.config.algorithm.adv_estimator, settings.correction.get("rollout_rs") or ""
    if name == "gae" and settings.config.algorithm.get("use_pf_ppo"):
        return (
            f"algorithm.use_pf_ppo=true with adv_estimator=gae gives {given}, because verl's V1 trainer gives a "
            "response the advantage of another one: set use_pf_ppo=false."
        )
    if "token_" in rejection:
        return (
            f"algorithm.rollout_correction.rollout_rs={rejection} with adv_estimator={name} gives {given}, because a "
            f"rejected last token takes the reward of its response with it: set rollout_rs="
            f"{rejection.replace('token_', 'seq_mean_')}, or adv_estimator=grpo."
        )
    return f"algorithm.adv_estimator={name} gives {given}: use grpo, or another whose advantages follow the rewards."
