# SPDX-License-Identifier: Apache-2.0
"""What follows from a resolved config of verl, or of our trainer, by the names that checks and rules use."""

import copy
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from recipe.bapo.config import is_of_our_trainer
from recipe.bapo.preflight.keys import items_of
from verl.experimental.reward_loop import migrate_legacy_reward_impl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Settings:
    """A resolved config, and what follows from it."""

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
    def clip_grad(self) -> float | None:
        """The largest norm of a gradient. verl's deprecated key wins if it is set."""
        deprecated = self.actor.optim.get("grad_clip")
        return self.actor.optim.clip_grad if deprecated is None else deprecated

    @property
    def attention(self) -> str:
        changed = self.config.actor_rollout_ref.model.override_config or {}
        return str(changed.get("attn_implementation", "flash_attention_2"))

    @property
    def estimator(self) -> str:
        return self.config.algorithm.adv_estimator

    @property
    def rejects_tokens(self) -> bool:
        """Whether rollout correction drops single tokens before the advantages are computed."""
        used = self.rollout.calculate_log_probs and not self.bypass
        return bool(used) and "token_" in (self.correction.get("rollout_rs") or "")

    @property
    def fsdp(self) -> bool:
        return self.actor.strategy in ("fsdp", "fsdp2")

    @property
    def ours(self) -> bool:
        """Whether our trainer runs it."""
        return is_of_our_trainer(self.config)

    @property
    def v1(self) -> bool:
        """Whether verl's V1 trainer runs it, and not the older one."""
        return self.config.trainer.use_v1

    @property
    def mode(self) -> str:
        """The mode of the trainer. verl's older trainer has only ``sync``."""
        return self.config.trainer.v1.trainer_mode if self.v1 else "sync"

    @property
    def bypass(self) -> bool:
        """Whether the ratio is against the policy that sampled."""
        return bool(self.correction.get("bypass_mode"))

    @property
    def epsilons(self) -> list[float]:
        """The distances of verl's bounds from a ratio of 1, below and above it."""
        of_both = self.actor.clip_ratio
        pair = (self.actor.clip_ratio_low, self.actor.clip_ratio_high)
        return [of_both if one is None else one for one in pair]

    @property
    def our_lines(self) -> bool:
        """Whether BAPO's loss or its monitor is in the config."""
        return str(self.loss.get("_target_")).startswith("recipe.bapo.")

    @property
    def updates(self) -> int:
        """The number of updates on each batch of rollouts."""
        return -(-self.config.data.train_batch_size // self.actor.ppo_mini_batch_size) * self.actor.ppo_epochs

    @property
    def adapter(self) -> bool:
        """Whether LoRA's parameters are sent to the rollout servers by themselves, not merged into the weights."""
        model = self.config.actor_rollout_ref.model
        lora = model.get("lora") or {}
        rank = model.lora_rank if self.fsdp else lora.get("rank")
        return (rank or 0) > 0 and not lora.get("merge")

    @property
    def of_trainer_alone(self) -> str:
        """What the model's ``override_config`` changes in the trainer's model and not in that of the vLLM servers."""
        changed = self.config.actor_rollout_ref.model.override_config or {}
        sent = OmegaConf.select(self.config, f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides") or {}
        if not self.fsdp or self.rollout.name != "vllm" or isinstance(sent, str):
            return ""
        names = (name for name, value in changed.items() if sent.get(name) != value)
        # How attention is computed, and dropout, which the servers do not have.
        return ", ".join(name for name in names if name != "attn_implementation" and "drop" not in name)

    @property
    def old_reward_keys(self) -> str:
        """The keys of verl's older reward config that are set, if they change the reward; ours moves them."""
        if self.ours or "reward_model" not in self.config:
            return ""
        if migrate_legacy_reward_impl(copy.deepcopy(self.config)).reward == self.config.reward:
            return ""
        old = {name: self.config[name] for name in ("reward_model", "custom_reward_function", "sandbox_fusion")}
        values = items_of(OmegaConf.to_container(OmegaConf.create(old)))
        return ", ".join(key for key, value in values if value is not None and not isinstance(value, dict))

    @property
    def longest(self) -> int:
        """The largest number of tokens of a prompt with its response."""
        return self.rollout.prompt_length + self.rollout.response_length

    @property
    def gpus(self) -> int:
        """The number of GPUs that train."""
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    @property
    def sequence_parallel(self) -> int:
        """Ulysses sequence parallelism. verl's deprecated key wins if it is above 1."""
        deprecated = self.actor.get("ulysses_sequence_parallel_size", 1)
        return deprecated if deprecated > 1 else self.actor.fsdp_config.ulysses_sequence_parallel_size

    @property
    def micro_batch_tokens(self) -> int:
        """The largest number of tokens of a dynamic micro-batch, in updates and for old log-probs."""
        limits = [self.actor.ppo_max_token_len_per_gpu]
        limits += [] if self.bypass else [self.rollout.log_prob_max_token_len_per_gpu]
        return min(tokens or 0 for tokens in limits) * self.sequence_parallel
