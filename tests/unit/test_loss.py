# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate against values by hand and its definition token by token, and its link to the contribution."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import oracle
from support.batches import batches, make_batch

from bapo import BAPOConfig, clipped_surrogate_loss, collect_clip_statistics, find_clip_bounds, is_clipped
from bapo.loss import masked_mean


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


def by_definition(batch, low, high, clip_ratio_c, weights):
    """Compute loss and metrics, each as (value, size of its terms), and the gradient."""
    mask = batch[3]
    columns = [tensor.tolist() for tensor in (*oracle.response_tokens(*batch), weights[mask].double())]
    tokens, gradient = max(1, len(columns[0])), []
    losses, kl, clipped, dual_clipped = [], [], 0, 0
    for ratio, advantage, _, _, weight in zip(*columns, strict=True):
        objective, derivative = oracle.surrogate(ratio, advantage, low, high, clip_ratio_c)
        is_dual = clip_ratio_c is not None and advantage < 0 and ratio >= clip_ratio_c
        dual_clipped += is_dual
        clipped += advantage != 0 and derivative == 0 and not is_dual
        losses.append(-weight * objective / tokens)
        kl.append(-math.log(ratio) / tokens)
        gradient.append(-weight * derivative * ratio / tokens if abs(math.log(ratio)) < 19.99 else 0.0)
    return {
        "loss": (sum(losses), sum(map(abs, losses))),
        "ppo_kl": (sum(kl), sum(map(abs, kl))),
        "pg_clipfrac": (clipped / tokens, 1.0),
        "pg_clipfrac_lower": (dual_clipped / tokens, 1.0),
    }, gradient


def mean_as_in_verl(loss, mask):
    """Average like verl, which multiplies by the mask, so masked values have to be finite."""
    return (loss * mask).sum() / mask.sum().clamp(min=1)


@settings(max_examples=20 * settings.default.max_examples)
@given(
    batches(),
    st.sampled_from([None, 1.5, 3.0]),
    st.booleans(),
    st.integers(0, 2**31),
    st.sampled_from([masked_mean, mean_as_in_verl]),
)
def test_the_loss_and_its_gradient_are_their_definition(batch, clip_ratio_c, exactly_at_a_bound, seed, aggregate):
    old, log_prob, advantages, mask = batch
    generator = torch.Generator().manual_seed(seed)
    weights = torch.where(mask, 2 * torch.rand(mask.shape, generator=generator), math.nan)
    ratio = oracle.response_tokens(*batch)[0]
    low, high = 0.75, 1.25  # exact in any float type
    below, above = ratio[ratio < 0.99].tolist(), ratio[ratio > 1.01].tolist()
    if exactly_at_a_bound and below and above:
        low, high = below[0], above[0]
        clip_ratio_c = above[-1] if clip_ratio_c else None
    old.requires_grad_(), log_prob.requires_grad_(), advantages.requires_grad_()
    result = clipped_surrogate_loss(old, log_prob, advantages, mask, low, high, clip_ratio_c, weights, aggregate)
    expected, gradient = by_definition([t.detach() for t in batch], low, high, clip_ratio_c, weights)
    for name, (value, size) in expected.items():
        assert getattr(result, name).item() == pytest.approx(value, rel=0, abs=1e-5 * size), name

    result.loss.backward()
    assert old.grad is None and advantages.grad is None and not log_prob.grad[~mask].any()
    found, gradient = log_prob.grad[mask].double(), torch.tensor(gradient, dtype=torch.float64)
    rounding = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(log_prob.dtype, 1e-5)
    smallest = torch.finfo(log_prob.dtype).tiny  # below this a gradient loses bits
    torch.testing.assert_close(found, gradient, rtol=rounding, atol=smallest)


def log_probs_on(ratios, dtype):
    """Return log-probs ``(T,)`` whose ``exp`` is one of the ratios rounded to ``dtype``, where there is one."""
    ratios = torch.tensor(ratios, dtype=dtype)
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]  # adding 1 gives the next float
    steps = torch.arange(-32, 33, dtype=integer)[:, None]
    neighbours = (ratios.double().log().to(dtype).view(integer) + steps).view(dtype)
    hits = neighbours.exp() == ratios
    return neighbours.gather(0, hits.int().argmax(0)[None])[0][hits.any(0)]


