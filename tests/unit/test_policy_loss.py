# SPDX-License-Identifier: Apache-2.0
"""The loss registered in verl: verl's own loss at fixed bounds, what it refuses, its metrics and its host reads."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.batches import make_batch
from support.golden import CASES, authors_config, golden_batch, golden_gradient
from support.metrics import METRICS

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, DumpConfig, compute_policy_loss_bapo
from recipe.bapo.worker import BAPOTrainingWorker, refuse_unusable_settings
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

FIXED = dict(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.28, ratio_upper_max=1.28)


def actor_config(policy_loss, **changes):
    return FSDPActorConfig(
        strategy=changes.pop("strategy", "fsdp2"),
        rollout_n=8,
        ppo_mini_batch_size=16,
        ppo_micro_batch_size_per_gpu=changes.pop("micro", 4),
        policy_loss=policy_loss,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        **changes,
    )


def with_batch_info(config, rows, dp_size=1, tokens=None):
    config.global_batch_info.update(
        dp_size=dp_size, batch_num_tokens=tokens, global_batch_size=rows * dp_size, loss_scale_factor=None
    )
    return config


def run_loss(loss_fn, config, batch, mode="token-mean", weights=None):
    """Loss, gradient and metrics of a micro-batch, with its own bounds where the config is ours."""
    old, log_prob, advantages, mask = batch
    log_prob = log_prob.clone().requires_grad_()
    if isinstance(config.policy_loss, BAPOConfig):
        config.policy_loss.current_bounds = find_clip_bounds(
            *batch, config.policy_loss, clip_ratio_c=config.clip_ratio_c
        )
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


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_fixed_bounds_reproduce_verls_vanilla_loss(seed, weighted, mode):
    batch = make_batch(seed, spread=1.0)
    weights = torch.rand(batch[0].shape) if weighted else None
    vanilla = with_batch_info(actor_config(PolicyLossConfig()), rows=5, tokens=50)
    ours = with_batch_info(actor_config(BAPOPolicyLossConfig(**FIXED)), rows=5, tokens=50)
    expected = run_loss(get_policy_loss_fn("vanilla"), vanilla, batch, mode, weights)
    found = run_loss(get_policy_loss_fn("bapo"), ours, batch, mode, weights)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-8)
    for name, value in expected[2].items():
        assert found[2][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_the_registered_loss_with_the_authors_config_gives_the_authors_figures(case):
    config = actor_config(BAPOPolicyLossConfig(**vars(authors_config(case))), clip_ratio_c=case["clip_ratio_c"])
    loss, gradient, metrics = run_loss(get_policy_loss_fn("bapo"), config, golden_batch(case))
    assert metrics["actor/bapo/clip_low"] == pytest.approx(case["clip_low"], abs=1e-6)
    assert metrics["actor/bapo/clip_high"] == pytest.approx(case["clip_high"], abs=1e-6)
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient, golden_gradient(case), rtol=1e-5, atol=1e-7)


def test_the_metrics():
    config = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=5)
    assert set(run_loss(compute_policy_loss_bapo, config, make_batch(1))[2]) == METRICS


def test_how_the_target_was_met():
    # make_batch(1) has some rho between these targets: at once, with moved bounds (the step itself), never.
    start = run_loss(compute_policy_loss_bapo, of_target(0.5), make_batch(1))[2][
        "actor/bapo/positive_contribution_start"
    ]
    ways = {}
    for target in (start - 0.01, start + 0.001, 0.99):
        metrics = run_loss(compute_policy_loss_bapo, of_target(target), make_batch(1))[2]
        ways[target] = [metrics[f"actor/bapo/{name}"] for name in ("met_at_once", "saturated")]
    assert list(ways.values()) == [[1, 0], [0, 0], [0, 1]]


def of_target(target):
    return with_batch_info(actor_config(BAPOPolicyLossConfig(positive_contribution_target=target)), rows=5)


def test_a_call_by_another_worker_than_ours_is_refused():
    config = actor_config(BAPOPolicyLossConfig())
    with pytest.raises(ValueError, match="BAPOTrainingWorker finds them, and another worker trains here"):
        compute_policy_loss_bapo(*make_batch(1), config=config)


def test_a_loss_that_would_depend_on_the_padded_width_is_refused():
    policy_loss = BAPOPolicyLossConfig(bound_scope="micro_batch")
    config = actor_config(policy_loss, loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="loss_scale_factor"):
        run_loss(compute_policy_loss_bapo, config, make_batch(1), "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    "rows, dp_size, refused", [(5, 1, False), (10, 1, True), (5, 2, True)], ids=["whole", "a part", "two ranks"]
)
def test_the_padded_width_may_divide_where_one_micro_batch_on_one_rank_is_all(rows, dp_size, refused):
    # On two ranks each share of the mini-batch has a width of its own, though each is one micro-batch.
    config = actor_config(BAPOPolicyLossConfig(bound_scope="micro_batch"), loss_agg_mode="seq-mean-token-sum-norm")
    config = with_batch_info(config, rows=rows, dp_size=dp_size)
    if not refused:
        run_loss(compute_policy_loss_bapo, config, make_batch(1), "seq-mean-token-sum-norm")
        return
    with pytest.raises(ValueError, match="loss_scale_factor"):
        run_loss(compute_policy_loss_bapo, config, make_batch(1), "seq-mean-token-sum-norm")


def test_a_config_of_another_loss_is_refused():
    with pytest.raises(ValueError, match="_target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"):
        compute_policy_loss_bapo(*make_batch(1), config=actor_config(PolicyLossConfig(loss_mode="bapo")))
    with pytest.raises(ValueError, match="loss_mode='vanilla'"):
        BAPOPolicyLossConfig(loss_mode="vanilla")
    with pytest.raises(TypeError, match="positive_contribution"):
        BAPOPolicyLossConfig(positive_contribution=0.4)
    with pytest.raises(ValueError, match="ratio_lower_max=1.2 is not usable"):
        replace(BAPOPolicyLossConfig(), ratio_lower_max=1.2)


def test_non_finite_input_is_an_error_of_the_loss():
    batch = make_batch(1, masked=0)
    batch[2][0, 0] = float("inf")
    config = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=5)
    with pytest.raises(ValueError, match="1 in advantages"):
        run_loss(compute_policy_loss_bapo, config, batch)


def test_the_loss_clips_with_the_bounds_that_the_worker_left_in_its_config():
    config, batch = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=10), make_batch(1)
    config.policy_loss.current_bounds = find_clip_bounds(*batch, BAPOConfig(**FIXED))
    metrics = compute_policy_loss_bapo(*batch, config=config)[1]
    assert metrics["actor/bapo/clip_low"] == 0.8 and metrics["actor/bapo/clip_high"] == 1.28


def test_a_config_of_ours_has_verl_make_our_worker(monkeypatch, tmp_path):
    for make in (BAPOPolicyLossConfig, lambda: DumpConfig(token_dump_dir=str(tmp_path))):
        monkeypatch.setattr(ActorRolloutRefWorker, "actor_worker_cls", TrainingWorker)
        make()
        assert ActorRolloutRefWorker.actor_worker_cls is BAPOTrainingWorker is DetachActorWorker.actor_worker_cls


def test_a_worker_with_a_training_worker_of_its_own_is_named():
    # In a process of its own: Python forgets no subclass.
    code = (
        "from verl.workers import engine_workers_tinker; from recipe.bapo.policy_loss import *; BAPOPolicyLossConfig()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TypeError: TinkerActorRolloutRefWorker trains with a worker of its own" in done.stderr
    assert "actor_worker_cls=TinkerTrainingWorker" in done.stderr


def test_importing_verl_imports_nothing_of_ours_but_the_gate_of_the_cpu_platform():
    code = "import sys, verl; print(sorted(m for m in sys.modules if m.split('.')[0] in ('recipe', 'bapo')))"
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "['recipe', 'recipe.bapo', 'recipe.bapo.cpu']", done.stderr[-2000:]


USABLE = SimpleNamespace(override_config={}, enable_activation_offload=False)


@pytest.mark.parametrize("scope", ["mini_batch", "micro_batch"])
@pytest.mark.parametrize(
    "actor, model, message",
    [
        ({"strategy": "megatron"}, {}, "actor.strategy=megatron is not usable .*: set it to fsdp or fsdp2"),
        ({"strategy": "veomni"}, {}, "actor.strategy=veomni is not usable .*: set it to fsdp or fsdp2"),
        (
            {"ulysses": 2},
            {"override_config": {"attn_implementation": "sdpa"}},
            "ulysses_sequence_parallel_size=2 is not usable with attn_implementation=sdpa: .* or set it to 1",
        ),
        ({"ulysses": 2}, {}, None),
        ({"strategy": "fsdp"}, {}, None),
    ],
)
def test_settings_under_which_bounds_would_be_wrong_are_refused(scope, actor, model, message):
    settings = SimpleNamespace(
        strategy=actor.get("strategy", "fsdp2"),
        engine=SimpleNamespace(ulysses_sequence_parallel_size=actor.get("ulysses", 1)),
        policy_loss=BAPOPolicyLossConfig(bound_scope=scope),
    )
    model = SimpleNamespace(**{**vars(USABLE), **model})
    if message is None:
        refuse_unusable_settings(settings, model)
        return
    with pytest.raises(ValueError, match=message):
        refuse_unusable_settings(settings, model)


@pytest.mark.parametrize("scope, refused", [("mini_batch", True), ("micro_batch", False)])
def test_activation_offload_is_refused_where_the_search_makes_a_forward_without_a_backward(scope, refused):
    settings = actor_config(BAPOPolicyLossConfig(bound_scope=scope))
    model = SimpleNamespace(override_config={}, enable_activation_offload=True)
    if not refused:
        refuse_unusable_settings(settings, model)
        return
    with pytest.raises(ValueError, match="enable_activation_offload=true is not usable .*: .* Set it to false"):
        refuse_unusable_settings(settings, model)


def test_a_dump_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="policy_loss.token_dump_dir is not set"):
        DumpConfig()


def step_of(**changes):
    """The search's metrics of a rollout batch of two updates, as verl's ``train_mini_batch`` gives them."""
    values = {name: 0.0 for name in METRICS} | {"actor/pg_clipfrac": 0.1} | changes
    return {name: [value, value] for name, value in values.items()}


@pytest.mark.parametrize(
    "step, text",
    [
        (step_of(**{"actor/bapo/met_at_once": 1.0}), "the target was already met"),
        (step_of(**{"actor/bapo/saturated": 1.0, "actor/bapo/search_steps": 51.0}), "the target was out of reach"),
        (step_of(), None),
    ],
)
def test_a_target_that_does_nothing_reaches_the_workers_log_once_in_ten_rollout_batches(step, text, caplog):
    worker = object.__new__(BAPOTrainingWorker)
    worker.bapo_config, worker.recent_batches = BAPOConfig(), []
    warned = []
    for number in range(25):
        worker._warn(step)
        warned += [number for record in caplog.records if text and text in record.getMessage()]
        caplog.clear()
    assert warned == ([] if text is None else [9, 19])
