# SPDX-License-Identifier: Apache-2.0
"""What an update costs besides arithmetic: collectives and reads by the host, counted; and memory."""

import re

import pytest
import torch
from support.actor import actor_config
from support.costs import PeakMemory, counted
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_values
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, compute_policy_loss_bapo
from scripts.benchmark.loss import find_bounds_for, make_batch, measure_all, table
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import PolicyLossConfig

CONFIGS = [
    BAPOConfig(contribution=kind, search_order=order)
    for kind in ("value", "gradient")
    for order in ("upper_first", "lower_first")
]


def search_and_loss(old, log_prob, advantages, mask, config):
    bounds, diagnostics = find_clip_bounds(old, log_prob, advantages, mask, config, clip_ratio_c=3.0)
    leaf = log_prob.detach().requires_grad_()
    loss = clipped_surrogate_loss(old, leaf, advantages, mask, bounds.low, bounds.high, 3.0, torch.ones_like(old)).loss
    loss.backward()
    return bounds, diagnostics, loss


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_and_the_loss_never_read_the_host(config, dtype):
    # Fake tensors have no values: whatever needs one on the host, such as item() or a boolean mask, raises.
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        batch = [torch.empty(4, 1000, dtype=kind) for kind in (dtype, dtype, dtype, torch.bool)]
        bounds, diagnostics, loss = search_and_loss(*batch, config)
        assert all(value.fake_mode is mode for found in (bounds, diagnostics) for value in vars(found).values())
        for read in (
            loss.item,
            lambda: read_values(bounds, diagnostics),
            lambda: batch[0][batch[3]],
            lambda: bool(loss > 0),
        ):
            with pytest.raises((DataDependentOutputException, Exception)) as raised:
                read()
            assert "data" in str(raised.type).lower() or "dynamic" in str(raised.type).lower()


def test_a_call_costs_one_host_read_and_vanilla_three():
    batch = make_batch(4, 100, torch.float32, "cpu")
    for loss_fn, policy_loss, reads in (
        (compute_policy_loss_vanilla, PolicyLossConfig(), 3),
        (compute_policy_loss_bapo, BAPOPolicyLossConfig(), 1),
    ):
        with counted() as counts:
            find_bounds_for(policy_loss, batch)
            loss_fn(*batch, "token-mean", actor_config(policy_loss))
        assert counts == {"collectives": 0, "host_reads": reads}


def test_the_memory_beyond_the_inputs():
    batch = make_batch(128, 4096, torch.float32, "cpu")
    plane = batch[0].nbytes
    with PeakMemory() as search:
        find_clip_bounds(*batch, BAPOConfig(), clip_ratio_c=3.0)
    assert search.peak <= 2 * plane

    def peak_of(loss_fn, policy_loss):
        leaf = batch[1].detach().requires_grad_()
        with PeakMemory() as memory:
            find_bounds_for(policy_loss, batch)
            loss_fn(batch[0], leaf, *batch[2:], "token-mean", actor_config(policy_loss))[0].backward()
        return memory.peak

    vanilla = peak_of(compute_policy_loss_vanilla, PolicyLossConfig())
    assert peak_of(compute_policy_loss_bapo, BAPOPolicyLossConfig()) <= vanilla


def test_the_benchmark_compares_with_vanilla():
    threads = torch.get_num_threads()
    try:
        found = measure_all(rows=4, columns=50, repeats=1)
    finally:
        torch.set_num_threads(threads)
    lines = table(found).splitlines()
    assert lines[0].startswith("| loss | CPU, 1 thread | CPU, 2 threads |")
    assert re.match(r"\| float32: vanilla \| 1 \([\d.]+ ms\) \| 1 \([\d.]+ ms\) \|", lines[2])
    slow = {"vanilla": 10.0, "bapo, value": 12.5}
    assert "| float32: bapo, value | 1.25 |" in table({"float32": {"CPU, 1 thread": slow}})
