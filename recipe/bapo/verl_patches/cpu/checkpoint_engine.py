# SPDX-License-Identifier: Apache-2.0
"""Send weights from the trainer to the rollout servers without a GPU: a checkpoint engine for verl, named ``gloo``.

``separate_async`` refuses verl's ``naive`` engine, and verl's other engines need a GPU or special hardware.
"""

import asyncio
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore, broadcast_object_list

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

TIMEOUT = timedelta(seconds=60)  # for joining the group, and for one transfer


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts one tensor after another from the actor's first rank to all rollout workers.

    Each transfer uses a new process group.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.is_master = is_master
        self.store: TCPStore | None = None
        self.group: ProcessGroupGloo | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the address of the master's store. The other ranks return an empty dict."""
        if not self.is_master:
            return {}
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"host": address, "port": self.store.port}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        """Number the ranks of the group: 0 for the actor's first rank, then the rollout workers.

        The actor's other ranks do not join; they get -1.
        """
        size = 1 + rollout_world_size
        actor_ranks = [0, *[-1] * (actor_wg_world_size - 1)]
        rollout_ranks = list(range(1, size))
        return tuple(
            {"rank": ranks, "size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}
            for ranks in (actor_ranks, rollout_ranks)
        )

    def init_process_group(self, **kwargs):
        """Join the process group of one transfer, with the arguments ``rank``, ``size`` and ``master`` of this rank."""
        if kwargs["rank"] < 0:
            return
        if self.store is None:
            master = kwargs["master"]
            self.store = TCPStore(master["host"], master["port"], is_master=False, timeout=TIMEOUT)
        self.group = ProcessGroupGloo(self.store, kwargs["rank"], kwargs["size"], TIMEOUT)

    def finalize(self):
        """Leave the group."""
        self.group = self.store = None

    async def send_weights(self, weights, global_steps=None):
        """Broadcast each weight with its name, and None after the last one."""
        # Ranks outside the group iterate too, because gathering a weight needs every rank of the actor.
        async for name, weight in ensure_async_iterator(weights):
            if self.group is not None:
                await self._broadcast((name, weight.detach().cpu().clone()))
        if self.group is not None:
            await self._broadcast(None)

    async def receive_weights(self, global_steps=None):
        """Yield each ``(name, weight)`` when it arrives."""
        while item := await self._broadcast(None):
            yield item

    async def _broadcast(self, item):
        """Broadcast the master's item and return it on every rank."""
        items = [item]
        # This blocks, so it runs in a thread: the worker's event loop has to stay free to hand on what has arrived.
        await asyncio.to_thread(broadcast_object_list, items, group=self.group, group_src=0, device=torch.device("cpu"))
        return items[0]
