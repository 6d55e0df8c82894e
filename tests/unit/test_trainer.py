# SPDX-License-Identifier: Apache-2.0
"""What our trainer adds to verl's: marks on batches, the order of a batch, and the share of responses that arrived."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from support.metrics import METRICS
from transfer_queue import KVBatchMeta

import verl  # noqa: F401  loads the plugin
from recipe.bapo.hook.marks import ON_POLICY_FIRST_UPDATE, STEP
from recipe.bapo.run.trainer import _BAPOTrainer
from verl.trainer.ppo.v1.utils import MetricsAggregator


class Parent:
    """Replaces verl's trainer in the two methods that ours extends."""

    def __init__(self, mode, bypass, local_trigger_step):
        self.trainer_mode, self.local_trigger_step, self.parameter_sync_step = mode, local_trigger_step, 4
        self.global_steps, self.prompts = 6, 2
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "actor": {"ppo_mini_batch_size": 1, "ppo_epochs": 2, "policy_loss": {}},
                    "rollout": {"n": 2},
                },
                "algorithm": {"rollout_correction": None if bypass is None else {"bypass_mode": bypass}},
                "watchdog": {"min_arrived": 0.5},
            }
        )

    def _update_actor(self, batch, metrics):
        metrics["actor/entropy_loss"] = 0.7
        return batch

    def _balance_batch(self, batch, metrics, logging_prefix="global_seqlen"):
        return list(batch.keys)

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        keys = ["a_0_0", "a_1_0", "b_0_0"]
        self._balance_batch(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 3), metrics)


class Trainer(_BAPOTrainer, Parent):
    pass


def make_batch():
    return SimpleNamespace(extra_info={}, tags=[{"min_global_steps": 3, "max_global_steps": 3}])


@pytest.mark.parametrize(
    "mode, bypass, local_trigger_step, marked",
    [
        ("sync", False, 0, True),
        ("sync", None, 0, True),
        ("sync", True, 0, False),
        ("separate_async", False, 0, True),
        ("separate_async", False, 1, False),
    ],
)
def test_a_batch_is_marked_with_step_and_current_log_probs(mode, bypass, local_trigger_step, marked):
    batch = Trainer(mode, bypass, local_trigger_step)._update_actor(make_batch(), {})
    assert batch.extra_info == {ON_POLICY_FIRST_UPDATE: marked, STEP: 6}


def test_the_entropy_is_filled_where_verl_skipped_it():
    trainer = Trainer("sync", True, 0)
    for before, after in (({}, 0.7), ({"actor/entropy": 0.4}, 0.4)):
        trainer._update_actor(make_batch(), before)
        assert before["actor/entropy"] == after


def test_the_responses_to_a_prompt_come_together_before_verl_shares_them_out():
    keys = ["b_1_0", "a_0_0", "b_0_0", "a_1_0", "pad_0_0"]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"of": key} for key in keys])
    shared_out = Trainer("sync", False, 0)._balance_batch(batch, {}, logging_prefix="a")
    assert shared_out == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "pad_0_0"]
    assert [tag["of"] for tag in batch.tags] == shared_out


def balance(mode, keys, metrics):
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys))
    return Trainer(mode, False, 0)._balance_batch(batch, metrics)


@pytest.mark.parametrize(
    "keys, arrived", [(["a_0_0", "a_1_0", "b_0_0", "b_1_0"], 1.0), (["a_0_0", "a_0_1", "b_1_0"], 0.5)]
)
def test_the_share_of_the_responses_that_arrived_is_logged(keys, arrived):
    metrics = {}
    balance("sync", keys, metrics)
    assert metrics == {"training/responses_arrived": arrived}  # the turns of a response are one


@pytest.mark.parametrize("prompts, arrived", [(2, 3 / 4), (3, 3 / 6)])
def test_the_prompts_are_those_that_verl_asks_for_in_a_call(prompts, arrived):
    """In ``separate_async`` a call has a mini-batch of them, and not ``data.train_batch_size``."""
    metrics = {}
    Trainer("separate_async", True, 0)._step_once(metrics, {}, prompts)
    assert metrics == {"training/responses_arrived": arrived}


def test_prompts_that_an_asynchronous_mode_has_replaced_count_as_lost():
    metrics = {"training/rollout_failure/evicted_samples": 2}
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    balance("colocate_async", keys, metrics)
    assert metrics["training/responses_arrived"] == 0.5
    metrics["training/rollout_failure/evicted_samples"] = 3
    with pytest.raises(RuntimeError, match="only 4 of 10 responses arrived"):
        balance("colocate_async", keys, metrics)


def test_verl_averages_our_metrics_over_the_updates_of_a_step():
    """verl adds up metrics whose name contains "sum" or "total", and takes the extreme for "max" or "min"."""
    metrics = {}
    Trainer("separate_async", True, 0)._update_actor(make_batch(), metrics)
    balance("separate_async", ["a_0_0", "b_0_0"], metrics)
    aggregator = MetricsAggregator()
    for value in (0.2, 0.4):
        aggregator.add_step_metrics({name: value for name in (*metrics, *METRICS)}, sample_count=8)
    for name, value in aggregator.get_aggregated_metrics().items():
        assert value == pytest.approx(0.3), name
