# SPDX-License-Identifier: Apache-2.0
"""Our worker on a stand-in engine: where the bounds of an update come from, and what an update stores for later."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import oracle
from support.actor import actor_config
from support.batches import make_batch
from support.metrics import METRICS
from support.stand_in import make_micro_batch, make_worker

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, collect_clip_statistics
from recipe.bapo.marks import UPDATES_MADE, pop_mark
from recipe.bapo.policy_loss import BAPOPolicyLossConfig
from recipe.bapo.scopes import MiniBatch
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

TARGET = 0.47
MODEL = SimpleNamespace(override_config={}, enable_activation_offload=False)


def batch_of_pairs(seed, masked=0.3):
    """Make a batch of twelve responses with alternating advantages of 1 and -1.

    Searches on different seeds end at many different bounds.
    """
    old, log_prob, advantages, mask = make_batch(seed, rows=12, masked=masked)
    signs = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)[:, None]
    return old, log_prob, signs.expand_as(advantages).clone(), mask


def config_of(scope):
    loss = BAPOPolicyLossConfig(bound_scope=scope, positive_contribution_target=TARGET)
    return actor_config(loss, clip_ratio_c=3.0)


def worker_with(monkeypatch, scope="previous_batch"):
    return make_worker(config_of(scope), monkeypatch, MODEL)


def set_loss(worker, scope):
    worker.set_loss_fn(partial(ppo_loss, config=config_of(scope)))


def update(worker, batch, cut=4):
    """Make one update on a padded batch, split into micro-batches of ``cut`` rows. Returns the engine's metrics."""
    parts = zip(*(tensor.split(cut) for tensor in batch), strict=True)
    return worker.engine.train_batch([make_micro_batch(*part) for part in parts], worker.loss_fn)["metrics"]


def start_batch(worker, **marks):
    """Begin a rollout batch, or continue one with ``bapo_updates_made``, as verl's trainer does."""
    worker.train_mini_batch(tu.get_tensordict(tensor_dict={}, non_tensor_dict=marks))


def bounds_of(metrics):
    (low,), (high,) = metrics["actor/bapo/clip_low"], metrics["actor/bapo/clip_high"]
    return low, high


def literal_bounds(batch):
    return oracle.sequential_search(*batch, BAPOConfig(positive_contribution_target=TARGET), 3.0)[:2]


def test_previous_batch_takes_the_bounds_of_the_same_update_of_the_batch_before(monkeypatch):
    worker = worker_with(monkeypatch)
    batches = [[batch_of_pairs(10 * number + k) for k in range(count)] for number, count in enumerate((3, 2, 3))]
    found = []
    for updates in batches:
        start_batch(worker)
        found.append([bounds_of(update(worker, batch)) for batch in updates])
    literal = [[literal_bounds(batch) for batch in updates] for updates in batches]
    assert len({bounds for updates in literal for bounds in updates}) > 4  # the searches differ
    assert found[0] == [(0.6, 1.2), *literal[0][:2]]  # first batch: the start of the ranges, then the latest search
    assert found[1] == literal[0][:2]
    assert found[2] == [*literal[1], literal[2][1]]  # the previous batch had no third update: the latest search


def test_a_rollout_batch_in_several_calls_is_one_batch(monkeypatch):
    """In ``separate_async`` a batch comes in several calls; our trainer says how many updates on it came before."""
    worker = worker_with(monkeypatch)
    found = []
    for seed in (0, 10):
        start_batch(worker)
        update(worker, batch_of_pairs(seed))
        start_batch(worker, bapo_updates_made=1)
        found.append(bounds_of(update(worker, batch_of_pairs(seed + 1))))
    first, second = (literal_bounds(batch_of_pairs(seed)) for seed in (0, 1))
    assert found == [first, second] and first != second


def test_previous_batch_does_not_depend_on_the_cut(monkeypatch):
    whole, cut = worker_with(monkeypatch), worker_with(monkeypatch)
    for seed in range(4):
        start_batch(whole), start_batch(cut)
        expected, found = update(whole, batch_of_pairs(seed), 12), update(cut, batch_of_pairs(seed), 1)
        assert bounds_of(found) == bounds_of(expected)
        for name in METRICS - {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}:
            if name != "actor/bapo/entropy_covariance":  # this one depends on the micro-batch
                assert found[name] == pytest.approx(expected[name], rel=1e-12), name


