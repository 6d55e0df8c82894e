# SPDX-License-Identifier: Apache-2.0
"""What an update costs besides arithmetic: host reads and memory."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from support.actor import actor_config
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_and_validate
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, compute_policy_loss_bapo
from tests.benchmark.loss import find_bounds_for, make_batch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import PolicyLossConfig

HOST_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")


@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_and_the_loss_never_read_the_host(contribution, dtype):
    # Fake tensors have no values, so whatever needs one on the host, such as item() or a boolean mask, raises.
    with FakeTensorMode(allow_non_fake_inputs=False):
        old, log_prob, advantages, mask = (
            torch.empty(4, 1000, dtype=kind) for kind in (dtype, dtype, dtype, torch.bool)
        )
        config = BAPOConfig(contribution=contribution)
        bounds, diagnostics = find_clip_bounds(old, log_prob, advantages, mask, config, clip_ratio_c=3.0)
        leaf, weights = log_prob.detach().requires_grad_(), torch.ones_like(old)
        loss = clipped_surrogate_loss(old, leaf, advantages, mask, bounds.low, bounds.high, 3.0, weights).loss
        loss.backward()
        with pytest.raises(DataDependentOutputException, match="aten._local_scalar_dense"):
            read_and_validate(bounds, diagnostics)


def update(loss_fn, policy_loss, batch):
    """Compute bounds, loss and gradient of a batch with the signature of verl's losses."""
    old, log_prob, advantages, mask = batch
    leaf = log_prob.detach().requires_grad_()
    find_bounds_for(policy_loss, batch)
    loss_fn(old, leaf, advantages, mask, "token-mean", actor_config(policy_loss))[0].backward()


LOSSES = {
    "vanilla": (compute_policy_loss_vanilla, PolicyLossConfig()),
    "bapo": (compute_policy_loss_bapo, BAPOPolicyLossConfig()),
}


def test_an_update_costs_two_host_reads():
    batch, reads = make_batch(4, 100, torch.float32, "cpu"), mock.Mock(return_value=None)

    def count_calls(function):
        return lambda *args, **kwargs: reads() or function(*args, **kwargs)

    with ExitStack() as patches:
        for name in HOST_READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, count_calls(getattr(torch.Tensor, name))))
        update(*LOSSES["bapo"], batch)
    assert reads.call_count == 2


def peak_of(call, batch):
    """Measure the peak bytes of the batch and of the tensors that a call makes."""
    tracker = MemTracker()
    tracker.track_external(*batch)
    with tracker:
        call()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_the_memory_beyond_the_inputs():
    batch = make_batch(128, 4096, torch.float32, "cpu")
    search = peak_of(lambda: find_clip_bounds(*batch, BAPOConfig(), clip_ratio_c=3.0), batch)
    assert 0 < search - sum(tensor.nbytes for tensor in batch) <= 2 * batch[0].nbytes
    vanilla, bapo = (peak_of(lambda of=of: update(*of, batch), batch) for of in LOSSES.values())
    assert bapo <= vanilla
