# SPDX-License-Identifier: Apache-2.0
"""Weights from the trainer to rollout servers on other devices, without a GPU: verl's checkpoint engine ``gloo``.

``separate_async`` refuses verl's ``naive`` engine, and the others need a GPU or special hardware.
"""

import asyncio
from datetime import timedelta

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore, broadcast_object_list

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

TIMEOUT = timedelta(seconds=60)  # of joining the group, and of one transfer


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """The actor's first rank broadcasts tensor after tensor to all rollout workers; a new group for each transfer."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.is_master = is_master
        self.store = None
        self.group = None

    def prepare(self) -> tuple[str, int] | None:
        """The address at which the others meet the master; None from everybody else."""
        if not self.is_master:
            return None
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return address, self.store.port

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        """Rank 0 is the master, the rollout workers follow; the actor's other ranks stay out (-1)."""
        size = 1 + rollout_world_size
        actor_ranks = [0, *[-1] * (actor_wg_world_size - 1)]
        rollout_ranks = list(range(1, size))
        return tuple(
            {"rank": ranks, "size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}
            for ranks in (actor_ranks, rollout_ranks)
        )

    def init_process_group(self, rank: int, size: int, master: tuple[str, int]):
        """Join the group of one transfer."""
        if rank < 0:
            return
        if not self.is_master:
            self.store = TCPStore(*master, is_master=False, timeout=TIMEOUT)
        self.group = ProcessGroupGloo(self.store, rank, size, TIMEOUT)

    def finalize(self):
        """Leave the group."""
        self.group = self.store = None

    async def send_weights(self, weights, global_steps=None):
        """Broadcast each weight with its name, and None behind the last one."""
        async for name, weight in ensure_async_iterator(weights):  # gathering a weight needs every rank of the actor
            if self.group is not None:
                await self._broadcast((name, weight.detach().cpu().clone()))
        if self.group is not None:
            await self._broadcast(None)

    async def receive_weights(self, global_steps=None):
        """Yield ``(name, weight)`` as they arrive."""
        while item := await self._broadcast(None):
            yield item

    async def _broadcast(self, item):
        """The master's item, on every rank."""
        items = [item]
        # In a thread: the worker's event loop must stay free to pass on what has arrived.
        await asyncio.to_thread(broadcast_object_list, items, group=self.group, group_src=0, device=torch.device("cpu"))
        return items[0]
