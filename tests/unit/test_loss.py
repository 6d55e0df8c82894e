# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate: by hand, its gradient, and what is under the mask."""

import math

import pytest
import torch
from support.batches import make_batch

from bapo import BAPOConfig, clipped_surrogate_loss, collect_clip_statistics, search_clip_bounds


def test_three_tokens_by_hand():
    # Bounds [0.8, 1.2], dual clip 3: -A*min(r, 1.2) = -1.2 for r = 1.5, A = 1; -A*max(r, 0.8) = 1.6 for r = 0.5,
    # A = -2; -A*min(r, 3) = 3 for r = 4, A = -1. Mean (-1.2 + 1.6 + 3) / 3 = 3.4 / 3. All three are clipped.
    log_prob = torch.tensor([[1.5, 0.5, 4.0]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, -2.0, -1.0]])
    result = clipped_surrogate_loss(
        torch.zeros(1, 3), log_prob, advantages, torch.ones(1, 3), low=0.8, high=1.2, clip_ratio_c=3.0
    )
    assert result.loss.item() == pytest.approx(3.4 / 3)
    assert result.pg_clipfrac.item() == pytest.approx(2 / 3) and result.pg_clipfrac_lower.item() == pytest.approx(1 / 3)
    assert result.ppo_kl.item() == pytest.approx(-(math.log(1.5) + math.log(0.5) + math.log(4)) / 3)
    result.loss.backward()
    assert log_prob.grad.abs().max() == 0


def test_inside_the_bounds_the_gradient_is_the_ratio_times_the_advantage():
    log_prob = torch.tensor([[1.1, 0.9]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, -2.0]])
    clipped_surrogate_loss(torch.zeros(1, 2), log_prob, advantages, torch.ones(1, 2), 0.8, 1.2).loss.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.1 / 2, 2 * 0.9 / 2]]))


