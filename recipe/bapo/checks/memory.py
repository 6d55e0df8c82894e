# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory that a model needs on a GPU. docs/larger_models.md has the arithmetic.

``tests/memory`` compares the estimate with torch's own memory tracker: run it after a change here. The estimate is a
lower bound, so it never rejects a run that fits.
"""

from recipe.bapo.checks import CheckWarning
from recipe.bapo.checks.config import ACTOR, ROLLOUT, longest_sequence, sequence_parallel
from recipe.bapo.checks.machine import GIB, gpus, on_cpu
from recipe.bapo.checks.model import FUSED, empty_model_of, model_of
from recipe.bapo.compatibility import uses_bypass_mode
from recipe.bapo.launch.locks import joins_a_cluster
from verl.utils import torch_functional as verl_F
from verl.utils.torch_dtypes import PrecisionType

TIGHT = 0.05  # share of a GPU: CUDA's contexts, NCCL and fragmentation are not counted
FUSED_CHUNK = 512  # tokens (verl/utils/experimental/torch_functional.py:221)
FSDP = f"{ACTOR}.fsdp_config"
REMEDY = (
    f"Use more GPUs, a smaller {ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.log_prob_max_token_len_per_gpu or {ACTOR}."
    f"ppo_max_token_len_per_gpu, {FUSED}, or offloading ({FSDP})."
)


def sizes_of(config):
    """Count the model's weights without loading them. Also returns transformers' config of its language model."""
    model = model_of(config)
    count = sum(parameter.numel() for parameter in empty_model_of(model).parameters())
    return count, model.hf_config.get_text_config()


def phases_of_a_gpu(config, count, text, total) -> dict[str, dict[str, float]]:
    """Estimate how many GiB each phase of a step takes, by purpose, on a GPU that trains and samples.

    verl's ``param_offload`` and ``optimizer_offload`` free a GPU for the rollout. For an update everything is loaded.

    Args:
        config: resolved.
        count, text: the results of ``sizes_of``.
        total: size of the GPU in GiB.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    fsdp = actor.fsdp_config
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks
    weights = PrecisionType.to_dtype(fsdp.model_dtype or "fp32").itemsize * count / shards / GIB
    trained = (config.actor_rollout_ref.model.lora_rank or 0) <= 0  # LoRA's own weights are few, and not counted
    gradients, adamw = weights * trained, 2 * weights * trained
    if fsdp.offload_policy and actor.strategy == "fsdp2":
        weights = gradients = adamw = 0.0
    kept = 0.0 if fsdp.optimizer_offload else adamw
    serving = rollout.gpu_memory_utilization * total
    asleep = 0.0 if rollout.free_cache_engine else serving
    tokens, log_prob_tokens = tokens_of_a_gpu(config)
    checkpoints = 2 * tokens * text.num_hidden_layers * text.hidden_size / GIB  # what gradient checkpointing keeps
    output_layer = 2 * text.vocab_size * text.hidden_size / GIB  # in bfloat16
    logits = logits_of(config, text.vocab_size, tokens, update=True)
    at_once = {"logits": logits, "the backward of a layer": layer_backward_of(config, count, text, tokens, shards)}
    later = max(at_once, key=lambda part: at_once[part])  # they do not happen at the same time
    phases = {
        "rollout": {"weights": 0.0 if fsdp.param_offload else weights, "AdamW": kept, "vLLM": serving},
        "log-probs": {"weights": weights, "AdamW": kept, "vLLM": asleep}
        | log_probs_of(config, text, log_prob_tokens, shards),
        "update": {"weights and gradients": weights + gradients, "AdamW": adamw, "vLLM": asleep}
        | {"activations": checkpoints, "gathered": output_layer, later: at_once[later]},
    }
    if uses_bypass_mode(config):
        del phases["log-probs"]
    return phases


def layer_backward_of(config, count, text, tokens, shards) -> float:
    """Estimate the GiB of a layer's backward.

    It holds 9 tensors of tokens times the feed-forward's width, 2 bytes an entry (measured for Qwen2). Add what FSDP
    holds at the same time.
    """
    planes = 9 * 2 * tokens * getattr(text, "intermediate_size", 0)
    output_layer = text.vocab_size * text.hidden_size
    if not config.actor_rollout_ref.model.use_fused_kernels:
        return (planes + 4 * output_layer) / GIB  # FSDP reduces the output layer's gradient in float32
    # With fused kernels the output layer's bfloat16 gradient is reduced at the end (verl_fixes.py). FSDP holds the
    # weights of this layer and of the next one and, on several GPUs, the gradient in float32.
    weights = (count - (1 if text.tie_word_embeddings else 2) * output_layer) / max(1, text.num_hidden_layers)
    return (planes + 2 * output_layer + (8 if shards > 1 else 2) * weights) / GIB


def log_probs_of(config, text, tokens, shards) -> dict[str, float]:
    """Estimate the GiB of a pass for log-probs beside the weights: a bfloat16 copy of the largest tensor and logits."""
    output_layer = 2 * text.vocab_size * text.hidden_size / GIB
    parts = {"gathered": output_layer, "logits": logits_of(config, text.vocab_size, tokens, update=False)}
    if not config.actor_rollout_ref.model.use_fused_kernels:
        return parts
    # With fused kernels the output layer and, if it is not tied, the embedding are gathered at the start: on several
    # GPUs each in FSDP's buffer and as a copy.
    start = (1 if text.tie_word_embeddings else 2) * (2 if shards > 1 else 1) * output_layer
    return parts if sum(parts.values()) > start else {"gathered": start}


