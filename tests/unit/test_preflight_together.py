# SPDX-License-Identifier: Apache-2.0
"""Settings that are fine alone and wrong together are reported, and each fix that is named takes the line away."""

from contextlib import suppress

import peft
import pytest
import torch
from support.configs import composed
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.bapo.preflight import CheckWarning, rules
from recipe.bapo.preflight.advantages import check_advantages
from recipe.bapo.preflight.rules import check_rules
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, register_adv_est
from verl.utils.fsdp_utils import collect_lora_params, get_fsdp_wrap_policy

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, LOSS = "actor_rollout_ref.model", f"{ACTOR}.policy_loss"
LORA = f"{MODEL}.lora_rank=8"
FSDP1, FSDP2 = f"{ACTOR}.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async algorithm.rollout_correction.bypass_mode=true "
    f"{ROLLOUT}.calculate_log_probs=true {ACTOR}.calculate_entropy=true {ROLLOUT}.checkpoint_engine.backend=nccl"
)
GAE = "algorithm.adv_estimator=gae"
REJECTION = f"{ROLLOUT}.calculate_log_probs=true algorithm.rollout_correction.rollout_rs"
THRESHOLD = "algorithm.rollout_correction.rollout_rs_threshold"
SCORER = "reward.reward_model.enable=true reward.reward_model.enable_resource_pool"
OWN_REWARD = "reward.custom_reward_function.path"
ONE_UPDATE = f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=64 {ACTOR}.ppo_epochs=1"
MONITOR = f"{LOSS}.loss_mode=vanilla {LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"
NO_LINES = f"{LOSS}.loss_mode=vanilla {LOSS}._target_=verl.workers.config.PolicyLossConfig"


def by_module_names(model, state_dict):
    """Find LoRA's tensors as peft 0.21 does."""
    layers = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return {key: 0 for key in state_dict if "lora_" in key and any(key.startswith(f"{name}.") for name in layers)}


def by_tensor_names(model, state_dict):
    """Find LoRA's tensors as peft 0.20 does."""
    return {key: 0 for key in state_dict if "lora_" in key}


@pytest.fixture
def said(task, monkeypatch):
    """Return a function: what the stages say of the example with overrides, as lists ``failed`` and ``warning``.

    Unless the test changes it, peft is one that does not find the adapters in layers of FSDP1.
    """
    monkeypatch.setattr(peft, "get_peft_model_state_dict", by_module_names)

    def lines_of(overrides):
        config = composed(task, *overrides.split())
        found = {ValueError: [], CheckWarning: []}
        for stage in (check_rules, check_advantages):
            try:
                stage(config)
            except (ValueError, CheckWarning) as error:
                found[type(error)].append(str(error))
        return found[ValueError], found[CheckWarning]

    return lines_of