def test_what_is_logged_describes_the_update_and_the_search_that_gave_its_bounds(monkeypatch):
    worker = worker_with(monkeypatch)
    first, second = batch_of_pairs(1), batch_of_pairs(2)
    start_batch(worker)
    metrics = update(worker, first)
    assert metrics.keys() >= METRICS and len(metrics["actor/pg_clipfrac"]) == 3
    assert metrics["actor/bapo/search_steps"] == [0] and metrics["actor/bapo/saturated"] == [0]
    start_batch(worker)
    metrics = update(worker, second)
    config = BAPOConfig(positive_contribution_target=TARGET)
    low, high, _, _, steps, saturated = oracle.sequential_search(*first, config, 3.0)
    assert steps > 0
    ratio, advantages, old, _ = oracle.response_tokens(*second)
    p, n = oracle.contribution(ratio, advantages, old.exp(), low, high, "value", 3.0)
    expected = {
        "clip_low": low,
        "clip_high": high,
        "search_steps": steps,
        "saturated": float(saturated),
        "met_at_start": 0,
        "met_by_moving": float(not saturated),
        "positive_contribution": p / (p + n),
        "positive_contribution_start": oracle.sequential_search(*second, config, 3.0)[3],
        **oracle.diagnostics(*second, low, high),
    }
    for name, value in expected.items():
        assert metrics[f"actor/bapo/{name}"] == [pytest.approx(value)], name


def test_an_update_without_advantages_leaves_the_history_as_it_is(monkeypatch):
    worker = worker_with(monkeypatch)
    old, log_prob, advantages, mask = batch_of_pairs(5)
    empty = old, log_prob, torch.zeros_like(advantages), mask
    found = []
    for batches in ([batch_of_pairs(1), batch_of_pairs(3)], [empty, batch_of_pairs(9)], [batch_of_pairs(11), empty]):
        start_batch(worker)
        found.append([update(worker, batch) for batch in batches])
    bounds = [[bounds_of(metrics) for metrics in updates] for updates in found]
    first, second, later = (literal_bounds(batch_of_pairs(seed)) for seed in (1, 3, 9))
    assert len({first, second, later, (0.6, 1.2)}) == 4
    assert bounds == [[(0.6, 1.2), first], [first, second], [first, later]]
    outcomes = ("met_at_start", "met_by_moving", "saturated")
    assert [found[0][0][f"actor/bapo/{name}"] for name in outcomes] == [[0], [0], [0]]  # no search gave its bounds
    assert [found[1][0][f"actor/bapo/{name}"] for name in outcomes] == [[0], [0], [0]]  # it has nothing to measure
    assert sum(found[1][1][f"actor/bapo/{name}"][0] for name in outcomes) == 1


def test_one_collective_over_the_world_and_one_read_of_its_own(monkeypatch):
    worker = worker_with(monkeypatch)
    groups, reads = [], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: groups.append(group))
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(len(tensor)) or tolist(tensor))
    start_batch(worker)
    parts = zip(*(tensor.split(4) for tensor in batch_of_pairs(1)), strict=True)
    data = [make_micro_batch(*part) for part in parts]
    reads.clear()
    worker.engine.train_batch(data, worker.loss_fn)
    assert groups == [torch.distributed.group.WORLD]
    assert len([count for count in reads if count > 1]) == 3 + 1  # each micro-batch's loss, and the update


def test_a_rank_that_is_no_source_adds_nothing_and_logs_nothing(monkeypatch):
    worker = worker_with(monkeypatch)
    worker.engine.source = False
    start_batch(worker)
    metrics = update(worker, batch_of_pairs(1))
    assert "actor/bapo/clip_low" not in metrics
    assert worker.scope.history.latest.search_steps == 0  # without a token the target counts as met


@pytest.mark.parametrize("calls_the_loss", [False, True])
def test_a_rank_that_is_no_source_holds_the_sources_bounds(monkeypatch, calls_the_loss):
    """An earlier pipeline stage never calls the loss; a second tensor rank calls it with the tokens of the first."""
    source, other = worker_with(monkeypatch), worker_with(monkeypatch)
    other.engine.source = False
    of_source = []

    def all_reduce(vector, group):
        """Add up over the two ranks, of which the source comes first."""
        if of_source:
            # Else its tokens would count twice. Comparing bounds would not show it, because both ranks would agree.
            assert not vector.any()
            vector.add_(of_source.pop())
        else:
            of_source.append(vector.clone())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    start_batch(source), start_batch(other)
    for seed in (1, 2):
        batch = batch_of_pairs(seed)
        update(source, batch)
        if calls_the_loss:
            update(other, batch)
        else:
            other.engine.train_batch([], other.loss_fn)
        assert other.scope.history.latest == source.scope.history.latest
        assert source.scope.history.latest.search_steps > 0
    assert other.engine.steps == 2


