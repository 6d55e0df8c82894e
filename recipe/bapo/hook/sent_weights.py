# SPDX-License-Identifier: Apache-2.0
"""Which weights verl takes out of the training engine to send them to the rollout servers, and when."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from recipe.bapo.hook.tell import Guard

# The methods by which verl's ``ActorRolloutRefWorker.update_weights`` takes the weights out of the engine.
SENDING = ("get_per_tensor_param", "get_per_tensor_param_delta_shard")


class SentWeights:
    """Notes when weights are sent, and whether a LoRA adapter that trains is among them.

    It replaces verl's methods on one engine by others that call them and look at the names of what they give. The
    tensors pass through as they are, one at a time and only as they are asked for.

    Args:
        engine: verl's training engine.
        model_config: verl's ``HFModelConfig``.
    """

    def __init__(self, engine: Any, model_config: Any):
        self.guard = Guard()
        self._sent = True  # before the first call every trainer sends
        self._calls = 0  # of ``begin_call``
        # What was sent since the latest call: whether all of it was taken, and by name, and whether some was LoRA's.
        self._complete, self._named, self._of_adapter = False, True, False
        self.trains_adapter = False
        with self.guard("looking at the model's adapter"):
            self.trains_adapter = trains_adapter(model_config)
        wrapped = [name for name in SENDING if hasattr(engine, name)]
        self._knows = bool(wrapped)
        for name in wrapped:
            setattr(engine, name, self._watched(getattr(engine, name)))

    def begin_call(self) -> bool:
        """Begin a call of the trainer. Returns whether weights were sent since the call before.

        On an engine without verl's methods it returns True, because most trainers send before every call.
        """
        sent, self._sent = self._sent, not self._knows
        # All that is sent between two calls counts together, since verl may send base weights and adapter apart.
        if self._calls and self.trains_adapter and self._complete and self._named and not self._of_adapter:
            self.guard.tell_once(
                "adapter",
                "this run trains a LoRA adapter, but none of its weights were among those that verl sent to the "
                "rollout servers after the last update: the servers sample from the model without it. Stop the run; "
                "python -m recipe.bapo.preflight with its arguments names the fix (docs/silent_faults.md).",
            )
        self._calls += 1
        self._complete, self._named, self._of_adapter = False, True, False
        return sent

    def _watched(self, take_weights: Callable) -> Callable:
        """Wrap one of verl's methods, which returns the weights, as pairs of name and tensor, and something else."""

        @wraps(take_weights)
        def take_and_note(*args: Any, **kwargs: Any) -> Any:
            self._sent = True
            taken = take_weights(*args, **kwargs)
            if not (self.trains_adapter and isinstance(taken, tuple) and taken):
                return taken
            return self._pass_on(taken[0]), *taken[1:]

        return take_and_note

    def _pass_on(self, weights: Iterable) -> Iterator:
        for item in weights:
            name = item[0] if isinstance(item, tuple) and item else None
            self._named = self._named and isinstance(name, str)  # the delta engine sends other items
            self._of_adapter = self._of_adapter or (isinstance(name, str) and "lora_" in name)
            yield item
        self._complete = True


def trains_adapter(model_config: Any) -> bool:
    """Whether a run trains a LoRA adapter that verl sends as such, and not merged into the model's weights.

    Args:
        model_config: verl's ``HFModelConfig``. FSDP reads ``lora_rank``, Megatron ``lora.rank``; verl ignores
            ``lora_adapter_path`` without a rank.
    """
    lora = getattr(model_config, "lora", None) or {}
    return max(getattr(model_config, "lora_rank", 0), lora.get("rank", 0)) > 0 and not lora.get("merge", False)
