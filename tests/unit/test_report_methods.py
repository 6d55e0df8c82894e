# SPDX-License-Identifier: Apache-2.0
"""The report's closed forms are autograd of verl's own losses, token by token, and M2PO's of its Algorithm 1."""

from dataclasses import asdict

import pytest
import torch

from recipe.bapo.report.methods import CISPO, DPPOKL, DPPOTV, GSPO, M2PO, SAPO, TOPR, Bounds, Tokens, loss_of_run
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

ROWS, WIDTH = 64, 12


def make(spread, seed=1, level=0.0):
    """Responses of different lengths, padded; ``level`` shifts the log-ratios of whole responses."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, ROWS, WIDTH, generator=generator)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator) ** 2 - 1e-4
    log_prob = (old + spread * normal[0] + level * normal[1, :, :1]).clamp(max=-1e-5)
    log_prob[0, 0], log_prob[1, 0], old[1, 0] = old[0, 0] - 25, -1e-3, -30  # beyond the limit on the log-ratio
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    return old, log_prob, advantages, mask


def tokens_of(old, log_prob, advantages, mask):
    mean = ((log_prob - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return Tokens(*(tensor[mask] for tensor in (old, log_prob, advantages, mean.expand_as(old))))


def autograd_of_verl(loss_mode, batch, settings):
    """What stands before -A in the gradient of verl's function."""
    old, log_prob, advantages, mask = batch
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    leaf = log_prob.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(loss_mode)(old, leaf, advantages, mask.float(), "token-sum", config)
    (gradient,) = torch.autograd.grad(loss, leaf)
    if loss_mode == "sapo":  # it takes the mean over responses of the means over tokens, whatever it is told
        gradient = gradient * mask.sum(1, keepdim=True) * len(mask)
    return -(gradient / advantages)[mask]


def check(factor, expected, without=None):
    """``without``: whether the tokens must be of both kinds, with and without a gradient."""
    assert torch.allclose(factor, expected, rtol=1e-4, atol=1e-7) and factor.min() >= 0 < factor.max()
    assert torch.equal(factor == 0, expected == 0)
    assert without is None or (0 < (factor == 0).float().mean() < 1) == without


CASES = {
    "GRPO": ("vanilla", Bounds(0.8, 1.2, 3.0), dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)),
    "no dual clip": ("vanilla", Bounds(0.8, 3.0), dict(clip_ratio_low=0.2, clip_ratio_high=2.0, clip_ratio_c=1e9)),
    **{
        f"{loss_mode} {number}": (loss_mode, loss, asdict(loss))
        for loss_mode, losses in {
            "gspo": (GSPO(), GSPO(0.2, 0.3)),
            "sapo": (SAPO(), SAPO(2.0, 0.5)),
            "cispo": (CISPO(), CISPO(0.3, 2.0)),
            "dppo_tv": (DPPOTV(), DPPOTV(0.05, 0.3, 3.0)),
            "dppo_kl": (DPPOKL(), DPPOKL(0.2, 0.01, 3.0)),
        }.items()
        for number, loss in enumerate(losses)
    },
}


@pytest.mark.parametrize("spread, level", [(0.02, 0.0), (0.7, 0.0), (3.0, 5.0)])
@pytest.mark.parametrize("case", CASES)
def test_a_factor_is_autograd_of_verls_own_loss(case, spread, level):
    loss_mode, loss, settings = CASES[case]
    batch = make(spread, level=level)
    without = None if spread == 0.02 else loss_mode != "cispo"
    check(loss.factor(tokens_of(*batch)), autograd_of_verl(loss_mode, batch, settings), without)


def autograd_of_m2po(batch):
    """Algorithm 1: drop the outward token with the largest (log r)^2 until the mean of the others is in the budget."""
    old, log_prob, advantages, mask = batch
    leaf = log_prob.clone().requires_grad_()
    log_ratio = torch.clamp(leaf - old, -20, 20)
    outward = mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    squares = {tuple(place): log_ratio[tuple(place)].item() ** 2 for place in outward.nonzero().tolist()}
    kept = mask.clone()
    while squares and sum(squares.values()) / len(squares) > 0.04:
        worst = max(squares, key=squares.get)
        kept[worst] = False
        del squares[worst]
    (-log_ratio.exp() * advantages * kept).sum().backward()
    return -(leaf.grad / advantages)[mask]


@pytest.mark.parametrize("spread", [0.02, 0.3, 3.0])
def test_m2po_is_autograd_of_its_algorithm(spread):
    batch = make(spread)
    tokens = tokens_of(*batch)
    parts = [Tokens(*(part[k::3] for part in vars(tokens).values())) for k in range(3)]  # of one update
    factor = M2PO().in_update(None, parts).factor(tokens)
    check(factor, autograd_of_m2po(batch), True)
    assert spread < 3 or (factor == 0).float().mean() > 0.3


def test_topr_is_autograd_of_its_weighted_log_likelihood():
    old, log_prob, advantages, mask = batch = make(0.7)
    leaf = log_prob.clone().requires_grad_()
    weight = torch.where(advantages > 0, 1.0, (log_prob - old).clamp(-20, 20).exp().clamp(max=1))
    (-weight * advantages * leaf)[mask].sum().backward()
    check(TOPR().factor(tokens_of(*batch)), -(leaf.grad / advantages)[mask], False)


def test_the_loss_of_a_run_is_read_from_its_metadata():
    low_high = {"clip_ratio_low": "0.2", "clip_ratio_high": "0.28"}
    assert loss_of_run({"loss_mode": "vanilla", **low_high, "clip_ratio_c": "3.0"}) == Bounds(0.8, 1.28, 3.0)
    assert loss_of_run({"loss_mode": "gspo", "clip_ratio": "0.2", "clip_ratio_high": "0.28"}) == GSPO(0.2, 0.28)
    assert loss_of_run({"loss_mode": "dppo_tv", **low_high, "clip_ratio_c": "20"}) == DPPOTV(0.2, 0.28, 20.0)
    assert loss_of_run({"loss_mode": "sapo", "tau_pos": "1.0", "tau_neg": "1.2"}) == SAPO(1.0, 1.2)
    for too_little in ({}, {"loss_mode": "vanilla"}, {"loss_mode": "gspo"}, {"loss_mode": "geo_mean", **low_high}):
        assert loss_of_run(too_little) is None
