# SPDX-License-Identifier: Apache-2.0
"""The report's closed forms equal autograd of verl's own losses, token by token."""

import pytest
import torch

from recipe.bapo.report.methods import (
    VERL_LOSSES,
    Method,
    Tokens,
    as_published,
    loss_of_run,
    with_bounds,
)
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

ROWS, WIDTH = 64, 12


def make(spread, seed=1, level=0.0):
    """Make padded responses of different lengths; ``level`` shifts the log-ratios of whole responses."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, ROWS, WIDTH, generator=generator)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator) ** 2 - 1e-4
    log_prob = (old + spread * normal[0] + level * normal[1, :, :1]).clamp(max=-1e-5)
    log_prob[0, 0], log_prob[1, 0], old[1, 0] = old[0, 0] - 25, -1e-3, -30  # two log-ratios that are clamped
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    return old, log_prob, advantages, mask


def tokens_of(old, log_prob, advantages, mask):
    mean = ((log_prob - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return Tokens(*(tensor[mask] for tensor in (old, log_prob, advantages, mean.expand_as(old))))


def autograd_of_verl(loss_mode, batch, settings):
    """Compute the factor of -A in the gradient of verl's function."""
    old, log_prob, advantages, mask = batch
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    leaf = log_prob.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(loss_mode)(old, leaf, advantages, mask.float(), "token-sum", config)
    (gradient,) = torch.autograd.grad(loss, leaf)
    if loss_mode == "sapo":  # it always takes the mean over responses of the means over tokens
        gradient = gradient * mask.sum(1, keepdim=True) * len(mask)
    return -(gradient / advantages)[mask]


def check(factor, expected, without):
    """Compare factors with autograd; ``without``: whether some, but not all, have no gradient."""
    assert torch.allclose(factor, expected, rtol=1e-4, atol=1e-7) and factor.min() >= 0 < factor.max()
    assert torch.equal(factor == 0, expected == 0)
    assert (0 < (factor == 0).float().mean() < 1) == without


VANILLA = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
# The published settings and others.
CASES = {(loss_mode, ()): as_published(loss).settings for loss_mode, loss in VERL_LOSSES.items()}
CASES |= {
    (loss_mode, settings): dict(zip(names, settings, strict=True))
    for loss_mode, names, settings in (
        ("vanilla", VANILLA, (0.2, 0.2, 3.0)),
        ("vanilla", VANILLA, (0.2, 2.0, 1e9)),  # no dual clip
        ("gspo", VANILLA[:2], (0.2, 0.3)),
        ("sapo", ("tau_pos", "tau_neg"), (2.0, 0.5)),
        ("cispo", VANILLA[:2], (0.3, 2.0)),
        ("dppo_tv", VANILLA, (0.05, 0.3, 3.0)),
        ("dppo_kl", VANILLA, (0.2, 0.01, 3.0)),
    )
}


@pytest.mark.parametrize("spread, level", [(0.7, 0.0), (3.0, 5.0)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_factor_is_autograd_of_verls_own_loss(case, spread, level):
    loss_mode, settings = case[0], CASES[case]
    batch = make(spread, level=level)
    # Fixed bounds do not need the statistics, so there are none.
    factor = loss_of_run({"loss_mode": loss_mode, **settings}).in_update(None, 0)
    check(factor(tokens_of(*batch)), autograd_of_verl(loss_mode, batch, settings), loss_mode != "cispo")


def test_the_loss_of_a_run_is_read_from_its_metadata():
    low_high = {"clip_ratio_low": "0.2", "clip_ratio_high": "0.28"}
    assert loss_of_run({"loss_mode": "vanilla", **low_high, "clip_ratio_c": "3.0"}) == with_bounds(0.8, 1.28, 3.0)
    for loss_mode, names in (
        ("gspo", (*low_high,)),
        ("dppo_tv", (*low_high, "clip_ratio_c")),
        ("sapo", ("tau_pos", "tau_neg")),
    ):
        settings = dict.fromkeys(names, 0.25)
        about = {"loss_mode": loss_mode, **{name: str(value) for name, value in settings.items()}}
        assert loss_of_run(about) == Method(VERL_LOSSES[loss_mode], settings)
    for too_little in ({}, {"loss_mode": "vanilla"}, {"loss_mode": "gspo"}, {"loss_mode": "geo_mean", **low_high}):
        assert loss_of_run(too_little) is None
