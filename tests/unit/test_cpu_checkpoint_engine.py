# SPDX-License-Identifier: Apache-2.0
"""Weights over gloo: two rollout workers receive, bit for bit, what two actor ranks send."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.commands import LIMIT

from recipe.bapo.verl_patches.cpu import checkpoint_engine
from verl.checkpoint_engine.base import CheckpointEngineRegistry

WEIGHTS = {
    "embedding": torch.randn(50, 8, generator=torch.Generator().manual_seed(1)),
    "norm": torch.randn(8, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "transposed": torch.arange(12.0).view(3, 4).T,
    "scalar": torch.tensor(3.5),
}


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """Meet on the loopback interface, whatever network this machine has and however busy it is."""
    monkeypatch.setattr(checkpoint_engine.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(checkpoint_engine, "TIMEOUT", timedelta(seconds=LIMIT))


def transfer(engines):
    """Make one weight update as verl's manager does. Returns the weights that each rollout worker received."""
    metadata = [engine.prepare() for engine in engines]
    actors, rollouts = type(engines[0]).build_topology(2, 2, metadata)

    async def receive(engine):
        return {name: weight async for name, weight in engine.receive_weights(global_steps=1)}

    def run(index):
        arguments, i = (actors, index) if index < 2 else (rollouts, index - 2)
        engines[index].init_process_group(**{key: values[i] for key, values in arguments.items()})
        if index < 2:
            return asyncio.run(engines[index].send_weights(iter(WEIGHTS.items()), global_steps=1))
        return asyncio.run(receive(engines[index]))

    with ThreadPoolExecutor(4) as pool:
        received = list(pool.map(run, range(4)))[2:]
    for engine in engines:
        engine.finalize()
    return received


def test_weights_arrive_bit_for_bit_time_after_time():
    engines = [CheckpointEngineRegistry.new("gloo", bucket_size=1 << 20, is_master=i == 0) for i in range(4)]
    for _ in range(2):
        for received in transfer(engines):
            assert received.keys() == WEIGHTS.keys()
            for name, weight in WEIGHTS.items():
                assert received[name].dtype == weight.dtype and torch.equal(received[name], weight)


def test_a_missing_receiver_ends_in_an_error(monkeypatch):
    engine = CheckpointEngineRegistry.new("gloo", bucket_size=1 << 20, is_master=True)
    master = engine.prepare()
    monkeypatch.setattr(checkpoint_engine, "TIMEOUT", timedelta(seconds=0.1))  # only now, because the store is up
    with pytest.raises(RuntimeError):
        engine.init_process_group(rank=0, size=2, master=master)
