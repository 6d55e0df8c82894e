# SPDX-License-Identifier: Apache-2.0
"""What a forward or backward pass of verl's engine changes beside the gradients, saved to make the pass again."""

import sys

import torch

from verl.utils.device import get_device_name, get_torch_device


def can_be_restored(engine) -> bool:
    """Whether ``EngineState`` covers everything that a pass changes.

    It does not with FP8 in Megatron, where TransformerEngine keeps a history of scales outside the buffers, and where
    Megatron's random generators are shared with CUDA graphs, so that their states are no tensors.
    """
    config = getattr(engine, "tf_config", None)  # Megatron's
    return getattr(config, "fp8", None) is None and all(
        isinstance(s, torch.Tensor) for s in _megatron_states().values()
    )


class EngineState:
    """The random generators and the model's buffers at the time when this object was made.

    The buffers hold, for example, the router's bias and token counts of Megatron's experts, which
    ``forward_backward_batch`` updates. A buffer that a forward replaces by another tensor stays replaced.
    """

    def __init__(self, engine):
        modules = engine.module if isinstance(engine.module, list | torch.nn.ModuleList) else [engine.module]
        # Not ``buffers()``, because Megatron's DDP has another attribute of this name.
        buffers = [buffer for module in modules for _, buffer in module.named_buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._cpu = torch.get_rng_state()
        self._device = None if get_device_name() == "cpu" else get_torch_device().get_rng_state()
        self._megatron = {name: state.clone() for name, state in _megatron_states().items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Set everything back."""
        for buffer, saved in self._buffers:
            buffer.copy_(saved)
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            get_torch_device().set_rng_state(self._device)
        if self._megatron:
            _megatron_tracker().set_states({name: state.clone() for name, state in self._megatron.items()})


def _megatron_tracker():
    return sys.modules["megatron.core.tensor_parallel.random"].get_cuda_rng_tracker()


def _megatron_states() -> dict:
    """Return the states of Megatron's random generators; none where this process has not imported Megatron."""
    return _megatron_tracker().get_states() if "megatron.core.tensor_parallel.random" in sys.modules else {}
