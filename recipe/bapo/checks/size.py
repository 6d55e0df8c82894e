# SPDX-License-Identifier: Apache-2.0
"""What a model of this size asks of a GPU, of a node's memory and of the disk: arithmetic, in docs/running.md."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipe.bapo.checks import Concern
from recipe.bapo.checks.config import sequence_parallel
from recipe.bapo.checks.machine import GIB, gpus, on_cpu
from recipe.bapo.checks.model import empty_model_of, hf_config_of
from verl.utils.torch_dtypes import PrecisionType

# Versions 2 and 1.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
TIGHT = 0.05  # of a GPU: what CUDA's contexts, NCCL and fragments take is not counted
FSDP = "actor_rollout_ref.actor.fsdp_config"
REMEDIES = {
    "rollout": f"a smaller rollout.gpu_memory_utilization, {FSDP}.param_offload and optimizer_offload, or more GPUs",
    "log-probs": "a smaller rollout.log_prob_max_token_len_per_gpu, actor.entropy_from_logits_with_chunking, "
    "model.use_fused_kernels, or more GPUs",
    "update": "a smaller actor.ppo_max_token_len_per_gpu, model.use_fused_kernels, more GPUs, or "
    f"{FSDP}.offload_policy with actor.strategy=fsdp2",
}


@dataclass(frozen=True)
class Model:
    """A model's sizes; ``largest`` is the number of weights of its largest tensor, ``feed_forward`` the width of a
    layer's."""

    weights: int
    largest: int
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    feed_forward: int = 0


def model_of(config) -> Model:
    """The run's model, counted without loading it."""
    hf_config, empty = hf_config_of(config), empty_model_of(config)
    sizes, text = [parameter.numel() for parameter in empty.parameters()], hf_config.get_text_config()
    shape = (text.num_hidden_layers, text.hidden_size, text.vocab_size, bool(text.tie_word_embeddings))
    return Model(sum(sizes), max(sizes), *shape, getattr(text, "intermediate_size", None) or 0)


def bytes_of_a_weight(config) -> tuple[int, int, int]:
    """Bytes of a weight, of its gradient and of AdamW's two moments in FSDP. LoRA trains few beside them: counted as
    none."""
    dtype = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    try:
        width = PrecisionType.to_dtype(dtype or "fp32").itemsize
    except RuntimeError:
        raise ValueError(f"{FSDP}.model_dtype={dtype} is not usable: use fp32, bf16 or fp16.") from None
    trained = (config.actor_rollout_ref.model.lora_rank or 0) <= 0
    return width, width * trained, 2 * width * trained


def gibibytes_of_a_rank(config, model) -> tuple[float, float, float]:
    """A rank's shards of weights, gradients and AdamW's moments."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    group = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    shards = group if 0 < group < ranks else ranks
    return tuple(width * model.weights / shards / GIB for width in bytes_of_a_weight(config))


def phases_of_a_gpu(config, model, total) -> dict[str, dict[str, float]]:
    """GiB of a GPU that trains and samples, by phase of a step and purpose; ``total`` is what the GPU has.

    verl's ``param_offload`` and ``optimizer_offload`` empty a GPU for the rollout; for an update all is loaded.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    fsdp = actor.fsdp_config
    weights, gradients, adamw = gibibytes_of_a_rank(config, model)
    if fsdp.offload_policy and actor.strategy == "fsdp2":
        weights = gradients = adamw = 0.0
    kept = 0.0 if fsdp.optimizer_offload else adamw
    serving = rollout.gpu_memory_utilization * total
    asleep = 0.0 if rollout.free_cache_engine else serving
    tokens, log_prob_tokens = tokens_of_a_gpu(config)
    checkpoints = 2 * tokens * model.layers * model.hidden / GIB  # what gradient checkpointing keeps; more without it
    logits, layer = logits_of(config, model, tokens, update=True), layer_of(model, tokens)
    gathered = 2 * model.vocabulary * model.hidden / GIB  # FSDP's copy of the largest tensor, in bfloat16
    phases = {
        "rollout": {"weights": 0.0 if fsdp.param_offload else weights, "AdamW": kept, "vLLM": serving},
        "log-probs": {"weights": weights, "AdamW": kept, "vLLM": asleep}
        | {"gathered": gathered, "logits": logits_of(config, model, log_prob_tokens, update=False)},
        "update": {"weights and gradients": weights + gradients, "AdamW": adamw, "vLLM": asleep}
        | {"activations": checkpoints, "gathered": gathered}
        | ({"logits": logits} if logits > layer else {"the backward of a layer": layer}),  # one after the other
    }
    if config.algorithm.rollout_correction.bypass_mode:
        del phases["log-probs"]
    return phases


