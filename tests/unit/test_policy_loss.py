# SPDX-License-Identifier: Apache-2.0
"""The loss registered in verl: verl's own loss at fixed bounds, what it refuses, its metrics and its host reads."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.batches import make_batch
from support.golden import CASES, authors_config, golden_batch, golden_gradient
from support.metrics import METRICS

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, DumpConfig, bounds_from, compute_policy_loss_bapo
from recipe.bapo.records.tokens import TENSORS, about_dump, read_dump
from recipe.bapo.replay import switches_of
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

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
    old, log_prob, advantages, mask = batch
    log_prob = log_prob.clone().requires_grad_()
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


def test_the_metrics_have_the_same_keys_on_every_path():
    batch = make_batch(1)
    config = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=5)
    assert set(run_loss(compute_policy_loss_bapo, config, batch)[2]) == METRICS
    found = find_clip_bounds(*batch, config.policy_loss, clip_ratio_c=3.0)
    with bounds_from(lambda *tensors: found):
        given = run_loss(compute_policy_loss_bapo, config, batch)
    found = run_loss(compute_policy_loss_bapo, config, batch)
    assert given[2] == found[2] and torch.equal(given[1], found[1]) and torch.equal(given[0], found[0])


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


def test_a_part_of_the_mini_batch_is_refused_without_our_worker():
    config = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=10)
    with pytest.raises(ValueError) as error:
        run_loss(compute_policy_loss_bapo, config, make_batch(1))
    for name in ("ppo_micro_batch_size_per_gpu=4", "main_bapo", "bound_scope=micro_batch"):
        assert name in str(error.value)


def test_an_unknown_mini_batch_is_refused():
    config = actor_config(BAPOPolicyLossConfig())
    with pytest.raises(ValueError, match="needs the whole mini-batch"):
        run_loss(compute_policy_loss_bapo, config, make_batch(1))


def test_micro_batch_scope_needs_nothing():
    config = actor_config(BAPOPolicyLossConfig(bound_scope="micro_batch"))
    assert set(run_loss(compute_policy_loss_bapo, config, make_batch(1))[2]) == METRICS


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


@pytest.mark.parametrize("strategy", ["megatron", "veomni", "torchtitan"])
@pytest.mark.parametrize("scope", ["mini_batch", "micro_batch"])
def test_a_strategy_whose_search_could_hang_is_refused_without_our_worker(strategy, scope):
    config = actor_config(BAPOPolicyLossConfig(bound_scope=scope), strategy=strategy)
    with pytest.raises(
        ValueError, match=f"strategy={strategy} is not usable .*: set it to fsdp or fsdp2, for which it is written"
    ):
        run_loss(compute_policy_loss_bapo, with_batch_info(config, rows=5), make_batch(1))


def test_a_config_of_another_loss_is_refused():
    with pytest.raises(ValueError, match="_target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"):
        run_loss(compute_policy_loss_bapo, actor_config(PolicyLossConfig(loss_mode="bapo")), make_batch(1))
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


def test_the_loss_takes_its_bounds_from_the_finder_while_it_is_set():
    config, batch = with_batch_info(actor_config(BAPOPolicyLossConfig()), rows=10), make_batch(1)
    fixed, seen = find_clip_bounds(*batch, BAPOConfig(**FIXED)), []

    def find(*tensors):
        seen.append(tensors)
        return fixed

    with pytest.raises(RuntimeError), bounds_from(find):
        metrics = run_loss(get_policy_loss_fn("bapo"), config, batch)[2]
        raise RuntimeError
    assert metrics["actor/bapo/clip_low"] == 0.8 and metrics["actor/bapo/clip_high"] == 1.28
    assert [torch.equal(*pair) for pair in zip(seen[0], batch, strict=True)] == [True] * 4
    with pytest.raises(ValueError, match="needs the whole mini-batch"):  # the finder is gone, after an error too
        run_loss(compute_policy_loss_bapo, config, batch)


@pytest.mark.parametrize("module", ["policy_loss", "trainer"])
def test_the_plugin_is_loaded_whatever_is_imported_first(module):
    # Importing ours imports verl, which imports the plugin, which imports ours; verl swallows what goes wrong there.
    code = f"import sys, recipe.bapo.{module}; sys.exit('recipe.bapo.plugin' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "loss, low, bounds", [("vanilla", 0.2, (0.8, 1.28)), ("vanilla", 0.0, None), ("gspo", 0.2, None)]
)
def test_a_loss_of_verls_is_dumped_and_left_as_it_is(tmp_path, loss, low, bounds):
    batch = make_batch(3)
    settings = dict(rows=5, tokens=batch[3].sum())
    plain = with_batch_info(replace(actor_config(PolicyLossConfig()), clip_ratio_low=low), **settings)
    expected = run_loss(get_policy_loss_fn(loss), plain, batch)
    dumping = DumpConfig(dumped_loss=loss, token_dump_dir=str(tmp_path))
    config = with_batch_info(replace(actor_config(dumping), clip_ratio_low=low), **settings)
    found = run_loss(get_policy_loss_fn("dump"), config, batch)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2] == expected[2]

    ((tokens,),) = read_dump(tmp_path)
    assert all(torch.equal(tokens[name], tensor[batch[3]]) for name, tensor in zip(TENSORS, batch, strict=False))
    switches = switches_of(about_dump(tmp_path))
    assert (switches and (switches.ratio_lower_max, switches.ratio_upper_start)) == bounds


def test_a_dump_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="policy_loss.token_dump_dir is not set"):
        DumpConfig()
