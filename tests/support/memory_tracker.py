# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of FSDP2 updates of any size with torch's tracker on fake tensors, which needs no GPU.

The model is transformers' Qwen2, sharded by verl's ``apply_fsdp2`` over a fake process group. Its logits go through
verl's own ``prepare_model_outputs``, or its hidden states through verl's fused kernels. We replace only the kernels of
flash-attn and of torch's attention, by autograd functions that allocate and keep the same tensors.

The figures do not include fragmentation in the CUDA allocator, CUDA contexts, buffers of NCCL, workspaces of cuBLAS and
flash-attn, verl's batch, and the temporaries of AdamW's step, which runs after activations and logits are freed.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed
from support.gpus import SHAPES
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import repeat_kv

import recipe.bapo.verl_fixes  # noqa: F401  as our worker does
import verl.utils.torch_functional as verl_F
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import apply_fsdp2
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@dataclass(frozen=True)
class Work:
    """The work of one GPU on one micro-batch: an update, or log-probs without a gradient.

    Attributes:
        model: a name in ``support.gpus.SHAPES``.
        shards: number of GPUs over which FSDP shards the model.
        tokens: number of tokens of the micro-batch on this GPU.
        update: whether this is an update; otherwise only log-probs are computed.
        temperature: the rollouts' temperature. If it is not 1, verl divides the logits by it.
        sequence_parallel: number of GPUs that share a sequence (Ulysses).
        without_flash_attn: use torch's attention and verl's fused kernels, as ``platform=gpu_without_flash_attn`` does.
        entropy: measure the entropy, in chunks and checkpointed, as ``size=gpu`` does.
        entropy_gradient: whether the backward runs through the entropy.
    """

    model: str
    shards: int
    tokens: int
    update: bool
    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool = False
    sequence_parallel: int = 1
    without_flash_attn: bool = False


class FlashAttention(torch.autograd.Function):
    """Allocates like flash-attn's attention: the backward keeps queries, keys, values, output and float32 sums."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, log_sums = ctx.saved_tensors
        torch.empty_like(log_sums)  # softmax_d
        torch.empty_like(query, dtype=torch.float32)  # dq_accum
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class MaskedAttention(torch.autograd.Function):
    """Allocates like torch's efficient attention: the backward keeps the same as flash-attn's, and the mask."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        mask = query.new_empty(query.shape[1], query.shape[1])  # the boolean mask as numbers to add
        ctx.save_for_backward(query, key, value, output, log_sums, mask)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, log_sums, _ = ctx.saved_tensors
        torch.empty_like(log_sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class CrossEntropy(torch.autograd.Function):
    """Allocates like flash-attn's cross-entropy: the backward keeps the logits, and overwrites them if it may."""

    @staticmethod
    def forward(ctx, logits, labels, inplace_backward):
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, torch.empty_like(losses), labels)
        ctx.inplace_backward = inplace_backward
        return losses

    @staticmethod
    def backward(ctx, gradient):
        logits, _, _ = ctx.saved_tensors
        return (logits if ctx.inplace_backward else torch.empty_like(logits)), None, None


def _attention(work):
    def forward(module, query, key, value, attention_mask, **_):
        if work.without_flash_attn:  # transformers repeats keys and values for the heads that share them
            key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
        parts = [states.transpose(1, 2) for states in (query, key, value)]
        if work.sequence_parallel > 1:  # Ulysses exchanges them: fewer heads of more tokens
            parts = [states.clone() for states in parts]
        output = (MaskedAttention if work.without_flash_attn else FlashAttention).apply(*parts)
        return (output.clone() if work.sequence_parallel > 1 else output), None

    return forward


@contextlib.contextmanager
def _replaced_kernels(work):
    before = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = _attention(work)
    forward = Qwen2ForCausalLM.forward  # which verl replaces in the class, for fused kernels
    available = verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    kernel = getattr(verl_F, "cross_entropy_loss", None)
    verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
    verl_F.cross_entropy_loss = lambda logits, labels, inplace_backward: (
        CrossEntropy.apply(logits, labels, inplace_backward),
        None,
    )
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = before
        Qwen2ForCausalLM.forward = forward
        verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE, verl_F.cross_entropy_loss = available, kernel


def _make_model(work, mesh):
    hidden, layers, feed_forward, heads, groups, vocabulary, tied = SHAPES[work.model]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config._attn_implementation = "flash_attention_2"  # after from_config, which looks for the package
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(work.update)
    patch_forward_with_backends(model, use_fused_kernels=work.without_flash_attn, fused_kernels_backend="torch")
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": True}, {})
    return model


def _make_optimizer(model, update):
    """Make AdamW with both moments and, for an update, with the gradient from earlier micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        if update:
            parameter.grad = torch.zeros_like(parameter)
    return optimizer


def _forward(model, work):
    """Compute log-probs and entropy of a micro-batch with verl's engine."""
    ids = torch.zeros(1, work.tokens, dtype=torch.long)
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(entropy_checkpointing=True, entropy_from_logits_with_chunking=True),
        compute_entropy_from_logits=verl_F.entropy_from_logits_with_chunking,
        _gather_and_unpad_packed=lambda packed, pad_size: packed,
    )
    offsets = torch.arange(0, work.tokens + 1, work.tokens // 2)
    data = TensorDict({"input_ids": torch.nested.nested_tensor_from_jagged(ids[0], offsets)}, batch_size=[])
    tu.assign_non_tensor(data, calculate_entropy=work.entropy, use_fused_kernels=work.without_flash_attn)
    arguments = {
        "temperature_is_one": work.temperature == 1,
        "temperature_rmpad": torch.ones(work.tokens),
        "input_ids_rmpad_rolled": ids[0],
        "pad_size": 0,
    }
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    if work.without_flash_attn:
        inputs |= {"temperature": work.temperature, "return_dict": True, "shift_labels": ids}
        mask = torch.empty(work.tokens, work.tokens, dtype=torch.bool)  # noqa: F841  takes memory during the call
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
        found = FSDPEngineWithLMHead.prepare_model_outputs(engine, output, arguments, data, None)
        return found["log_probs"].values(), found["entropy"].values() if work.entropy else None


def _loss(model, work):
    # If the entropy has no gradient, its graph is freed when this function returns, as in verl's forward_step.
    log_probs, entropy = _forward(model, work)
    return log_probs.sum() + entropy.sum() if work.entropy_gradient else log_probs.sum()


def peak_gibibytes(work: Work) -> float:
    """Measure the peak memory of one GPU during ``work`` in GiB."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=work.shards)
    try:
        mesh = init_device_mesh("cpu", (work.shards,), mesh_dim_names=["fsdp"])
        with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True), _replaced_kernels(work):
            model = _make_model(work, mesh)
            optimizer = _make_optimizer(model, work.update)
            with FSDPMemTracker(model, optimizer) as tracker:
                with torch.set_grad_enabled(work.update):
                    loss = _loss(model, work)
                if work.update:
                    loss.backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    return peak["Total"] / (1 << 30)