def tokens_of_a_gpu(config) -> tuple[int, int]:
    """The most tokens of a micro-batch on one GPU, in an update and for log-probs."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = (actor.ppo_micro_batch_size_per_gpu or 1, rollout.log_prob_micro_batch_size_per_gpu or 1)
    return tuple(longest * number // sequence_parallel(config)[1] for number in rows)


def logits_of(config, model, tokens, *, update) -> float:
    """GiB of a micro-batch's logits and what is as large: planes of 2 bytes a token and word of the vocabulary.

    Held against torch's memory tracker in ``tests/memory``.
    """
    actor = config.actor_rollout_ref.actor
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0.0  # a chunk of 512 tokens at a time
    planes = 1 + (config.actor_rollout_ref.rollout.temperature != 1)  # verl divides into a copy
    backward, chunk = planes, 0.0
    if not update or actor.calculate_entropy or actor.entropy_coeff != 0:
        backward = 2  # where the entropy is measured, the gradient does not take the place of the logits
        if actor.entropy_from_logits_with_chunking and (actor.entropy_checkpointing or not update):
            # Of a chunk: its copy, softmax and product in float32.
            chunk = 3 * 4 * min(tokens, actor.fsdp_config.entropy_from_logits_chunk_size) * model.vocabulary / GIB
        else:
            planes += 4  # softmax and product of all tokens in float32
        if update and actor.entropy_coeff != 0:
            backward += 6  # the chunks are computed anew, all with their graphs
    attention = (config.actor_rollout_ref.model.get("override_config") or {}).get("attn_implementation")
    if update and attention not in (None, "flash_attention_2"):
        backward = planes + 3  # not flash-attn's cross-entropy: log-softmax in float32, and the gradient
    plane = 2 * tokens * model.vocabulary / GIB
    return max(planes * plane + chunk, backward * plane if update else 0.0)


def layer_of(model, tokens) -> float:
    """GiB of a layer's activations and their gradients in the backward, and of the output layer's gradient in float32,
    which FSDP reduces meanwhile.

    9 is the number of planes of the feed-forward's width that torch's tracker finds for Qwen2 (``tests/memory``).
    """
    return (9 * 2 * tokens * model.feed_forward + 4 * model.vocabulary * model.hidden) / GIB


def check_memory(config) -> str:
    """What surely lies on a GPU in each phase of a step, and in the memory of a node, against what is free there."""
    model = model_of(config)
    return _check_cpu(config, model) if on_cpu(config) else _check_gpus(config, model)


def _check_gpus(config, model):
    known = [gpu for gpu in gpus() if gpu.total]
    gpu = min(known, key=lambda gpu: gpu.total - (gpu.used or 0), default=None)
    total, used = (gpu.total, gpu.used or 0) if gpu else (0.0, 0.0)
    phases = phases_of_a_gpu(config, model, total)
    needed = {phase: sum(parts.values()) for phase, parts in phases.items()}
    text = f"{model.weights / 1e9:.3g} billion weights; GiB of a GPU: " + ", ".join(
        f"{phase} {needed[phase]:.1f} ({', '.join(f'{name} {gib:.1f}' for name, gib in parts.items() if gib > 0.05)})"
        for phase, parts in phases.items()
    )
    if gpu is None:
        return f"{text}; without vLLM's share, as there is no GPU here"
    free = total - used
    have = f"a GPU has {total:.1f} GiB" + (f", of which other processes hold {used:.1f}" if used > 1 else "")
    for phase, size in needed.items():
        if size > free:
            raise ValueError(f"{text}; {have}: {size - free:.1f} too few for {phase}. Use {REMEDIES[phase]}.")
    _check_serving(config, model, total)
    host = _check_host(config, model)
    largest = max(needed, key=needed.get)
    left = free - needed[largest]
    if left < TIGHT * total:
        raise Concern(f"{text}; {have}: {left:.1f} left beside {largest} is tight. Use {REMEDIES[largest]}.")
    return f"{text}; {have}: at least {left:.1f} left; {host:.0f} GiB of a node's memory"


def _check_serving(config, model, total):
    rollout = config.actor_rollout_ref.rollout
    width = {"float32": 4}.get(str(rollout.dtype), 2)
    devices = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    served, share = width * model.weights / devices / GIB, rollout.gpu_memory_utilization
    if served > share * total:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share} leaves vLLM {share * total:.1f} GiB of a GPU, "
            f"and the served weights are {served:.1f}: use a larger rollout.tensor_model_parallel_size."
        )


def free_memory() -> float:
    """GiB that this process can have: what the machine has free, or its container's limit."""
    free = psutil.virtual_memory().available
    for limit in CGROUP_LIMITS:
        if limit.exists() and (text := limit.read_text().strip()).isdigit():  # or "max"
            free = min(free, int(text))
    return free / GIB


