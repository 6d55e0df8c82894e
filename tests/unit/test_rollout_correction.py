# SPDX-License-Identifier: Apache-2.0
"""verl's rollout correction beside BAPO, row by row of docs/algorithm.md's table: verl's own functions and ours."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from support.actor import actor_config
from support.batches import make_batch, values_found
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

import verl.trainer.ppo.v1.trainer_base as trainer_base
from bapo import BAPOConfig, find_clip_bounds, read_values
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, compute_policy_loss_bapo
from recipe.bapo.records.tokens import read_dump, write_dump
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


def test_nothing_set_changes_nothing():
    batch = make_batch(3)
    mask, weights = corrected(batch)
    assert weights is None and torch.equal(mask, batch[3])


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


class Store(dict):
    """Stands for verl's TransferQueue: what was put can be got."""

    def kv_batch_get(self, keys, partition_id, select_fields):
        return TensorDict({name: self[name] for name in select_fields if name in self}, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.update(fields.items())
        return "put"


def test_in_bypass_mode_the_ratio_is_against_the_sampler_and_there_are_no_weights(monkeypatch):
    rows = [torch.arange(3.0), torch.arange(2.0)]
    nested = {
        name: torch.nested.as_nested_tensor([scale * row for row in rows], layout=torch.jagged)
        for name, scale in (("rollout_log_probs", -1.0), ("rm_scores", 1.0))
    }
    mask = torch.nested.as_nested_tensor([torch.ones_like(row) for row in rows], layout=torch.jagged)
    store = Store(nested, uid=NonTensorStack("a", "a"), response_mask=mask)
    monkeypatch.setattr(trainer_base, "tq", store)
    config = OmegaConf.create(
        {
            "algorithm": {
                "rollout_correction": {"bypass_mode": True, "rollout_is": "token", "rollout_rs": "token_k1"},
                "use_kl_in_reward": False,
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
            },
            "actor_rollout_ref": {"rollout": {"n": 2}},
        }
    )
    batch = trainer_base.KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0"], tags=[{}, {}])
    trainer = SimpleNamespace(config=config)
    metrics = {}
    trainer_base.PPOTrainer._compute_old_log_prob(trainer, batch, metrics)
    assert [row.tolist() for row in store["old_log_probs"].unbind()] == [[0, -1, -2], [0, -1]]
    trainer_base.PPOTrainer._compute_advantage(trainer, batch, metrics)
    assert "advantages" in store and "rollout_is_weights" not in store and metrics == {}
    config.algorithm.rollout_correction = {"bypass_mode": False, "rollout_is": "token"}
    trainer_base.PPOTrainer._compute_advantage(trainer, batch, metrics)
    assert "rollout_is_weights" in store


def test_a_dump_holds_the_weights(tmp_path):
    batch = make_batch(3)
    _, weights = corrected(batch, rollout_is="token")
    write_dump(tmp_path, *batch, {}, rollout_is_weights=weights)
    ((tokens,),) = read_dump(tmp_path)
    assert torch.equal(tokens["rollout_is_weights"], weights[batch[3]])
