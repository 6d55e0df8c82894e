# SPDX-License-Identifier: Apache-2.0
"""Attention on packed sequences with torch's own flash attention: ``attn_implementation=torch_varlen``.

Importing this module registers it with transformers; ``platform=gpu_varlen`` has verl import it in every worker. The
kernel, ``torch.nn.attention.varlen.varlen_attn``, needs neither flash-attn nor a mask. On a CPU, which has no such
kernel, sdpa computes each sequence by itself, so that tests can run.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import AttentionInterface

from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

NAME = "torch_varlen"
LARGEST_HEAD = 256
SDPA = "attn_implementation=sdpa (with our launcher: platform=gpu_without_flash_attn)"
# Arguments with which a model, or verl, asks for more than the kernel computes.
UNSUPPORTED = {"softcap": "a softcap", "s_aux": "sinks", "prefix_grouper": "verl's prefix grouper"}


def attend(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    position_ids=None,
    **others,
):
    """Attend from each token to its own sequence up to itself. transformers calls this in each layer.

    Args:
        query: ``(1, H, T, D)``, all sequences of a micro-batch one after the other.
        key, value: ``(1, K, T, D)``, where K divides H.
        position_ids: ``(1, T)``. A sequence ends where the next position is not one more.
        sliding_window: the number of tokens to which a token attends, itself included; None means all.
        others: what else transformers hands on. ``UNSUPPORTED`` must not be among it.

    Returns:
        ``(1, T, H, D)``, and None in place of the attention weights.

    Raises:
        ValueError: the kernel does not compute what is asked for. Names the setting to change.
    """
    dropout = dropout if module.training else 0.0
    _refuse_padding(query, key, attention_mask, position_ids)
    _refuse_settings(module, query, value, dropout, others)
    borders, longest = find_borders(position_ids)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # varlen_attn of torch 2.11 documents equal numbers of heads alone
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    compute = call_kernel if query.is_cuda else attend_by_sequence
    return compute(query, key, value, borders, longest, scaling, window).unsqueeze(0), None


@lru_cache(maxsize=1)  # all layers of a forward, and their recomputation in the backward, have the same tensor
def find_borders(position_ids):
    """Find where sequences begin and end.

    Args:
        position_ids: ``(1, T)``.

    Returns:
        The borders, int32 ``(N + 1,)`` from 0 to T, and the length of the longest sequence.
    """
    begins = (position_ids[0].diff() != 1).nonzero().flatten() + 1  # the host waits here, and for the longest
    borders = F.pad(begins, (1, 1))
    borders[-1] = position_ids.shape[1]
    return borders.int(), int(borders.diff().max())


def call_kernel(query, key, value, borders, longest, scale, window):
    """Call torch's flash attention with the arguments that torch 2.11 and 2.13 both have.

    Args:
        query, key, value: ``(T, H, D)`` in bfloat16 or float16.
        borders, longest: what ``find_borders`` returns.
        window: numbers of tokens before and after its own to which a token attends; -1 means all.

    Returns:
        ``(T, H, D)``.
    """
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"invalid attn_implementation={NAME} in {query.dtype}: torch's kernel computes in bfloat16 or "
            f"float16. Leave actor.fsdp_config.mixed_precision as verl has it, or set {SDPA}."
        )
    return varlen_attn(query, key, value, borders, borders, longest, longest, scale=scale, window_size=window)


def attend_by_sequence(query, key, value, borders, longest, scale, window):
    """Compute with sdpa, one sequence after the other, what ``call_kernel`` computes."""
    seen = torch.ones(longest, longest, dtype=torch.bool, device=query.device).tril()
    if window[0] >= 0:
        seen = seen.triu(-window[0])
    attended = []
    lengths = borders.diff().tolist()
    for sequence in zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (query, key, value)), strict=True):
        mask = seen[: sequence[0].shape[1], : sequence[0].shape[1]]
        attended.append(F.scaled_dot_product_attention(*sequence, attn_mask=mask, scale=scale))
    return torch.cat(attended, 1).transpose(0, 1)


def refuse_model(hf_config, packed: bool) -> None:
    """Refuse a model from its config alone, as ``attend`` would at the first forward.

    Args:
        hf_config: transformers' config of the model.
        packed: whether sequences are packed (``model.use_remove_padding``).

    Raises:
        ValueError: names what the kernel does not compute, and the setting to change.
    """
    text = hf_config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dropout = getattr(text, "attention_dropout", 0.0)
    if not packed:
        reason = f"with use_remove_padding=false: set actor_rollout_ref.model.use_remove_padding=true, or {SDPA}"
    elif hasattr(hf_config, "vision_config"):
        reason = f"for a vision-language model, whose tokens have several positions each: set {SDPA}"
    elif getattr(text, "qk_rope_head_dim", None):
        reason = f"for a model whose queries and values have heads of two sizes: set {SDPA}"
    elif size % 8 or size > LARGEST_HEAD:
        reason = f"with heads of {size} numbers: torch's kernel takes multiples of 8 up to {LARGEST_HEAD}. Set {SDPA}"
    elif dropout > 0:
        reason = f"with attention_dropout={dropout}: set actor_rollout_ref.model.override_config.attention_dropout=0"
    elif getattr(text, "attn_logit_softcapping", None) is not None:
        reason = "for a model whose attention has a softcap, which it would drop: set attn_implementation=eager"
    else:
        return
    raise ValueError(f"invalid attn_implementation={NAME} {reason}.")


def _refuse_padding(query, key, attention_mask, position_ids):
    packed = position_ids is not None and position_ids.shape == (1, query.shape[2])
    if not packed or len(query) != 1 or key.shape[2] != query.shape[2] or attention_mask is not None:
        raise ValueError(
            f"invalid attn_implementation={NAME}: it takes packed sequences with one position per token. Set "
            f"actor_rollout_ref.model.use_remove_padding=true, or {SDPA}."
        )


def _refuse_settings(module, query, value, dropout, others):
    ranks, size = get_ulysses_sequence_parallel_world_size(), query.shape[-1]
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    asked = [what for name, what in UNSUPPORTED.items() if others.get(name) is not None]
    asked += ["chunks"] * bool(getattr(module.config, "attention_chunk_size", None)) + ["all tokens"] * (not causal)
    if ranks > 1:
        reason = f"on {ranks} sequence-parallel GPUs, each of which would attend to its own part of a sequence: set "
        reason += "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1, or install flash-attn"
    elif dropout > 0:
        reason = f"with attention_dropout={dropout}: set actor_rollout_ref.model.override_config.attention_dropout=0"
    elif asked:
        reason = f"for a model whose attention has {' and '.join(asked)}: set attn_implementation=eager"
    elif size % 8 or size > LARGEST_HEAD or value.shape[-1] != size:
        reason = f"with heads of {size} and {value.shape[-1]} numbers: torch's kernel takes equal multiples of 8 up to "
        reason += f"{LARGEST_HEAD}. Set {SDPA}"
    else:
        return
    raise ValueError(f"invalid attn_implementation={NAME} {reason}.")


AttentionInterface.register(NAME, attend)
