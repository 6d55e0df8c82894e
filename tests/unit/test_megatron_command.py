# SPDX-License-Identifier: Apache-2.0
"""The commands for Megatron in docs/larger_models.md compose to usable configs of verl. No GPU has run them."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from support.commands import ROOT

import verl  # noqa: F401  loads the plugin
from recipe.bapo.hook.compatibility import refuse_unusable_settings
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import McoreActorConfig

SECTION = (ROOT / "docs/larger_models.md").read_text().partition("## Megatron\n")[2]
TWO_LINES, EXPERTS = re.findall(r"^```bash\n(.*?)^```$", SECTION, re.M | re.S)
# From the config.json of Qwen3-30B-A3B.
LAYERS, HEADS, KEY_VALUE_HEADS, EXPERT_COUNT = 48, 32, 4, 128


def config_of(command, *needed):
    """Compose verl's config with a command's overrides. Hydra refuses unknown keys."""
    program, *overrides = shlex.split(command.replace("\\\n", " "))[2:]
    assert program == "verl.trainer.main_ppo"
    overrides = [override for override in overrides if override != "YOUR_ARGUMENTS"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*overrides, *needed])
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize(
    "command, needed",
    [
        (TWO_LINES, ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]),
        (EXPERTS, []),
    ],
    ids=["two lines", "experts"],
)
def test_verl_builds_the_actor_of_the_command(command, needed):
    config = config_of(command, *needed)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor, McoreActorConfig) and actor.policy_loss.loss_mode == "bapo"
    refuse_unusable_settings(actor, config.actor_rollout_ref.model)


def test_verls_own_rules_and_arithmetic_accept_the_command_for_experts():
    config = config_of(EXPERTS)
    validate_config(config, need_reference_policy(config), need_critic(config))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    sizes, gpus = actor.megatron, config.trainer.nnodes * config.trainer.n_gpus_per_node
    tensor, stages = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    expert_ranks = sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size
    model_parallel = tensor * stages * sizes.context_parallel_size
    for whole, part in (
        (gpus, model_parallel),
        (gpus, expert_ranks * stages),
        (LAYERS, stages * sizes.virtual_pipeline_model_parallel_size),
        (HEADS, tensor),
        (KEY_VALUE_HEADS, tensor),
        (EXPERT_COUNT, sizes.expert_model_parallel_size),
        (gpus, rollout.tensor_model_parallel_size),
        (config.data.train_batch_size, actor.ppo_mini_batch_size),
        (actor.ppo_mini_batch_size * rollout.n, gpus // model_parallel),
    ):
        assert whole % part == 0, (whole, part)
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) >= longest
    assert rollout.log_prob_use_dynamic_bsz  # verl uses the actor's setting
