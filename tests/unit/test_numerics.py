# SPDX-License-Identifier: Apache-2.0
"""With extreme numbers, bounds, losses and gradients are finite, or an error names the tensor."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from support.batches import configs, make_batch, values_found

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_and_validate

DUAL_CLIP = 3.0  # verl's default; verl refuses a run without one
OLD_LOG_PROBS = [0.0, -1e-8, -0.7, -20.0, -1e4]
LOG_RATIOS = [0.0, 1e-7, -1e-7, 0.3, -0.3, 1.0986123, 20.0, -20.0, 1e4, -1e4]
ADVANTAGES = [0.0, 1.0, -1.0, 1e-30, -1e-30, 1e30, -1e30]
UNDER_THE_MASK = [0.0, -math.inf, math.inf, math.nan, -1e4]


@st.composite
def extreme_batches(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """Generate old log-probs, log-probs, advantages and mask, ``(B, T)``. float16 gets advantages that it can hold."""
    rows, columns, dtype = draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.sampled_from(dtypes))
    count = rows * columns

    def tensor(values, dtype):
        found = draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))
        return torch.tensor(found, dtype=torch.float64).to(dtype).reshape(rows, columns)

    mask = tensor([0, 1], torch.bool) & tensor([0, 1, 1], torch.bool)[:, :1]  # some rows have no token
    old, hidden = tensor(OLD_LOG_PROBS, dtype), [tensor(UNDER_THE_MASK, dtype) for _ in range(3)]
    log_prob = (old.double() + tensor(LOG_RATIOS, torch.float64)).to(dtype)
    largest = torch.finfo(dtype).max / 100
    advantages = tensor(ADVANTAGES, torch.float64).clamp(-largest, largest).to(dtype)
    visible = (old, log_prob, advantages)
    return [torch.where(mask, seen, unseen) for seen, unseen in zip(visible, hidden, strict=True)] + [mask]


@settings(max_examples=4 * settings.default.max_examples)
@given(extreme_batches(), configs())
def test_bounds_metrics_loss_and_gradient_are_finite_and_in_range(batch, config):
    found = values_found(*batch, config, clip_ratio_c=DUAL_CLIP)
    assert all(math.isfinite(value) for value in found.values())
    assert config.ratio_lower_start <= found["low"] <= config.ratio_lower_max
    assert config.ratio_upper_start <= found["high"] <= config.ratio_upper_max
    for name in ("positive_contribution", "positive_contribution_start", "clipfrac_positive", "clipfrac_negative"):
        assert 0 <= found[name] <= 1, name
    assert found["saturated"] in (0, 1) and 0 <= found["search_steps"] <= config.upper.steps + config.lower.steps

    old, log_prob, advantages, mask = batch
    leaf = log_prob.detach().requires_grad_()
    result = clipped_surrogate_loss(old, leaf, advantages, mask, found["low"], found["high"], DUAL_CLIP)
    result.loss.backward()
    assert result.loss.isfinite() and leaf.grad.isfinite().all() and not leaf.grad[~mask].any()
    assert result.ppo_kl.isfinite() and 0 <= result.pg_clipfrac <= 1 and 0 <= result.pg_clipfrac_lower <= 1


@settings(max_examples=2 * settings.default.max_examples)
@given(extreme_batches(), st.integers(0, 2), st.randoms(), st.sampled_from([math.nan, math.inf, -math.inf]), configs())
def test_bad_tokens_are_named_and_counted(batch, index, random, value, config):
    places = batch[3].nonzero().tolist()
    assume(places)
    bad = random.sample(places, random.randint(1, len(places)))
    for row, column in bad:
        batch[index][row, column] = value
    found = find_clip_bounds(*batch, config, clip_ratio_c=DUAL_CLIP)
    name = ("old_log_prob", "log_prob", "advantages")[index]
    with pytest.raises(ValueError, match=rf": {len(bad)} in {name}\. No optimizer step was made"):
        read_and_validate(*found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.6])
def test_a_few_unusable_old_log_probs_count_as_masked(value):
    batch = make_batch(3, rows=100, masked=0)
    old, log_prob, advantages, mask = (tensor.clone() for tensor in batch)
    tokens = int(mask.sum())
    assert 1000 <= tokens < 3000
    old[0, 0], mask[0, 0] = value, False
    found = []
    for of_mask in (mask, batch[3]):
        leaf = log_prob.clone().requires_grad_()
        values = read_and_validate(*find_clip_bounds(old, leaf, advantages, of_mask, BAPOConfig()))
        loss = clipped_surrogate_loss(old, leaf, advantages, of_mask, values["low"], values["high"]).loss
        loss.backward()
        share = values.pop("masked_token_fraction")
        found.append((values, loss.item(), leaf.grad))
    (values, loss, gradient), (masked_values, masked_loss, masked_gradient) = found
    assert (masked_values, masked_loss) == (values, loss) and torch.equal(masked_gradient, gradient)
    assert gradient.any() and share == 1 / tokens
    log_prob[0, 0] = math.nan  # its gradient would be NaN, although the loss leaves the token out
    with pytest.raises(ValueError, match="1 in log_prob. No optimizer step was made"):
        read_and_validate(*find_clip_bounds(old, log_prob, advantages, batch[3], BAPOConfig()))
    log_prob[0, 0], old[1:4, 0] = 0.0, value
    with pytest.raises(ValueError, match="4 in old_log_prob. No optimizer step was made"):
        read_and_validate(*find_clip_bounds(old, log_prob, advantages, batch[3], BAPOConfig()))


def test_log_ratios_beyond_20_count_as_20_and_carry_no_gradient():
    old, log_prob = torch.zeros(1, 3), torch.tensor([[0.0, -1e4, 1e4]], requires_grad=True)
    advantages, mask = torch.tensor([[2e8, 1.0, -1.0]]), torch.ones(1, 3)
    n = math.exp(20)
    bounds, _ = find_clip_bounds(old, log_prob, advantages, mask, BAPOConfig(token_weight="uniform"))
    assert bounds.positive_contribution_start.item() == pytest.approx(2e8 / (2e8 + n), rel=1e-6)
    result = clipped_surrogate_loss(old, log_prob, advantages, mask, 0.9, 3.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx((n - 2e8) / 3, rel=1e-6)
    assert log_prob.grad[0, 0] < 0 and not log_prob.grad[0, 1:].any()
