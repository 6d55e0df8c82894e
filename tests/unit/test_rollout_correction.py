# SPDX-License-Identifier: Apache-2.0
"""verl's rollout correction beside BAPO, as docs/algorithm.md's table has it: verl's own functions and ours."""

import pytest
import torch
from omegaconf import OmegaConf
from support.actor import actor_config
from support.batches import make_batch, values_found

from bapo import BAPOConfig, find_clip_bounds, read_values
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, compute_policy_loss_bapo
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

CONFIG = BAPOConfig(contribution="gradient", positive_contribution_target=0.5)


def corrected(batch, **settings):
    """The mask and the weights that verl makes of a batch whose sampler was another policy."""
    old, _, _, mask = batch
    sampler = old + 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    data = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": sampler, "response_mask": mask.long()})
    data, _ = compute_rollout_correction_and_add_to_batch(data, OmegaConf.create(settings))
    weights = data.batch["rollout_is_weights"] if "rollout_is_weights" in data.batch else None
    return data.batch["response_mask"].bool(), weights


def loss_of(batch, weights=None):
    """Our loss, and the bounds that it used."""
    config = actor_config(BAPOPolicyLossConfig())
    config.policy_loss.current_bounds = find_clip_bounds(*batch, CONFIG, clip_ratio_c=3.0)
    loss, _ = compute_policy_loss_bapo(*batch, config=config, rollout_is_weights=weights)
    return loss.item(), read_values(*config.policy_loss.current_bounds)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_change_the_loss_and_not_the_bounds(level):
    batch = make_batch(3)
    mask, weights = corrected(batch, rollout_is=level, rollout_is_threshold=2.0)
    assert torch.equal(mask, batch[3]) and weights.max() > 1 > weights[mask].min()
    plain, bounds = loss_of(batch)
    weighted, same = loss_of(batch, weights)
    assert weighted != pytest.approx(plain, rel=1e-3) and same == bounds
    assert bounds["search_steps"] > 0  # a search that the weights could have moved
    moved = values_found(batch[0], batch[1], batch[2] * weights, mask, CONFIG, clip_ratio_c=3.0)
    assert moved["positive_contribution"] != pytest.approx(bounds["positive_contribution"], rel=1e-3)


def test_rejected_tokens_count_neither_in_the_loss_nor_in_rho():
    batch = make_batch(3)
    mask, weights = corrected(batch, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    assert weights is None and 0 < mask.sum() < batch[3].sum()
    kept = (*batch[:3], mask)
    spoiled = [torch.where(mask, tensor, torch.nan) for tensor in batch[:3]]
    assert loss_of((*spoiled, mask)) == loss_of(kept) and loss_of(kept)[1] != loss_of(batch)[1]