@pytest.mark.parametrize("seed", range(30))
def test_the_gradient_contribution_is_the_autograd_sum(seed):
    config = BAPOConfig(contribution="gradient", token_weight="uniform", positive_contribution_target=0.6)
    old, log_prob, advantages, mask = make_batch(seed, dtype=torch.float64)
    statistics = collect_clip_statistics(old, log_prob, advantages, mask, config, clip_ratio_c=3.0)
    bounds = search_clip_bounds(statistics, config)
    log_prob.requires_grad_()
    clipped_surrogate_loss(
        old, log_prob, advantages, mask, bounds.low, bounds.high, 3.0, aggregate=lambda loss, mask: loss.sum()
    ).loss.backward()
    p = log_prob.grad.abs()[advantages > 0].sum().item()
    n = log_prob.grad.abs()[advantages < 0].sum().item()
    assert bounds.positive_contribution.item() == pytest.approx(p / (p + n), rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_value_contribution_is_the_share_of_the_loss(seed):
    config = BAPOConfig(token_weight="uniform", positive_contribution_target=0.6)
    old, log_prob, advantages, mask = make_batch(seed, dtype=torch.float64)
    bounds = search_clip_bounds(collect_clip_statistics(old, log_prob, advantages, mask, config), config)

    def part(rows):
        loss = clipped_surrogate_loss(old, log_prob, advantages, mask & rows, bounds.low, bounds.high)
        return abs(loss.loss.item()) * (mask & rows).sum().item()

    p, n = part(advantages > 0), part(advantages < 0)
    assert bounds.positive_contribution.item() == pytest.approx(p / (p + n), rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_masked_changes_neither_loss_nor_gradient(value):
    old, log_prob, advantages, mask = make_batch(2)
    weights = torch.rand(old.shape)

    def loss_and_gradient(old, log_prob, advantages, weights):
        log_prob = log_prob.clone().requires_grad_()
        loss = clipped_surrogate_loss(old, log_prob, advantages, mask, 0.7, 1.4, 3.0, rollout_is_weights=weights).loss
        loss.backward()
        return loss.item(), log_prob.grad

    loss, gradient = loss_and_gradient(old, log_prob, advantages, weights)
    spoiled = [torch.where(mask, tensor, value) for tensor in (old, log_prob, advantages, weights)]
    spoiled_loss, spoiled_gradient = loss_and_gradient(*spoiled)
    assert spoiled_loss == loss and torch.equal(spoiled_gradient, gradient)
    assert (spoiled_gradient[~mask] == 0).all()


@pytest.mark.parametrize("advantage, mask", [(0.0, 1), (1.0, 0)])
def test_nothing_to_learn_is_a_loss_of_0_that_can_be_walked_backward(advantage, mask):
    log_prob = torch.zeros(2, 3, requires_grad=True)
    loss = clipped_surrogate_loss(
        torch.zeros(2, 3), log_prob, torch.full((2, 3), advantage), torch.full((2, 3), mask), 0.6, 1.2
    ).loss
    loss.backward()
    assert loss.item() == 0 and (log_prob.grad == 0).all()


def test_the_gradient_per_token_does_not_depend_on_the_cut():
    old, log_prob, advantages, mask = make_batch(4, rows=6)
    tokens = mask.sum()

    def gradient(pieces):
        leaf = log_prob.clone().requires_grad_()
        total = 0.0
        for rows in torch.arange(6).tensor_split(pieces):
            loss = clipped_surrogate_loss(
                old[rows],
                leaf[rows],
                advantages[rows],
                mask[rows],
                torch.tensor(0.7, dtype=torch.float64),
                torch.tensor(1.4, dtype=torch.float64),
                3.0,
                aggregate=lambda loss, mask: torch.where(mask, loss, 0).sum() / tokens,
            ).loss
            loss.backward()
            total += loss.item()
        return total, leaf.grad

    whole, whole_gradient = gradient(1)
    for pieces in (2, 3, 6):
        total, cut = gradient(pieces)
        assert torch.equal(cut, whole_gradient)
        assert total == pytest.approx(whole, rel=1e-6)


def test_only_the_policy_gets_a_gradient():
    old, advantages = torch.zeros(1, 2, requires_grad=True), torch.tensor([[1.0, -2.0]], requires_grad=True)
    log_prob = torch.tensor([[0.05, -0.05]], requires_grad=True)
    clipped_surrogate_loss(old, log_prob, advantages, torch.ones(1, 2), 0.8, 1.2).loss.backward()
    assert log_prob.grad.abs().min() > 0 and old.grad is None and advantages.grad is None


def test_a_second_derivative_is_that_of_the_loss():
    # Inside the bounds the loss is -A * exp(log_prob - old), which is its own second derivative.
    log_prob = torch.tensor([[1.1, 0.9, 1.5]]).log().requires_grad_()
    advantages, mask = torch.tensor([[1.0, -2.0, 1.0]]), torch.ones(1, 3)
    loss = clipped_surrogate_loss(torch.zeros(1, 3), log_prob, advantages, mask, 0.8, 1.2).loss
    (gradient,) = torch.autograd.grad(loss, log_prob, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), log_prob)
    torch.testing.assert_close(second, torch.tensor([[-1.1 / 3, 2 * 0.9 / 3, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_beyond_the_range_of_float32_make_a_finite_loss(dtype):
    advantages = torch.tensor([[1e200, -1e200]], dtype=torch.float64)
    log_prob = torch.tensor([[0.1, 0.0]], dtype=dtype)
    result = clipped_surrogate_loss(torch.zeros(1, 2, dtype=dtype), log_prob, advantages, torch.ones(1, 2), 0.8, 1.2)
    assert result.loss.item() == pytest.approx(-1e200 * (math.exp(0.1) - 1) / 2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_lose_nothing_beyond_their_inputs(dtype):
    for seed in range(5):
        old, log_prob, advantages, mask = make_batch(seed, dtype=dtype)
        found, expected = (
            clipped_surrogate_loss(*(tensor.to(kind) for tensor in (old, log_prob, advantages)), mask, 0.8, 1.2, 3.0)
            for kind in (dtype, torch.float32)
        )
        for name, value in vars(expected).items():
            assert torch.equal(getattr(found, name), value), name


def test_a_dual_clip_that_is_not_above_1_is_refused():
    with pytest.raises(ValueError, match="clip_ratio_c=1.0"):
        clipped_surrogate_loss(*make_batch(0), low=0.8, high=1.2, clip_ratio_c=1.0)


def test_the_bounds_the_search_tries_are_around_1():
    config = BAPOConfig()
    assert config.lower.points().max() < 1 < config.upper.points().min()


def softmax_policy(seed):
    """Logits of a policy, and a batch in which each of 8 tokens is as frequent as its old probability, ``(1, N)``."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.randint(1, 40, (8,), generator=generator)
    old = (frequency.double() / frequency.sum()).log()
    logits = old + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old, advantages, torch.arange(8).repeat_interleave(frequency)[None]


def change_of_entropy(logits, step, size=1e-5):
    """Per unit of step, from both sides."""
    entropies = [
        torch.distributions.Categorical(logits=logits.detach() + sign * size * step).entropy() for sign in (1, -1)
    ]
    return ((entropies[0] - entropies[1]) / (2 * size)).item()


def test_the_entropy_covariance_predicts_the_change_of_entropy():
    signs = set()
    for seed in range(50):
        logits, old, advantages, tokens = softmax_policy(seed)
        log_prob = logits.log_softmax(0)
        batch = old[tokens], log_prob[tokens], advantages[tokens], torch.ones_like(tokens)
        found = clipped_surrogate_loss(*batch, low=0.8, high=1.2)
        ratio = (log_prob - old).exp()
        kept = torch.where((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8), 0, advantages).detach()
        # Eq. 6 is of the natural policy gradient, whose step moves the logits by the advantage.
        by_natural_gradient = change_of_entropy(logits, kept)
        assert by_natural_gradient == pytest.approx(-found.entropy_covariance.item(), rel=1e-4, abs=1e-8)
        # The gradient of the loss has a factor pi more, as in Proposition 1.
        (gradient,) = torch.autograd.grad(found.loss, logits)
        policy = log_prob.detach().exp()
        step = policy * (kept - (policy * kept).sum())
        torch.testing.assert_close(-gradient, step)
        mean = (policy * log_prob.detach()).sum()
        by_gradient = change_of_entropy(logits, step)
        assert by_gradient == pytest.approx(
            -(policy * (log_prob.detach() - mean) * step).sum().item(), rel=1e-4, abs=1e-8
        )
        signs.add((by_natural_gradient > 0, by_gradient > 0))
    assert len(signs) == 4  # the two can differ in sign: docs/algorithm.md


def test_the_entropy_covariance_of_no_tokens_is_0():
    log_prob = torch.full((2, 3), math.nan)
    found = clipped_surrogate_loss(log_prob, log_prob, log_prob, torch.zeros(2, 3), 0.8, 1.2)
    assert found.entropy_covariance.item() == 0


def test_what_is_masked_does_not_enter_the_entropy_covariance():
    batch = make_batch(4, masked=0, dtype=torch.float64)
    padded = [
        torch.nn.functional.pad(tensor, (0, 5), value=value)
        for tensor, value in zip(batch, [math.nan] * 3 + [False], strict=True)
    ]
    found = [clipped_surrogate_loss(*tensors, 0.8, 1.2).entropy_covariance.item() for tensors in (batch, padded)]
    assert found[0] == pytest.approx(found[1]) and abs(found[0]) > 1e-2
