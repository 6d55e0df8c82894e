# SPDX-License-Identifier: Apache-2.0
"""What a forward or backward pass of verl's engine changes beside the gradients, saved to make the pass again."""

import sys
from typing import Any

import torch

from verl.utils.device import get_device_name, get_torch_device
from verl.workers.engine.base import BaseEngine


def can_be_restored(engine: BaseEngine) -> bool:
    """Whether nothing is known that a pass changes and ``EngineState`` misses.

    It misses FP8 in Megatron, where TransformerEngine keeps a history of scales outside the buffers, and Megatron's
    random generators for CUDA graphs, whose states are the generators themselves and no copies.
    """
    config = getattr(engine, "tf_config", None)  # Megatron's
    states = _megatron_tracker().get_states().values() if _has_megatron() else ()
    return getattr(config, "fp8", None) is None and not any(isinstance(state, torch.Generator) for state in states)


class EngineState:
    """The random generators and the model's buffers at the time when this object was made.

    The buffers hold, for example, the router's bias and token counts of Megatron's experts, which
    ``forward_backward_batch`` updates. A buffer that a forward replaces by another tensor stays replaced, and the
    generators of Python and NumPy are not covered.
    """

    def __init__(self, engine: BaseEngine):
        module: Any = getattr(engine, "module")  # noqa: B009  BaseEngine does not declare it
        modules = module if isinstance(module, list | torch.nn.ModuleList) else [module]  # Megatron has a list
        # Not ``buffers()``, because Megatron's DDP has another attribute of this name.
        buffers = [buffer for module in modules for _, buffer in module.named_buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._cpu_generator = torch.get_rng_state()
        self._device_generator = None if get_device_name() == "cpu" else get_torch_device().get_rng_state()
        self._megatron_generators = _megatron_tracker().get_states() if _has_megatron() else {}

    @torch.no_grad()
    def restore(self) -> None:
        """Set generators and buffers back."""
        for buffer, saved in self._buffers:
            buffer.copy_(saved)
        torch.set_rng_state(self._cpu_generator)
        if self._device_generator is not None:
            get_torch_device().set_rng_state(self._device_generator)
        if self._megatron_generators:
            _megatron_tracker().set_states(dict(self._megatron_generators))  # Megatron puts new states into it


MEGATRON_RANDOM = "megatron.core.tensor_parallel.random"


def _has_megatron() -> bool:
    return MEGATRON_RANDOM in sys.modules


def _megatron_tracker():
    """Return Megatron's random generators, from which dropout draws in tensor-parallel regions."""
    return sys.modules[MEGATRON_RANDOM].get_cuda_rng_tracker()