BAD = {"old_log_prob": 0, "log_prob": 1, "advantages": 2}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_input_raises_before_the_optimizer_step_and_leaves_nothing_behind(monkeypatch, name, value):
    worker, other = worker_with(monkeypatch), worker_with(monkeypatch)
    batch = batch_of_pairs(1, masked=0)
    bad = [tensor.clone() for tensor in batch]
    bad[BAD[name]][4, 3] = value
    start_batch(worker), start_batch(other)
    with pytest.raises(ValueError, match=f"on response tokens: 1 in {name}"):
        update(worker, bad)
    assert worker.engine.steps == 0
    for seed in (2, 3):
        assert update(worker, batch_of_pairs(seed)) == update(other, batch_of_pairs(seed))


def test_invalid_input_of_another_rank_raises_here(monkeypatch):
    worker = worker_with(monkeypatch)
    old, log_prob, advantages, mask = batch_of_pairs(1, masked=0)
    advantages[4, 3] = math.nan
    bad = collect_clip_statistics(old, log_prob, advantages, mask, worker.scope.config, 3.0)
    of_other = torch.cat([tensor.flatten() for tensor in bad.sums])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: vector.add_(of_other))
    start_batch(worker)
    with pytest.raises(ValueError, match="1 in advantages"):
        update(worker, batch_of_pairs(2))
    assert worker.engine.steps == 0


def test_a_non_finite_advantage_on_a_token_that_the_bounds_clip_is_found(monkeypatch):
    worker = worker_with(monkeypatch)
    old, log_prob, advantages, mask = batch_of_pairs(1, masked=0)
    log_prob[0, 0], advantages[0, 0] = old[0, 0] + 2, math.inf  # a ratio of 7.4, far above the upper bound
    start_batch(worker)
    with pytest.raises(ValueError, match="1 in advantages"):
        update(worker, (old, log_prob, advantages, mask))
    assert worker.engine.steps == 0


def test_a_loss_that_is_only_evaluated_does_not_enter_the_statistics(monkeypatch):
    worker, other = worker_with(monkeypatch), worker_with(monkeypatch)
    start_batch(worker), start_batch(other)
    data, model_output = make_micro_batch(*make_batch(5))
    with torch.no_grad():
        worker.loss_fn(model_output=dict(model_output), data=data)
    assert worker.scope.collected is None
    for seed in (2, 3):
        assert update(worker, batch_of_pairs(seed)) == update(other, batch_of_pairs(seed))


def test_each_update_of_mini_batch_has_its_own_search(monkeypatch):
    monkeypatch.setattr(MiniBatch, "_is_one_micro_batch", lambda scope, data: True)
    worker, last = worker_with(monkeypatch, "mini_batch"), batch_of_pairs(3)
    found = [bounds_of(update(worker, batch, 12)) for batch in (batch_of_pairs(1), last)]
    assert found == [literal_bounds(batch_of_pairs(1)), literal_bounds(last)] and found[0] != found[1]


def test_a_second_loss_function_starts_from_nothing(monkeypatch):
    worker = worker_with(monkeypatch)
    start_batch(worker)
    for seed in (1, 2):
        update(worker, batch_of_pairs(seed))
    set_loss(worker, "micro_batch")
    start_batch(worker)
    assert bounds_of(update(worker, batch_of_pairs(3), 12)) == literal_bounds(batch_of_pairs(3))
    steps = worker.engine.steps
    old, log_prob, advantages, mask = batch_of_pairs(4, masked=0)
    advantages[0, 0] = math.nan
    with pytest.raises(ValueError, match="1 in advantages"):
        update(worker, (old, log_prob, advantages, mask), 12)
    assert worker.engine.steps == steps
    set_loss(worker, "previous_batch")
    start_batch(worker)
    assert bounds_of(update(worker, batch_of_pairs(5))) == (0.6, 1.2)  # no search yet
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(PolicyLossConfig())))
    assert worker.engine.train_batch == worker.verl_train_batch
    assert worker.engine.optimizer_step == worker.verl_optimizer_step


def test_a_batch_of_another_kind_has_no_marks():
    """On verl's branch neo the worker gets another proto, on which ``tu.pop`` raises a TypeError."""
    assert pop_mark(object(), UPDATES_MADE, 0) == 0
    data = tu.get_tensordict(tensor_dict={}, non_tensor_dict={UPDATES_MADE: 3})
    assert [pop_mark(data, UPDATES_MADE, 0) for _ in range(2)] == [3, 0]


def test_unusable_settings_are_refused_when_the_loss_is_set(monkeypatch):
    config = actor_config(BAPOPolicyLossConfig(), loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="sum-norm is not usable with loss_scale_factor=null"):
        make_worker(config, monkeypatch, MODEL)