def tokens_of_a_gpu(config) -> tuple[int, int]:
    """Return the largest number of tokens of a micro-batch on one GPU, in an update and for log-probs."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = longest_sequence(config)
    if actor.use_dynamic_bsz:
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node  # all GPUs together hold the whole batch
        most = [
            prompts * rollout.n * longest // ranks
            for prompts in (actor.ppo_mini_batch_size, config.data.train_batch_size)
        ]
        limits = (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
        return min(limits[0], most[0]), min(limits[1], most[1])
    rows = (actor.ppo_micro_batch_size_per_gpu or 1, rollout.log_prob_micro_batch_size_per_gpu or 1)
    parallel = sequence_parallel(config)[1]
    return longest * rows[0] // parallel, longest * rows[1] // parallel


def logits_of(config, vocabulary, tokens, *, update) -> float:
    """Estimate the GiB of a micro-batch's logits and of other tensors of their size.

    A plane is a tensor of 2 bytes for each token and entry of the vocabulary.
    """
    actor = config.actor_rollout_ref.actor
    if config.actor_rollout_ref.model.use_fused_kernels:  # 3 float32 tensors of a chunk, and 5 in its backward
        return (20 if update else 12) * min(tokens, FUSED_CHUNK) * vocabulary / GIB
    planes = 1 + (config.actor_rollout_ref.rollout.temperature != 1)  # verl divides by it into a copy
    backward, chunk = planes, 0.0
    if not update or actor.calculate_entropy or actor.entropy_coeff != 0:
        backward = 2  # if the entropy is measured, the gradient cannot reuse the memory of the logits
        if actor.entropy_from_logits_with_chunking and (actor.entropy_checkpointing or not update):
            # A chunk's copy, softmax and product in float32.
            chunk = 3 * 4 * min(tokens, actor.fsdp_config.entropy_from_logits_chunk_size) * vocabulary / GIB
        else:
            planes += 4  # softmax and product of all tokens in float32
        if update and actor.entropy_coeff != 0:
            backward += 6  # all chunks are computed again, with their graphs
    attention = (config.actor_rollout_ref.model.get("override_config") or {}).get("attn_implementation")
    if update and attention not in (None, "flash_attention_2") and not verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        backward = planes + 3  # log-softmax in float32 and the gradient, without flash-attn's cross-entropy
    plane = 2 * tokens * vocabulary / GIB
    return max(planes * plane + chunk, backward * plane if update else 0.0)


def check_memory(config) -> str:
    """Compare the memory that each phase of a step needs at least with what is free on a GPU."""
    count, sizes = sizes_of(config)
    text = f"{count / 1e9:.3g} billion weights"
    listed = [] if on_cpu(config) else gpus()
    if on_cpu(config) or (not listed and joins_a_cluster(config)):  # for example on the head of a cluster
        return text
    known = [(gpu.number, gpu.total, gpu.used) for gpu in listed if gpu.total is not None and gpu.used is not None]
    if not known:
        raise CheckWarning(
            f"{text}; nvidia-smi does not say how much memory the GPUs have and how much is free (as with MIG, where "
            "a run has a part of a GPU), so it was not compared with what the run needs (docs/larger_models.md)."
        )
    _, total, used = min(known, key=lambda gpu: gpu[1] - gpu[2])
    rollout = config.actor_rollout_ref.rollout
    a_weight = 1 if rollout.get("quantization") else 2  # bytes
    share, served = rollout.gpu_memory_utilization, a_weight * count / rollout.tensor_model_parallel_size / GIB
    if served > share * total:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share} leaves vLLM {share * total:.1f} GiB of a GPU, "
            f"and the served weights are {served:.1f}: use a larger rollout.tensor_model_parallel_size."
        )
    phases = phases_of_a_gpu(config, count, sizes, total)
    needed = {phase: sum(parts.values()) for phase, parts in phases.items()}
    largest = max(needed, key=lambda phase: needed[phase])
    text += "; GiB of a GPU: " + ", ".join(
        f"{phase} {needed[phase]:.1f} ({', '.join(f'{name} {gib:.1f}' for name, gib in parts.items() if gib > 0.05)})"
        for phase, parts in phases.items()
    )
    text += f"; a GPU has {total:.1f} GiB, of which other processes hold {used:.1f}: "
    left = total - used - needed[largest]
    if left < 0:
        free = [index for index, total, used in known if total - used >= needed[largest]]
        choose = f"It would fit on these, which are free: CUDA_VISIBLE_DEVICES={','.join(free)}. " if free else ""
        raise ValueError(f"{text}{-left:.1f} too few for {largest}. {choose}{REMEDY}")
    if left < TIGHT * total:
        raise CheckWarning(f"{text}{left:.1f} left beside {largest} is tight. {REMEDY}")
    return f"{text}at least {left:.1f} left"
