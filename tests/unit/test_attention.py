# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation=torch_varlen`` beside sdpa, the call of torch's kernel, and what is refused."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.bapo.verl_patches import attention

LENGTHS = {"several sequences": [5, 1, 9, 12], "one long sequence": [400]}


def make_model(implementation, heads=4, groups=2, window=None):
    config = Qwen2Config(
        **dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2),
        **dict(num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=512),
        **dict(use_sliding_window=window is not None, sliding_window=window, max_window_layers=1),  # of two layers, one
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def pack(lengths):
    """Return tokens and positions of a packed micro-batch, each ``(1, T)``."""
    tokens = torch.randint(40, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def gradients_of(model, logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("window", [None, 2, 5], ids="window {}".format)
@pytest.mark.parametrize("groups", [2, 4], ids=["grouped keys", "a key for each head"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_packed_forward_and_its_gradients_are_those_of_each_sequence_alone(lengths, groups, window):
    packed, alone = (make_model(name, groups=groups, window=window) for name in (attention.NAME, "sdpa"))
    assert ("sliding_attention" in packed.config.layer_types) == (window is not None)
    tokens, positions = pack(lengths)
    logits = packed(tokens, position_ids=positions, use_cache=False).logits
    expected = torch.cat([alone(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    found = gradients_of(packed, logits)
    for name, gradient in gradients_of(alone, expected).items():
        assert gradient.norm() > 0
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_borders_are_found_once_for_all_layers_and_their_recomputation():
    model = make_model(attention.NAME)
    model.gradient_checkpointing_enable()
    model.train()
    attention.find_borders.cache_clear()
    for lengths in LENGTHS.values():
        tokens, positions = pack(lengths)
        model(tokens, position_ids=positions, use_cache=False).logits.sum().backward()
    found = attention.find_borders.cache_info()
    assert (found.misses, found.hits) == (2, 2 * 3)  # 2 layers, each computed twice


def test_a_sequence_begins_where_the_position_is_not_one_more():
    borders, longest = attention.find_borders(torch.tensor([[0, 0, 0, 1, 2, 7, 8, 0, 1]]))
    assert borders.tolist() == [0, 1, 2, 5, 7, 9] and longest == 3
    assert borders.dtype == torch.int32  # as the kernel wants


# The signature is that of torch/nn/attention/varlen.py, line 159, in the wheels of torch 2.11.0 (git 70d99e9), which
# requirements-cuda.txt pins.
def varlen_attn_of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Compute in a few lines what torch documents: ``(T, H, D)``, borders in int32, windows as (before, after)."""
    assert query.shape == key.shape == value.shape and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == cu_seq_q.diff().max()
    before, after = (math.inf if size == -1 else size for size in window_size)
    number = torch.arange(len(query))
    sequence = torch.bucketize(number, cu_seq_q, right=True)
    distance = number[:, None] - number
    seen = (sequence[:, None] == sequence) & (distance <= before) & (-distance <= after)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * (scale or query.shape[-1] ** -0.5)
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, value.float()).to(query.dtype)


@pytest.fixture
def calls(monkeypatch):
    """Have the branch of a GPU run here, on what is above. Returns the positional and named arguments of its calls."""
    made = []

    def record(*args, **kwargs):
        made.append((args, kwargs))
        return varlen_attn_of_torch_2_11(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", record)
    monkeypatch.setattr(attention, "attend_by_sequence", attention.call_kernel)
    return made


LAYER = SimpleNamespace(training=True, is_causal=True, config=SimpleNamespace())


def arguments(groups=2, size=8, tokens=27, dtype=torch.bfloat16):
    """Return arguments of ``attend`` for four heads: a packed micro-batch of random numbers."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": 4, "key": groups, "value": groups}
    numbers = {
        name: torch.randn(1, heads, tokens, size, generator=generator).to(dtype).requires_grad_()
        for name, heads in shapes.items()
    }
    positions = torch.cat([torch.arange(length) for length in (5, 1, 9, tokens - 15)]).unsqueeze(0)
    return {"module": LAYER, **numbers, "attention_mask": None, "position_ids": positions}


def attend_and_differentiate(given):
    out, nothing = attention.attend(**given)
    assert nothing is None and out.shape == (1, 27, 4, 8)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return out, *torch.autograd.grad((out * weights).sum(), [given[name] for name in ("query", "key", "value")])


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_gpus_call_fits_torch_2_11_and_means_what_sdpa_computes(request, groups, window, scaling):
    given = arguments(groups) | {"sliding_window": window, "scaling": scaling}
    expected = attend_and_differentiate(given)
    calls = request.getfixturevalue("calls")
    found = attend_and_differentiate(given)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()  # bfloat16
    ((args, kwargs),) = calls
    inspect.signature(varlen_attn).bind(*args, **kwargs)  # of the torch that is installed


def test_the_kernel_gets_the_precision_of_autocast_and_no_float32(calls):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attention.attend(**arguments(dtype=torch.float32))
    assert out.dtype == torch.bfloat16 and {tensor.dtype for tensor in calls[0][0][:3]} == {torch.bfloat16}
    with pytest.raises(
        ValueError,
        match="torch_varlen in torch.float32: .* bfloat16 or float16. Leave actor.fsdp_con",
    ):
        attention.attend(**arguments(dtype=torch.float32))


def layer(**changes):
    return SimpleNamespace(**(vars(LAYER) | changes))


PACKED = "takes packed sequences with one position per token. Set actor_rollout_ref.model.use_remove_padding=true"
NOT_EAGER = "for a model whose attention has {}: set attn_implementation=eager"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention_mask": torch.ones(1, 1, 27, 27)}, PACKED),
        ({"position_ids": None}, PACKED),
        ({"position_ids": torch.arange(27).expand(3, 1, 27)}, PACKED),
        ({"query": torch.zeros(1, 4, 1, 8), "position_ids": torch.tensor([[26]])}, PACKED),  # with a cache of keys
        ({"dropout": 0.1}, "with attention_dropout=0.1: set actor_rollout_ref.model.override_config.attention_dropout"),
        ({"softcap": 50.0}, NOT_EAGER.format("a softcap")),
        ({"s_aux": torch.zeros(4)}, NOT_EAGER.format("sinks")),
        ({"prefix_grouper": object()}, NOT_EAGER.format("verl's prefix grouper")),
        ({"is_causal": False}, NOT_EAGER.format("all tokens")),
        ({"module": layer(is_causal=False)}, NOT_EAGER.format("all tokens")),
        ({"module": layer(config=SimpleNamespace(attention_chunk_size=8))}, NOT_EAGER.format("chunks")),
        (arguments(size=12), "with heads of 12 and 12 numbers: torch's kernel takes equal multiples of 8 up to 256"),
        (arguments(size=264), "with heads of 264 and 264 numbers"),
        ({"value": torch.zeros(1, 2, 27, 16)}, "with heads of 8 and 16 numbers"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(changes, said):
    attention.attend(**arguments())
    with pytest.raises(ValueError) as error:
        attention.attend(**arguments() | changes)
    assert str(error.value).startswith("invalid attn_implementation=torch_varlen") and said in str(error.value)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": 16}, "with heads of 4 numbers"),
        ({"head_dim": 264}, "with heads of 264 numbers"),
        (
            {"attention_dropout": 0.1},
            "with attention_dropout=0.1: set actor_rollout_ref.model.override_config.attention",
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "for a model whose attention has a softcap, which it would drop: set attn_im",
        ),
        ({"qk_rope_head_dim": 32}, "for a model whose queries and values have heads of two sizes: set attn_impl"),
        ({"vision_config": {}}, "for a vision-language model, whose tokens have several positions each: set attn_impl"),
    ],
)
def test_a_model_is_refused_by_its_config(changes, said):
    config = Qwen2Config(hidden_size=64, num_attention_heads=4)
    attention.refuse_model(config, packed=True)
    with pytest.raises(
        ValueError, match="use_remove_padding=false: set actor_rollout_ref.model.use_remove_padding=true"
    ):
        attention.refuse_model(config, packed=False)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as error:
        attention.refuse_model(config, packed=True)
    assert str(error.value).startswith(f"invalid attn_implementation=torch_varlen {said}")


def test_dropout_is_refused_in_training_alone():
    with pytest.raises(ValueError, match="with attention_dropout=0.1"):
        attention.attend(**arguments() | {"dropout": 0.1})
    evaluated, _ = attention.attend(**arguments() | {"dropout": 0.1, "module": layer(training=False)})
    assert torch.equal(evaluated, attention.attend(**arguments())[0])


def test_sequence_parallelism_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="on 2 sequence-parallel GPUs, .*ulysses_sequence_parallel_size=1, or install"):
        attention.attend(**arguments())


def test_a_padded_batch_is_refused():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=PACKED):
        make_model(attention.NAME)(tokens, attention_mask=mask, use_cache=False)
