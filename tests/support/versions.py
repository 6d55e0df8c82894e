# SPDX-License-Identifier: Apache-2.0
"""Run tests with other versions of verl than the one that our trainer is written for (scripts/try_verl.sh)."""

import functools
import importlib.util
import re
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

REQUIRED = re.search(r"^TAG=v(.+)$", (Path(__file__).parents[2] / "recipe/bapo/REQUIRED_VERL.txt").read_text(), re.M)[1]
ONLY_OUR_TRAINERS = f"our trainer and preflight are for verl {REQUIRED}"
# Settings of our CPU platform that need verl's platforms.
WITHOUT_PLATFORM = [
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    "~actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
]


def has_platforms():
    """Whether this verl has platforms, as from 0.9.0 on. Ours is in recipe/bapo/verl_patches/cpu."""
    return importlib.util.find_spec("verl.plugin") is not None


from_0_9 = pytest.mark.skipif(not has_platforms(), reason="verl has it from 0.9.0 on")


def is_our_trainers():
    """Whether the verl that would be imported is the version that our trainer is written for."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    return (Path(folder) / "version/version").read_text().strip() == REQUIRED


def run_on_a_cpu():
    """Replace, for the rest of the process, what a verl without platforms does with an accelerator."""
    from verl.utils import distributed
    from verl.workers import engine_workers
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils import padding

    padding.unpad_input = unpad_input  # verl takes flash-attn's
    # verl would request the backend "cpu:gloo,cpu:nccl", which torch refuses.
    join = functools.partial(distributed.initialize_global_process_group_ray, backend="gloo")
    distributed.initialize_global_process_group_ray = engine_workers.initialize_global_process_group_ray = join
    for backends in EngineRegistry._engines.values():
        for devices in backends.values():
            if "cuda" in devices:
                devices.setdefault("cpu", devices["cuda"])
    # What verl asks torch.cuda for, and torch.cpu does not have.
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *args: 0)
    torch.cpu.mem_get_info = lambda *args: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    torch.cpu.empty_cache = torch.cpu.manual_seed = torch.cpu.ipc_collect = lambda *args: None


def unpad_input(hidden_states, attention_mask):
    """Return the rows of ``(B, T, ...)`` under a mask ``(B, T)``, their indices and the offsets of the sequences."""
    indices = attention_mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(attention_mask.sum(1).cumsum(0), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets


def has_v1_trainer():
    """Whether this verl has the V1 trainer, whose batches are jagged. The trainer before it pads them."""
    return importlib.util.find_spec("verl.trainer.ppo.v1") is not None


def as_padded_batch(data):
    """Return a jagged mini-batch as ``RayPPOTrainer`` hands it to the worker: converted by verl from padded tensors."""
    from tensordict import TensorDict

    from verl.workers.utils.padding import left_right_2_no_padding

    def right(name):
        return pad_sequence(list(data[name].unbind()), batch_first=True)

    prompts, responses = list(data["prompts"].unbind()), right("responses")
    left = pad_sequence(prompts, batch_first=True, padding_side="left")
    lengths = data["response_mask"].offsets().diff()[:, None]
    attention = torch.cat(
        [
            pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left"),
            (torch.arange(responses.shape[1]) < lengths).long(),
        ],
        dim=1,
    )
    names = ("response_mask", "old_log_probs", "advantages")
    padded = TensorDict({name: right(name) for name in names}, batch_size=data.batch_size)
    padded["prompts"], padded["responses"] = left, responses
    padded["input_ids"] = torch.cat([left, responses], dim=1)
    padded["attention_mask"] = attention
    padded["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    for name, value in data.items():
        if name not in padded.keys() and name != "loss_mask":
            padded[name] = value  # settings
    return left_right_2_no_padding(padded)
