# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation=torch_varlen`` beside sdpa, the call of torch's kernel, and what is refused."""

import inspect
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


def test_a_sequence_begins_where_the_position_is_not_one_more():
    borders, longest = attention.find_borders(torch.tensor([[0, 0, 0, 1, 2, 7, 8, 0, 1]]))
    assert borders.tolist() == [0, 1, 2, 5, 7, 9] and longest == 3
    assert borders.dtype == torch.int32  # as the kernel wants


@pytest.fixture
def calls(monkeypatch):
    """Have the branch of a GPU run here, with sdpa in the kernel's place. Returns the arguments of its calls."""
    made, compute = [], attention.attend_by_sequence

    # The signature of torch 2.11.0, which requirements-cuda.txt pins: torch/nn/attention/varlen.py, line 159.
    def kernel(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        made.append(((query, key, value, cu_seq_q, cu_seq_k, max_q, max_k), (scale, window_size)))
        return compute(query, key, value, cu_seq_q, max_q, scale, window_size)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
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


@pytest.mark.parametrize("window, size", [(None, (-1, 0)), (5, (4, 0))])
def test_a_gpus_call_fits_torchs_kernel(calls, window, size):
    attention.attend(**arguments() | {"sliding_window": window, "scaling": 0.7})
    ((args, (scale, window_size)),) = calls
    inspect.signature(varlen_attn).bind(*args, scale=scale, window_size=window_size)  # of the torch that is installed
    assert [tensor.shape for tensor in args[:3]] == [(27, 4, 8)] * 3 and (scale, window_size) == (0.7, size)
    assert args[3].tolist() == args[4].tolist() == [0, 5, 6, 15, 27] and args[5] == args[6] == 12


def test_a_scaling_is_a_factor_on_the_scores():
    given = arguments(dtype=torch.float32)
    found, _ = attention.attend(**given | {"scaling": 0.7})
    expected, _ = attention.attend(**given | {"query": given["query"] * 0.7 * 8**0.5})
    torch.testing.assert_close(found, expected)


def test_the_kernel_gets_the_precision_of_autocast_and_no_float32(calls):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attention.attend(**arguments(dtype=torch.float32))
    assert out.dtype == torch.bfloat16 and {tensor.dtype for tensor in calls[0][0][:3]} == {torch.bfloat16}
    with pytest.raises(ValueError, match="torch_varlen in torch.float32"):
        attention.attend(**arguments(dtype=torch.float32))


def layer(**changes):
    return SimpleNamespace(**(vars(LAYER) | changes))


PACKED = "use_remove_padding=true"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention_mask": torch.ones(1, 1, 27, 27)}, PACKED),
        ({"position_ids": None}, PACKED),
        ({"position_ids": torch.arange(27).expand(3, 1, 27)}, PACKED),
        ({"query": torch.zeros(1, 4, 1, 8), "position_ids": torch.tensor([[26]])}, PACKED),  # with a cache of keys
        ({"dropout": 0.1}, "attention_dropout=0.1"),
        ({"softcap": 50.0}, "a softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"prefix_grouper": object()}, "verl's prefix grouper"),
        ({"is_causal": False}, "all tokens"),
        ({"module": layer(is_causal=False)}, "all tokens"),
        ({"module": layer(config=SimpleNamespace(attention_chunk_size=8))}, "chunks"),
        (arguments(size=12), "heads of 12 and 12 numbers"),
        (arguments(size=264), "heads of 264 and 264 numbers"),
        ({"value": torch.zeros(1, 2, 27, 16)}, "heads of 8 and 16 numbers"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(changes, said):
    attention.attend(**arguments())
    with pytest.raises(ValueError, match=f"invalid attn_implementation=torch_varlen.*{said}"):
        attention.attend(**arguments() | changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": 16}, "heads of 4 numbers"),
        ({"head_dim": 264}, "heads of 264 numbers"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"attn_logit_softcapping": 50.0}, "a softcap"),
        ({"qk_rope_head_dim": 32}, "heads of two sizes"),
        ({"vision_config": {}}, "a vision-language model"),
    ],
)
def test_a_model_is_refused_by_its_config(changes, said):
    config = Qwen2Config(hidden_size=64, num_attention_heads=4)
    attention.refuse_model(config, packed=True)
    with pytest.raises(ValueError, match=PACKED):
        attention.refuse_model(config, packed=False)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"invalid attn_implementation=torch_varlen.*{said}"):
        attention.refuse_model(config, packed=True)


def test_an_evaluation_draws_no_dropout():
    evaluated, _ = attention.attend(**arguments() | {"dropout": 0.1, "module": layer(training=False)})
    assert torch.equal(evaluated, attention.attend(**arguments())[0])


def test_sequence_parallelism_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1"):
        attention.attend(**arguments())


def test_a_padded_batch_is_refused():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=PACKED):
        make_model(attention.NAME)(tokens, attention_mask=mask, use_cache=False)
