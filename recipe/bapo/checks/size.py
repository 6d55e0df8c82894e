# SPDX-License-Identifier: Apache-2.0
"""What a model of this size asks of a GPU and of the disk: arithmetic, in docs/running.md.

``tests/memory`` holds the phases of a GPU against torch's own tracker: whoever changes them runs it. Only what surely
lies there is counted, because a run that fits must not be refused.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from recipe.bapo.checks import Concern, require_writable
from recipe.bapo.checks.config import sequence_parallel
from recipe.bapo.checks.machine import GIB, gpus, on_cpu
from recipe.bapo.checks.model import empty_model_of
from verl.utils.torch_dtypes import PrecisionType

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
    """A model's sizes; ``feed_forward`` is the width of a layer's."""

    weights: int
    layers: int
    hidden: int
    vocabulary: int
    feed_forward: int = 0


def model_of(config) -> Model:
    """The run's model, counted without loading it."""
    empty = empty_model_of(config)
    weights, text = sum(parameter.numel() for parameter in empty.parameters()), empty.config.get_text_config()
    return Model(weights, text.num_hidden_layers, text.hidden_size, text.vocab_size, text.intermediate_size)


def bytes_of_a_weight(config) -> tuple[int, int, int]:
    """Bytes of a weight, of its gradient and of AdamW's two moments in FSDP. LoRA trains few beside them: counted as
    none."""
    width = PrecisionType.to_dtype(config.actor_rollout_ref.actor.fsdp_config.model_dtype or "fp32").itemsize
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
    """What surely lies on a GPU in each phase of a step, against what is free there."""
    model = model_of(config)
    text = f"{model.weights / 1e9:.3g} billion weights"
    if on_cpu(config):
        return text
    known = [gpu for gpu in gpus() if gpu.total]
    gpu = min(known, key=lambda gpu: gpu.total - (gpu.used or 0), default=None)
    total, used = (gpu.total, gpu.used or 0) if gpu else (0.0, 0.0)
    phases = phases_of_a_gpu(config, model, total)
    needed = {phase: sum(parts.values()) for phase, parts in phases.items()}
    text += "; GiB of a GPU: " + ", ".join(
        f"{phase} {needed[phase]:.1f} ({', '.join(f'{name} {gib:.1f}' for name, gib in parts.items() if gib > 0.05)})"
        for phase, parts in phases.items()
    )
    if gpu is None:
        return f"{text}; without vLLM's share, as there is no GPU here"
    rollout = config.actor_rollout_ref.rollout
    share, served = rollout.gpu_memory_utilization, 2 * model.weights / rollout.tensor_model_parallel_size / GIB
    if served > share * total:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share} leaves vLLM {share * total:.1f} GiB of a GPU, "
            f"and the served weights are {served:.1f}: use a larger rollout.tensor_model_parallel_size."
        )
    largest = max(needed, key=needed.get)
    left = total - used - needed[largest]
    have = f"a GPU has {total:.1f} GiB" + (f", of which other processes hold {used:.1f}" if used > 1 else "")
    if left < 0:
        raise ValueError(f"{text}; {have}: {-left:.1f} too few for {largest}. Use {REMEDIES[largest]}.")
    if left < TIGHT * total:
        raise Concern(f"{text}; {have}: {left:.1f} left beside {largest} is tight. Use {REMEDIES[largest]}.")
    return f"{text}; {have}: at least {left:.1f} left"


def check_disk(config) -> str:
    """Room for the checkpoints that are kept, of weights and AdamW's state, and one in the making."""
    trainer, folder = config.trainer, Path(config.trainer.default_local_dir).absolute()
    if trainer.save_freq <= 0:
        return f"no checkpoints (trainer.save_freq={trainer.save_freq})"
    require_writable("trainer.default_local_dir", folder)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / GIB
    kept = trainer.max_actor_ckpt_to_keep
    weight, _, adamw = bytes_of_a_weight(config)
    needed = (weight + adamw) * model_of(config).weights * ((kept or 1) + 1) / GIB
    if needed > free:
        raise ValueError(
            f"trainer.default_local_dir={folder} has {free:.1f} GiB free, and checkpoints need {needed:.1f}: choose "
            "another, or lower trainer.max_actor_ckpt_to_keep."
        )
    return f"{free:.0f} GiB free, {needed:.1f} needed for {kept or 'at least one of all'} checkpoints and another"
