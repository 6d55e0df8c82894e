# SPDX-License-Identifier: Apache-2.0
"""The study's batched losses equal verl's and the project's in each run, in loss and gradient."""

import pytest
import torch

from bapo import collect_clip_statistics, search_clip_bounds
from scripts.study.methods import VERL, Tokens, config_of, find_bounds, loss_of, search
from scripts.study.plan import LABELS
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

RUNS = 3
SEARCHING = [name for name in LABELS if name.startswith("bapo")]
OF_VERL = [name for name in LABELS if name.partition("@")[0] in VERL]


def random_tokens(spread=0.7, seed=1, runs=RUNS):
    """Make responses of different lengths. Every run has another number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(runs, 16, 6, generator=generator)
    new = (old + spread * torch.randn(runs, 16, 6, generator=generator)).clamp(max=-1e-3).requires_grad_()
    advantages = torch.randn(runs, 16, 1, generator=generator).expand(-1, -1, 6)
    length = torch.randint(1, 7, (runs, 16, 1), generator=generator)
    return Tokens(old, new, advantages, torch.arange(6) < length)


def project_search(tensors, config, dual_clip):
    """Find the bounds with the project's own search."""
    return search_clip_bounds(collect_clip_statistics(*tensors, config, clip_ratio_c=dual_clip), config)


def gradients(method, tokens, dual_clip=None):
    """Compute the loss of all runs at once, and its gradient with respect to ``log_prob``."""
    loss = loss_of(method, tokens, find_bounds(method, tokens, dual_clip), dual_clip)
    return loss.item(), torch.autograd.grad(loss, tokens.log_prob)[0]


@pytest.mark.parametrize("method", OF_VERL)
def test_a_loss_of_verl_is_its_own_function_run_by_run(method):
    tokens = random_tokens()
    loss, gradient = gradients(method, tokens)
    base, _, options = method.partition("@")
    settings = VERL[base] | {key: float(value) for key, value in (s.split("=") for s in options.split(",") if s)}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    total = 0.0
    for run in range(RUNS):
        old, new, advantages, mask = tokens.of_run(run)
        new.requires_grad_()
        mode = settings.get("loss_agg_mode", "token-mean")
        alone, _ = get_policy_loss_fn(base)(old, new, advantages, mask.float(), mode, config)
        alone.backward()
        assert new.grad.abs().sum() > 0
        assert torch.allclose(gradient[run], new.grad, rtol=1e-4, atol=1e-7)
        total += alone.item()
    assert loss == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("method", [*SEARCHING, "bapo_gradient@0.4", "authors_code", "paper_octothinker@0.4"])
def test_the_search_is_the_projects_own(method, dual_clip):
    config, ways = config_of(method), set()
    for spread in (0.0, 0.2, 1.0, 3.0):
        tokens = random_tokens(spread, runs=8)
        shifted = tokens.advantages + torch.linspace(-1, 1.5, 8).view(8, 1, 1)
        tokens = Tokens(tokens.old_log_prob, tokens.log_prob, shifted, tokens.mask)
        found = search(tokens, config, dual_clip)
        for run in range(8):
            bounds = project_search(tokens.of_run(run), config, dual_clip)
            for name in ("low", "high", "search_steps", "saturated"):
                assert getattr(bounds, name).item() == found[name][run].item(), name
            for name in ("positive_contribution", "positive_contribution_start"):
                assert getattr(bounds, name).item() == pytest.approx(found[name][run].item(), abs=1e-12)
            ways.add((bounds.search_steps.item() > 0, bounds.saturated.item()))
    assert len(ways) >= 2


@pytest.mark.parametrize("spread", [0.7, 0.05])
def test_topr_is_autograd_of_its_weighted_log_likelihood(spread):
    tokens = random_tokens(spread)
    _, gradient = gradients("topr", tokens, dual_clip=3.0)  # which it ignores
    for run in range(RUNS):
        old, new, advantages, mask = tokens.of_run(run)
        new = new.detach().requires_grad_()
        weight = torch.where(advantages > 0, 1.0, (new - old).detach().exp().clamp(max=1))
        (-weight * advantages * new)[mask].sum().div(mask.sum()).backward()
        assert torch.allclose(gradient[run], new.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("spread", [0.7, 0.05])
def test_m2po_is_autograd_of_its_algorithm(spread):
    """Algorithm 1 drops the outward token with the largest (log r)^2 until the mean of the others is in the budget."""
    tokens = random_tokens(spread)
    _, gradient = gradients("m2po", tokens, dual_clip=3.0)  # which it ignores
    for run in range(RUNS):
        old, new, advantages, mask = tokens.of_run(run)
        new = new.detach().requires_grad_()
        log_ratio = new - old
        outward = mask & (log_ratio * advantages > 0)
        squares = {tuple(place): log_ratio[tuple(place)].item() ** 2 for place in outward.nonzero().tolist()}
        kept = mask.clone()
        while squares and sum(squares.values()) / len(squares) > 0.04:
            worst = max(squares, key=squares.get)
            kept[worst] = False
            del squares[worst]
        (-log_ratio.exp() * advantages * kept).sum().div(mask.sum()).backward()
        assert torch.allclose(gradient[run], new.grad, rtol=1e-4, atol=1e-7)
        assert (kept != mask).any() == (spread == 0.7)
