# SPDX-License-Identifier: Apache-2.0
"""What a call costs besides arithmetic: peak memory, collectives and reads by the host."""

from contextlib import contextmanager
from unittest import mock
from weakref import finalize

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")


class PeakMemory(TorchDispatchMode):
    """Peak bytes of the tensors made inside, on any device."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf.untyped_storage(), known)
        return result

    def add(self, storage, known):
        key = storage._cdata
        if key in known or key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.live -= size


@contextmanager
def counted():
    """Counts our collectives and the reads by the host inside."""
    counts = {"collectives": 0, "host_reads": 0}

    def wrap(function, name):
        def counting(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counting

    patches = [mock.patch.object(dist, "all_reduce", wrap(dist.all_reduce, "collectives"))]
    patches += [
        mock.patch.object(torch.Tensor, name, wrap(getattr(torch.Tensor, name), "host_reads")) for name in HOST_READS
    ]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()
