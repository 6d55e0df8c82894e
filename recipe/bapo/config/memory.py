# SPDX-License-Identifier: Apache-2.0
"""How the trainer and vLLM share the memory of a GPU, by the arithmetic of docs/larger_models.md (Memory).

AdamW's moments exist from the first update on. A share of vLLM for which there was room before may then be too large,
and vLLM fails when it wakes up for the second step.
"""

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open

GIB = 1 << 30
BESIDE = 3 * GIB // 2  # left free for the CUDA contexts of trainer and vLLM and for fragments: an assumption
SERVING = 4 * GIB  # what vLLM needs beside its weights, for activations, CUDA graphs and cache: an assumption


@dataclass(frozen=True)
class Needs:
    """Bytes of a GPU that trains and samples."""

    gpu: int  # all that can be used
    parameters: int
    shards: int  # GPUs over which FSDP divides the parameters
    kept: float  # weights and AdamW's moments, while vLLM samples
    update: float  # weights, gradients and moments, in an update
    served: float  # vLLM's weights

    @property
    def can_update(self) -> bool:
        """Whether weights, gradients and moments leave anything for activations."""
        return self.update + BESIDE <= self.gpu

    def largest_share(self) -> float | None:
        """Return the largest ``gpu_memory_utilization``, in hundredths, that fits. None if it is too small for vLLM."""
        share = math.floor(100 * (self.gpu - self.kept - BESIDE) / self.gpu) / 100
        return share if share * self.gpu >= self.served + SERVING else None


def choose_share(wanted: float, *, _root_) -> float:
    """Return vLLM's share of a GPU: ``wanted``, or less where that would not fit after the first update.

    It stays as wanted where nothing is known of the model or the GPUs, and where no share fits; preflight says so then.
    """
    needs = read_needs(_root_)
    if needs is None or needs.kept + wanted * needs.gpu + BESIDE <= needs.gpu:
        return wanted
    return needs.largest_share() or wanted


def read_needs(config) -> Needs | None:
    """Return what FSDP and vLLM need of this machine's GPUs.

    None where they share none, with another engine, where weights or GPUs are not here, and for a number of GPUs that
    is none.
    """
    path, trainer = OmegaConf.select(config, "actor_rollout_ref.model.path"), config.trainer
    together = path and config.model_engine == "dp" and trainer.v1.trainer_mode != "separate_async"
    counts = trainer.nnodes, trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    usable = all(type(count) is int and count >= 1 for count in counts)
    if not (together and usable) or trainer.device == "cpu":
        return None
    parameters = count_parameters(Path(path))
    gpu = usable_memory() if parameters else None
    if gpu is None:
        return None
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    fsdp, gpus = actor.fsdp_config, counts[0] * counts[1]
    shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < gpus else gpus
    plane = (2 if "16" in str(fsdp.model_dtype) else 4) * parameters / shards  # a number for each parameter
    trained = plane if (model.lora_rank or 0) <= 0 else 0.0  # LoRA's own parameters are few
    if fsdp.offload_policy and actor.strategy == "fsdp2":
        plane = trained = 0.0
    kept = plane * (not fsdp.param_offload) + 2 * trained * (not fsdp.optimizer_offload)
    return Needs(gpu, parameters, shards, kept, plane + 3 * trained, served=2 * parameters / counts[2])


def count_parameters(folder: Path) -> int:
    """Count the parameters in the headers of a folder's safetensors; 0 where there are none that can be read."""
    count = 0
    try:
        for path in folder.glob("model*.safetensors"):
            with safe_open(path, "np") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (OSError, SafetensorError):  # preflight says of the model what is wrong with it
        return 0
    return count


def usable_memory() -> int | None:
    """Return the bytes of the smallest GPU that ``CUDA_VISIBLE_DEVICES`` leaves, without what the driver reserves.

    None where nvidia-smi does not say. It is asked because torch would open a context on the GPU.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={os.environ['CUDA_VISIBLE_DEVICES'].replace(' ', '')}")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        rows = [row.split(",") for row in said.splitlines()]
        return min(int(total) - int(reserved) for total, reserved in rows) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