def _check_host(config, model):
    """GiB of this node's memory: the weights while they are loaded, or what is offloaded, whichever is more."""
    fsdp, ranks = config.actor_rollout_ref.actor.fsdp_config, config.trainer.n_gpus_per_node
    weights, gradients, adamw = gibibytes_of_a_rank(config, model)
    offloaded = ranks * (weights * fsdp.param_offload + adamw * fsdp.optimizer_offload)
    if fsdp.offload_policy and config.actor_rollout_ref.actor.strategy == "fsdp2":
        offloaded = ranks * (weights + gradients + adamw)
    # verl loads the model on one rank; one with tied embeddings on each.
    loaded = bytes_of_a_weight(config)[0] * model.weights * (ranks if model.tied else 1) / GIB
    needed, there = max(offloaded, loaded), free_memory()
    if needed > there:
        what = "offloading" if offloaded > loaded else "loading the model"
        raise ValueError(
            f"{what} takes {needed:.0f} GiB of a node's memory, and {there:.0f} are free: use "
            + (f"less of {FSDP}.param_offload, optimizer_offload and offload_policy, or " if offloaded > loaded else "")
            + "more nodes or a smaller model."
        )
    return needed


def _check_cpu(config, model):
    rollout = config.actor_rollout_ref.rollout
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    width = bytes_of_a_weight(config)[0]
    _check_shared_weights(rollout, width * model.largest, width * model.weights)
    # Offloaded to where they are.
    training = sum(bytes_of_a_weight(config)) * model.weights / GIB
    serving = {"float32": 4}.get(str(rollout.dtype), 2) * model.weights * ranks / GIB
    there = free_memory()
    _fits(training + serving, there, f"this machine has {there:.1f} GiB free", "a smaller model")
    return f"{model.weights / 1e9:.3g} billion weights; {training:.1f} GiB to train and {serving:.1f} to sample"


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
        amount = f"{needed:.1f} GiB" if needed >= 0.1 else f"{1024 * needed:.1f} MiB"
        raise ValueError(f"{amount} are needed, and {where}: use {fix}.")


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
    needed = (weight + adamw) * model_of(config).weights * ((kept or 1) + 1) / GIB
    if needed > free:
        raise ValueError(
            f"trainer.default_local_dir={folder} has {free:.1f} GiB free, and checkpoints need {needed:.1f}: choose "
            "another, or lower trainer.max_actor_ckpt_to_keep."
        )
    if kept is None:
        raise Concern(f"trainer.max_actor_ckpt_to_keep=null keeps every checkpoint, and {free:.0f} GiB are free.")
    return f"{free:.0f} GiB free, {needed:.1f} needed for {kept} checkpoints and one in the making"
