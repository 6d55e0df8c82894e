# SPDX-License-Identifier: Apache-2.0
"""The loss registered in verl: it equals verl's loss at fixed bounds; its refusals, metrics and host reads."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.actor import actor_config
from support.batches import make_batch
from support.versions import from_0_9

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.hook.compatibility import refuse_unusable_settings
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig, compute_policy_loss_bapo
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

DYNAMIC = SimpleNamespace(dynamic_context_parallel=True)
MEGATRON = {"strategy": "megatron", "megatron": SimpleNamespace(dynamic_context_parallel=False)}
FIXED = dict(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.28, ratio_upper_max=1.28)


def with_batch_info(config, rows, tokens=None):
    config.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=None)
    return config


def run_loss(loss_fn, config, batch, mode="token-mean", weights=None):
    """Compute loss, gradient and metrics of a micro-batch; if the config is ours, find its bounds first."""
    old, log_prob, advantages, mask = batch
    log_prob = log_prob.clone().requires_grad_()
    if isinstance(config.policy_loss, BAPOConfig):
        bounds, _ = find_clip_bounds(*batch, config.policy_loss, clip_ratio_c=config.clip_ratio_c)
        config.policy_loss.current_bounds = bounds.low.item(), bounds.high.item()
    loss, metrics = loss_fn(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


@pytest.mark.parametrize(
    "mode", ["token-mean", pytest.param("token-sum", marks=from_0_9), "seq-mean-token-sum", "seq-mean-token-mean"]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_fixed_bounds_reproduce_verls_vanilla_loss(seed, weighted, mode):
    batch = make_batch(seed, spread=1.0)
    weights = torch.rand(batch[0].shape, generator=torch.Generator().manual_seed(seed)) if weighted else None
    vanilla = with_batch_info(actor_config(PolicyLossConfig(), clip_ratio_high=0.28), rows=5, tokens=50)
    ours = with_batch_info(actor_config(BAPOPolicyLossConfig(**FIXED)), rows=5, tokens=50)
    expected = run_loss(get_policy_loss_fn("vanilla"), vanilla, batch, mode, weights)
    found = run_loss(get_policy_loss_fn("bapo"), ours, batch, mode, weights)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-8)
    for name, value in expected[2].items():
        assert found[2][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_a_call_by_another_worker_than_ours_is_refused():
    config = actor_config(BAPOPolicyLossConfig())
    with pytest.raises(ValueError, match="called without clip bounds"):
        compute_policy_loss_bapo(*make_batch(1), config=config)


def test_a_config_that_cannot_be_used_is_refused():
    with pytest.raises(ValueError, match="_target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"):
        compute_policy_loss_bapo(*make_batch(1), config=actor_config(PolicyLossConfig(loss_mode="bapo")))
    with pytest.raises(ValueError, match="loss_mode='vanilla'"):
        BAPOPolicyLossConfig(loss_mode="vanilla")
    with pytest.raises(TypeError, match="positive_contribution"):
        BAPOPolicyLossConfig(positive_contribution=0.4)
    with pytest.raises(ValueError, match="ratio_lower_max=1.2"):
        replace(BAPOPolicyLossConfig(), ratio_lower_max=1.2)


@pytest.mark.parametrize("option", ["record_dir", "token_dir"])
@pytest.mark.parametrize("config", [BAPOPolicyLossConfig, MonitorConfig])
def test_a_relative_folder_is_refused(config, option):
    with pytest.raises(ValueError, match=f"{option}='runs/mine': name a folder by its absolute path"):
        config(**{option: "runs/mine"})


@from_0_9
def test_importing_verl_imports_nothing_of_ours_but_the_gate_of_the_cpu_platform():
    code = "import sys, verl; print(sorted(m for m in sys.modules if m.split('.')[0] in ('recipe', 'bapo')))"
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    expected = ["recipe", "recipe.bapo", "recipe.bapo.verl_patches", "recipe.bapo.verl_patches.cpu"]
    assert done.stdout.splitlines()[-1] == str(expected), done.stderr[-2000:]


@from_0_9
def test_the_cpu_platform_keeps_a_variable_that_is_set():
    """Ray sets them in its workers, where the config may have changed one."""
    code = "import os, verl; print([os.environ[name] for name in ('VLLM_CPU_KVCACHE_SPACE', 'TQ_NUM_THREADS')])"
    environment = {name: value for name, value in os.environ.items() if name != "TQ_NUM_THREADS"}
    environment |= {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "['4', '1']", done.stderr[-2000:]


SP = dict(ulysses_sequence_parallel_size=2)
NORM = "seq-mean-token-sum-norm"


@pytest.mark.parametrize(
    "scope, changes, attention, field",
    [
        ("micro_batch", MEGATRON, {}, "bound_scope=micro_batch"),
        ("mini_batch", MEGATRON, {}, None),
        ("mini_batch", {"strategy": "megatron"}, {}, "model_engine=megatron"),
        ("mini_batch", MEGATRON | {"megatron": DYNAMIC}, {}, "megatron.dynamic_context_parallel=true"),
        ("mini_batch", {"strategy": "veomni"}, {}, "strategy=veomni"),
        ("mini_batch", {"strategy": "remote"}, {}, "strategy=remote"),
        ("mini_batch", {"strategy": "fsdp"}, {}, None),
        ("micro_batch", SP, {"attn_implementation": "sdpa"}, "ulysses_sequence_parallel_size=2"),
        ("mini_batch", SP, {"attn_implementation": None}, "attn_implementation=None"),
        ("mini_batch", SP, {}, None),
        ("micro_batch", {"loss_agg_mode": NORM}, {}, "loss_scale_factor=null"),
        ("micro_batch", {"loss_agg_mode": NORM, "loss_scale_factor": 1024}, {}, None),
        ("micro_batch", {"clip_ratio_c": 1.0}, {}, "clip_ratio_c=1.0"),
    ],
)
def test_settings_under_which_bounds_would_be_wrong_are_refused(scope, changes, attention, field):
    defaults = dict(strategy="fsdp2", clip_ratio_c=3.0, loss_agg_mode="token-mean", loss_scale_factor=None)
    parallel = changes.get("ulysses_sequence_parallel_size", 1)
    settings = SimpleNamespace(
        engine=SimpleNamespace(ulysses_sequence_parallel_size=parallel),
        policy_loss=BAPOPolicyLossConfig(bound_scope=scope),
        **defaults | changes,
    )
    model = SimpleNamespace(override_config=attention)
    with nullcontext() if field is None else pytest.raises(ValueError, match=field):
        refuse_unusable_settings(settings, model)