def tokens_on_candidates(dtype):
    """Yield configs, and log-probs ``(T,)`` whose ratios to an old log-prob of 0 are candidates."""
    if dtype != torch.bfloat16:
        config = BAPOConfig()
        yield config, log_probs_on([*config.lower.grid().tolist(), *config.upper.grid().tolist(), 3.0], dtype)
        return
    log_probs = (torch.arange(-64, 141) / 128).to(dtype)  # exact in this type
    ratios = log_probs.float().exp().double()
    for low, high in zip(ratios[ratios < 0.99].tolist(), ratios[ratios > 1.01].tolist(), strict=False):
        fixed = dict(ratio_lower_start=low, ratio_lower_max=low, ratio_upper_start=high, ratio_upper_max=high)
        yield BAPOConfig(**fixed), log_probs


@pytest.mark.parametrize("dtype, least", [(torch.float32, 40), (torch.float64, 40), (torch.bfloat16, 10_000)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_count_and_gradient_agree_about_tokens_on_every_candidate(dtype, least, sign):
    on_a_candidate = 0
    for config, log_probs in tokens_on_candidates(dtype):
        log_prob, old = log_probs[None], torch.zeros_like(log_probs)[None]
        advantages, mask = torch.full_like(log_prob, sign), torch.ones_like(log_prob)
        stats = collect_clip_statistics(old, log_prob, advantages, mask, config, clip_ratio_c=3.0)
        on_a_candidate += log_prob.numel()
        for low, high in torch.cartesian_prod(config.lower.grid(), config.upper.grid()):
            leaf = log_prob.clone().requires_grad_()
            clipped_surrogate_loss(old, leaf, advantages, mask, low, high, clip_ratio_c=3.0).loss.backward()
            clipped = sum(stats.clipped_tokens(low, high)) + stats.sums.dual_clipped_tokens
            assert (leaf.grad == 0).sum() == clipped, (low, high)
            assert torch.equal(is_clipped(old, log_prob, advantages, low, high, 3.0), leaf.grad == 0)
    assert on_a_candidate >= least


@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_the_contribution_at_the_bounds_is_the_losss_own_share(kind):
    config = BAPOConfig(contribution=kind, token_weight="uniform", positive_contribution_target=0.6)
    for seed in range(20):
        old, log_prob, advantages, mask = make_batch(seed, dtype=torch.float64)
        clip_ratio_c = 3.0 if kind == "gradient" else None
        bounds, _ = find_clip_bounds(old, log_prob, advantages, mask, config, clip_ratio_c=clip_ratio_c)
        log_prob.requires_grad_()

        def part(rows, batch=(old, log_prob, advantages, mask), limits=(bounds.low, bounds.high, clip_ratio_c)):
            *tensors, mask = batch
            loss = clipped_surrogate_loss(
                *tensors, mask & rows, *limits, aggregate=lambda loss, mask: torch.where(mask, loss, 0).sum()
            ).loss
            return loss.abs() if kind == "value" else torch.autograd.grad(loss, tensors[1])[0].abs().sum()

        p, n = part(advantages > 0), part(advantages < 0)
        assert bounds.positive_contribution.item() == pytest.approx((p / (p + n)).item(), rel=1e-9)


def softmax_policy(seed):
    """Make logits, old log-probs and advantages of 8 tokens, and a batch ``(1, N)`` of them.

    In the batch each token is as frequent as its old probability.
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.randint(1, 40, (8,), generator=generator)
    old = (frequency.double() / frequency.sum()).log()
    logits = old + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old, advantages, torch.arange(8).repeat_interleave(frequency)[None]


def change_of_entropy(logits, step, size=1e-5):
    """Compute the change per unit of step, by central differences."""
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
        config = BAPOConfig(ratio_lower_start=0.8)  # whose search starts at these bounds
        stats = collect_clip_statistics(*batch, config)
        covariance = stats.entropy_sums(config.lower.grid()[0], config.upper.grid()[0]).covariance.item()
        ratio = (log_prob - old).exp()
        kept = torch.where((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8), 0, advantages).detach()
        # Eq. 6 is about the natural policy gradient, whose step moves the logits by the advantage.
        by_natural_gradient = change_of_entropy(logits, kept)
        assert by_natural_gradient == pytest.approx(-covariance, rel=1e-4, abs=1e-8)
        # The gradient of the loss has an additional factor pi, as in Proposition 1.
        (gradient,) = torch.autograd.grad(found.loss, logits)
        policy = log_prob.detach().exp()
        step = policy * (kept - (policy * kept).sum())
        torch.testing.assert_close(-gradient, step)
        signs.add((by_natural_gradient > 0, change_of_entropy(logits, step) > 0))
    assert len(signs) == 4  # the two can have different signs, as docs/algorithm.md says
