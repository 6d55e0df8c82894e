# SPDX-License-Identifier: Apache-2.0
"""Tokens that a run wrote, and the page on what losses cut of them."""

import pytest
import torch
from support.actor import actor_config
from support.batches import make_batch

from recipe.bapo.report.losses import BAPO, LOSSES, cut_by_each
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

# The loss of verl that stands behind each name, with the keys of a run's command.
OF_VERL = {
    "PPO [0.8, 1.2]": ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)),
    "DAPO [0.8, 1.28]": ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0)),
    "GSPO [0.9997, 1.0004]": ("gspo", dict(clip_ratio_low=0.0003, clip_ratio_high=0.0004)),
    "DPPO-TV 0.15": ("dppo_tv", dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=1e4)),
    "DPPO-KL 0.05": ("dppo_kl", dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=1e4)),
    "CISPO, capped at 1.2": ("cispo", dict(clip_ratio_low=10, clip_ratio_high=0.2)),
    BAPO: ("vanilla", dict(clip_ratio_low=0.34, clip_ratio_high=0.7, clip_ratio_c=2.5)),
}


@pytest.mark.parametrize("name", [*LOSSES, BAPO])
def test_tokens_without_gradient_are_those_of_verls_function(name):
    mode, settings = OF_VERL[name]
    loss_fn, config = get_policy_loss_fn(mode), actor_config(PolicyLossConfig(loss_mode=mode), **settings)
    cut_of_signs = torch.zeros(2), torch.zeros(2)
    for seed in range(500):
        spread = (0.001, 0.1, 0.8, 2.0)[seed % 4]
        old, log_prob, advantages, mask = make_batch(seed, rows=12, spread=spread, zero_advantage=0)
        cut = cut_by_each(old, log_prob, advantages, mask, 0.66, 1.7, 2.5)[name][mask]
        leaf = log_prob.clone().requires_grad_()
        loss, _ = loss_fn(old, leaf, advantages, mask.float(), "seq-mean-token-sum", config)
        gradient = -len(old) * torch.autograd.grad(loss, leaf)[0][mask]
        advantages = advantages[mask]
        if mode == "cispo":
            assert gradient.all()
            by_autograd = torch.isclose(gradient / advantages, torch.tensor(1.2), rtol=1e-6)
        else:
            by_autograd = gradient == 0
        assert torch.equal(cut, by_autograd)
        for sign, counts in zip((1, -1), cut_of_signs, strict=True):
            counts += torch.stack([(cut & (advantages * sign > 0)).sum(), (advantages * sign > 0).sum()])
    assert all(0 < cut < tokens for cut, tokens in cut_of_signs)