REFUSED = [
    (
        f"{LORA} {FSDP1}",
        "lora_rank=8 with strategy=fsdp and the inst",
        [FSDP2, f"{MODEL}.lora.merge=true"],
    ),
    (
        f"{LORA} {SEPARATE} {FSDP1}",
        "lora.merge=false with LoRA and trainer.v1",
        [f"{MODEL}.lora.merge=true"],
    ),
    (
        f"{MODEL}.lora.rank=8 {SEPARATE} {ACTOR}.strategy=megatron",
        "lora.merge=false with LoRA and trainer.v1",
        [f"{MODEL}.lora.merge=true"],
    ),
    *[
        (
            f"{GAE} algorithm.use_pf_ppo=true algorithm.pf_ppo.reweight_method={method} {ROLLOUT}.n={n}",
            "algorithm.use_pf_ppo=true with adv_estimator=gae gives a right response an adv",
            ["algorithm.use_pf_ppo=false"],
        )
        for method, n in (("pow", 8), ("max_min", 1), ("max_random", 2))
    ],
    *[
        (
            f"algorithm.adv_estimator={name} {REJECTION}=token_{kind} {THRESHOLD}={threshold}",
            f"rollout_rs=token_{kind} with adv_estimator={name} gives a right response an adv",
            [f"{REJECTION}=seq_mean_{kind}", "algorithm.adv_estimator=grpo"],
        )
        for name, kind, threshold in (
            ("gae", "k1", "0.5_2.0"),
            ("gae", "k3", "2.0"),
            ("reinforce_plus_plus", "k2", "2.0"),
        )
    ],
]
WARNED = [
    *[
        (
            f"{REJECTION}={kind} {THRESHOLD}={threshold}",
            f"algorithm.rollout_correction={{'rollout_is_threshold': 2.0, 'rollout_rs': '{kind}'",
            [f"{THRESHOLD}={good}", f"{REJECTION}=null"],
        )
        for kind, threshold, good in (
            ("token_k1", "null", "0.5_2.0"),
            ("token_k1", "tight", "0.5_2.0"),
            ("seq_mean_k1", "2.0_4.0", "0.5_2.0"),  # no ratio of 1 is within
            ("seq_max_k3", "null", "2.0"),
            ("seq_max_k3", "0.5_2.0", "2.0"),
        )
    ],
    (
        f"{SCORER}=true",
        "reward.reward_model.enable_resource_pool=true ends the run at the first score",
        [f"{SCORER}=false", f"{OWN_REWARD}=mine.py"],
    ),
    *[
        (
            f"{ONE_UPDATE} {lines}",
            f"{ACTOR}.ppo_mini_batch_size=64 gives one update on each batch",
            [f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_epochs=2", NO_LINES],
        )
        for lines in ("", MONITOR, "trainer.v1.trainer_mode=colocate_async")
    ],
    (
        f"algorithm.adv_estimator=rloo_vectorized {ROLLOUT}.n=1",
        "adv_estimator=rloo_vectorized gives every response the advantage 0 with",
        [f"{ROLLOUT}.n=2"],
    ),
]
NO_REWARD_FUNCTION = f" {OWN_REWARD}=null"  # the example has one


@pytest.mark.parametrize("overrides, message, fixes", REFUSED)
def test_what_trains_wrong_in_silence_is_refused(overrides, message, fixes, said):
    (failed,), _ = said(overrides)
    assert message in failed and failed.count("invalid ") <= 1 and "\n" not in failed
    for fix in fixes:
        assert fix.rpartition(".")[2].partition("=")[2] in failed
        assert not said(f"{overrides} {fix}")[0]


@pytest.mark.parametrize("overrides, message, fixes", WARNED)
def test_what_is_pointless_or_fails_later_is_a_warning(overrides, message, fixes, said):
    overrides += NO_REWARD_FUNCTION
    failed, warned = said(overrides)
    (line,) = [line for line in warned if message in line]
    assert not failed and "\n" not in line
    for fix in fixes:
        assert not [line for line in said(f"{overrides} {fix}")[1] if message in line]


@pytest.mark.parametrize(
    "overrides",
    [
        LORA,  # with FSDP2
        f"{LORA} {FSDP1} {MODEL}.lora.merge=true",
        FSDP1,
        f"{LORA} {FSDP2} {SEPARATE} {MODEL}.lora.merge=true",
        SEPARATE,
        f"{GAE} {ROLLOUT}.n=1",
        "algorithm.use_pf_ppo=true",  # with grpo, which has no such step
        f"{REJECTION}=token_k1 {THRESHOLD}=0.5_2.0",
        f"{REJECTION}=token_k1,seq_max_k2 {THRESHOLD}=0.6_1.6,2.5".replace(",", r"\,"),
        f"{GAE} {REJECTION}=seq_sum_k1 {THRESHOLD}=2.0",
        f"{SCORER}=true {OWN_REWARD}=mine.py",
        f"{ONE_UPDATE} {NO_LINES}",
        f"{ONE_UPDATE} algorithm.rollout_correction.bypass_mode=true {ROLLOUT}.calculate_log_probs=true",
    ],
)
def test_their_neighbours_are_not_reported(overrides, said):
    failed, warned = said(overrides)
    assert not failed and not [line for line in warned if "needs a critic" not in line]


def test_lora_with_fsdp1_passes_with_a_peft_that_finds_it(said, monkeypatch):
    monkeypatch.setattr(peft, "get_peft_model_state_dict", by_tensor_names)
    assert said(f"{LORA} {FSDP1}") == ([], [])


@pytest.fixture
def one_rank(tmp_path):
    """Start a process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_the_installed_peft_is_asked_what_verl_asks_it(one_rank):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, vocab_size=8, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    policy = get_fsdp_wrap_policy(model, is_lora=True)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    found = collect_lora_params(wrapped, layered_summon=False, base_sync_done=True)
    assert rules._finds_wrapped_adapters() == bool(found)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_no_estimator_of_verl_is_refused_by_itself(estimator, task):
    config = composed(task, f"algorithm.adv_estimator={estimator.value}", "algorithm.gamma=0.9", "algorithm.lam=0")
    for n in (1, 2, 5):
        config.actor_rollout_ref.rollout.n = n
        with suppress(CheckWarning):  # of those that want other fields
            check_advantages(config)


@pytest.mark.parametrize(
    "left_out", ["algorithm.rollout_correction.bypass_mode=true", f"{ROLLOUT}.calculate_log_probs=false"]
)
def test_a_correction_that_verl_leaves_out_is_not_tried(left_out, task):
    config = composed(task, GAE, *f"{REJECTION}=token_k1".split(), left_out)
    assert check_advantages(config).startswith("gae, ")


@pytest.mark.parametrize("n, largest", [(1, "1"), (2, "0.707"), (5, "1.79")])
def test_the_largest_advantage_is_that_of_the_runs_groups(n, largest, task):
    config = composed(task, f"{ROLLOUT}.n={n}")
    assert check_advantages(config) == (f"grpo, {largest} at most if one of {n} responses has reward 1, the others 0")


def test_an_own_estimator_against_the_rewards_is_a_warning(said):
    @register_adv_est("turned")
    def compute(token_level_rewards, response_mask, config=None, **kwargs):
        advantages = -token_level_rewards.sum(-1, keepdim=True) * response_mask
        return advantages, advantages

    try:
        failed, (warned,) = said("algorithm.adv_estimator=turned")
    finally:
        ADV_ESTIMATOR_REGISTRY.pop("turned")
    assert not failed and "adv_estimator=turned gives a right response an advantage of -1 and a wrong one" in warned
