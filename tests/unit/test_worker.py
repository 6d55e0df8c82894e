# SPDX-License-Identifier: Apache-2.0
"""Our worker on a stand-in engine: where the bounds of an update come from, and what an update leaves behind."""

import math
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from support import oracle
from support.actor import actor_config
from support.batches import batch_of_pairs, make_batch
from support.metrics import METRICS
from support.stand_in import DELTA, MODEL, WHOLE, make_mini_batch, make_worker, train_call, update

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, BoundsForecaster, Forecast, collect_clip_statistics
from recipe.bapo.hook.marks import STEP, pop_mark
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils import losses
from verl.workers.utils.losses import ppo_loss, sft_loss

TARGET = 0.47
OPTIONS = BAPOConfig(positive_contribution_target=TARGET)
OFFLOAD = SimpleNamespace(override_config={}, enable_activation_offload=True)
PASSES = {"forecast": ["train"], "forward": ["forward", "train"], "redone": ["train", "train"]}


def wild_and_calm(updates):
    """Make a series of batches of which most are the one before, and every sixth is quite another."""
    return [batch_of_pairs(1 + number // 6) for number in range(updates)]


def config_of(scope="mini_batch", **options):
    loss = BAPOPolicyLossConfig(bound_scope=scope, positive_contribution_target=TARGET, **options)
    return actor_config(loss, clip_ratio_c=3.0)


def on_megatron():
    config = config_of()
    object.__setattr__(config, "strategy", "megatron")
    object.__setattr__(config, "megatron", SimpleNamespace(dynamic_context_parallel=False))
    return config


def worker_with(monkeypatch, scope="mini_batch", model=MODEL, **engine):
    return make_worker(config_of(scope), monkeypatch, model, **engine)


def bounds_of(metrics):
    (low,), (high,) = metrics["actor/bapo/clip_low"], metrics["actor/bapo/clip_high"]
    return low, high


def literal_bounds(batch):
    return oracle.sequential_search(*batch, OPTIONS, 3.0)[:2]


def make_updates(worker, batches, position=0):
    """Make updates. Returns the bounds, the kind of each (how its bounds were found), and the weight after each."""
    found = []
    for batch in batches:
        worker.engine.passes.clear()
        worker.updates_since_sent = position
        metrics = update(worker, batch)
        (kind,) = [kind for kind, passes in PASSES.items() if passes == worker.engine.passes]
        (extra_forward,), (redone,) = metrics["actor/bapo/extra_forward"], metrics["actor/bapo/redone"]
        assert (extra_forward, redone) == (kind == "forward", kind == "redone")
        found.append((bounds_of(metrics), kind, worker.engine.module.weight.item()))
    return [list(column) for column in zip(*found, strict=True)]


def always(trusted):
    """Return a ``forecast`` method that trusts every forecast or none."""
    forecast = BoundsForecaster.forecast

    def changed(forecaster, own, first):
        return Forecast(forecast(forecaster, own, first).bounds, trusted)

    return changed


def test_each_update_has_the_bounds_of_a_literal_search(monkeypatch):
    batches = wild_and_calm(48)
    found, kinds, _ = make_updates(worker_with(monkeypatch), batches, position=1)
    assert found == [literal_bounds(batch) for batch in batches] and len(set(found)) > 3
    assert {kind: kinds.count(kind) > 2 for kind in PASSES} == dict.fromkeys(PASSES, True)


@pytest.mark.parametrize("rows", [2, 5])
def test_weights_are_those_of_a_forward_before_every_update(monkeypatch, rows):
    """The model draws random numbers and counts its forwards, and both change its log-probs."""
    batches = wild_and_calm(36)
    engine = dict(rows=rows, learning_rate=0.02, noise=0.01)
    results = []
    for trusted in (None, False, True):
        torch.manual_seed(1)
        with pytest.MonkeyPatch.context() as patch:
            if trusted is not None:
                patch.setattr(BoundsForecaster, "forecast", always(trusted))
            results.append(make_updates(worker_with(monkeypatch, **engine), batches, position=1))
    (bounds, kinds, weights), *others = results
    for other_bounds, _, other_weights in others:
        assert (other_bounds, other_weights) == (bounds, weights)
    assert len(set(weights)) == len(weights) and len(set(kinds)) > 1
    assert set(others[0][1]) == {"forward"} and set(others[1][1]) == {"forecast", "redone"}


def test_the_bounds_do_not_depend_on_the_cut(monkeypatch):
    whole, cut = worker_with(monkeypatch, rows=12), worker_with(monkeypatch, rows=1)
    for old, log_prob, advantages, mask in wild_and_calm(20)[::3]:
        batch = old.double(), log_prob.double(), advantages.double(), mask
        expected, found = update(whole, batch), update(cut, batch)
        assert bounds_of(found) == bounds_of(expected)
        costs = {"actor/bapo/extra_forward", "actor/bapo/redone"}
        of_a_micro_batch = {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
        for name in METRICS - costs - of_a_micro_batch - {"actor/bapo/skipped"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.parametrize("change", [{}, {"use_dynamic_bsz": True}, {"micro_batch_size_per_gpu": 4}])
def test_a_mini_batch_that_may_be_split_needs_a_forward(monkeypatch, change):
    worker = worker_with(monkeypatch, rows=4)
    data = make_mini_batch(*batch_of_pairs(1))
    tu.assign_non_tensor(data, **{"micro_batch_size_per_gpu": 12, **change})
    if not change:
        tu.pop(data, key="use_dynamic_bsz")  # verl then splits by the number of tokens
    metrics = tu.get(worker.train_batch(data), "metrics")
    assert bounds_of(metrics) == literal_bounds(batch_of_pairs(1)) and worker.engine.passes == ["forward", "train"]


def test_only_the_forward_before_an_update_lacks_the_entropy(monkeypatch):
    worker, asked = worker_with(monkeypatch), []
    make_pass = worker.verl_forward_backward_batch

    def note(data, *args):
        asked.append(data["calculate_entropy"])
        return make_pass(data, *args)

    monkeypatch.setattr(worker, "verl_forward_backward_batch", note)
    data = make_mini_batch(*batch_of_pairs(1))
    tu.assign_non_tensor(data, calculate_entropy=True)
    worker.train_batch(data)
    assert asked == [False, True] and worker.engine.passes == ["forward", "train"]


@pytest.mark.parametrize("rows", [4, 12])  # 12: a single micro-batch
def test_an_on_policy_update_takes_every_ratio_as_1(monkeypatch, rows):
    worker, batch = worker_with(monkeypatch, rows=rows), batch_of_pairs(1)
    old, _, advantages, mask = batch
    first, second = train_call(worker, batch, batch, bapo_on_policy_first_update=True)
    assert bounds_of(first) == literal_bounds((old, old, advantages, mask)) != literal_bounds(batch)
    assert bounds_of(second) == literal_bounds(batch)  # the mark holds for the first update alone
    assert worker.engine.passes == ["train", *(["train"] if rows == 12 else ["forward", "train"])]
    # What is said of its tokens is what the loss did to them.
    expected = oracle.diagnostics(*batch, *bounds_of(first))
    assert first["actor/bapo/clipfrac_positive"] == [pytest.approx(expected["clipfrac_positive"])] != [0]


def test_first_updates_on_a_batch_are_told_to_the_forecaster(monkeypatch):
    told = []
    forecast = BoundsForecaster.forecast
    monkeypatch.setattr(
        BoundsForecaster, "forecast", lambda self, own, first: told.append(first) or forecast(self, own, first)
    )
    worker = worker_with(monkeypatch)
    for send in (WHOLE, DELTA, None, DELTA):  # separate_async makes several calls before it sends weights
        train_call(worker, batch_of_pairs(1), batch_of_pairs(2), send=send)
    assert told == [True, False, True, False, False, False, True, False]


def test_a_mark_that_cannot_be_read_ends_a_run_with_bapo(monkeypatch):
    """A rank that went on without it would make other collectives than the others, and all would wait."""
    worker = worker_with(monkeypatch)
    monkeypatch.setattr("recipe.bapo.hook.worker.pop_mark", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_call(worker)


@pytest.mark.parametrize("coefficient", [0.5, -0.5])
def test_the_entropy_moves_the_weight_by_its_coefficient(monkeypatch, coefficient):
    """Without a coefficient its backward is skipped, in which a real model holds a tensor of (tokens, vocabulary)."""
    old, log_prob, advantages, mask = batch_of_pairs(1)
    mask[1::4] = False  # else the log-probs that the weight moves up and down nearly cancel in the entropy
    weights, differentiated = [], set()
    aggregate = losses.agg_loss

    def note(loss_mat, **settings):
        differentiated.add((of_loss, loss_mat.requires_grad))
        return aggregate(loss_mat=loss_mat, **settings)

    monkeypatch.setattr(losses, "agg_loss", note)
    for of_loss in (coefficient, 0):
        config = actor_config(BAPOPolicyLossConfig(), entropy_coeff=of_loss)
        worker = make_worker(config, monkeypatch, learning_rate=0.1)
        update(worker, (old, log_prob, advantages, mask), calculate_entropy=True)
        weights.append(worker.engine.module.weight.item())
    assert differentiated == {(coefficient, True), (0, False)}
    # The entropy is minus the mean log-prob of a response token, and the weight moves log-probs by the sign of A.
    slope = -advantages[mask].mean().item()
    assert weights[0] - weights[1] == pytest.approx(0.1 * coefficient * slope, rel=1e-3)


def test_what_is_logged_describes_the_update(monkeypatch):
    worker, batch = worker_with(monkeypatch), batch_of_pairs(2)
    update(worker, batch_of_pairs(1))
    metrics = update(worker, batch)
    ours = {name for name in metrics if name.startswith("actor/bapo/")}
    assert ours <= METRICS <= metrics.keys() and len(metrics["actor/pg_clipfrac"]) == 3
    low, high, rho, start, steps, saturated = oracle.sequential_search(*batch, OPTIONS, 3.0)
    assert steps > 0
    expected = {
        "clip_low": low,
        "clip_high": high,
        "search_steps": steps,
        "saturated": float(saturated),
        "met_at_start": 0,
        "met_by_moving": float(not saturated),
        "positive_contribution": rho,
        "positive_contribution_start": start,
        "applied": 1,
        "measured": 1,
        **oracle.diagnostics(*batch, low, high),
    }
    for name, value in expected.items():
        assert metrics[f"actor/bapo/{name}"] == [pytest.approx(value)], name
    covariance = oracle.entropy_covariance(*batch, low, high, 3.0)
    assert metrics["actor/bapo/entropy_covariance"] == [pytest.approx(covariance, rel=1e-5)]


@pytest.mark.parametrize("strategy, skipped", [("fsdp2", 1), ("megatron", 0)])
def test_what_became_of_an_unusable_gradient_is_logged(monkeypatch, capsys, strategy, skipped):
    """FSDP skips the step, and Megatron makes it; tests/engines looks at the weights."""
    worker = make_worker(on_megatron() if strategy == "megatron" else config_of(), monkeypatch)
    assert update(worker, batch_of_pairs(1))["actor/bapo/skipped"] == 0
    worker.engine.optimizer_step = lambda: math.nan
    for _ in range(2):
        assert update(worker, batch_of_pairs(2))["actor/bapo/skipped"] == skipped
    told = capsys.readouterr().err.count("the gradient norm of an update was nan, and Megatron has made its step")
    assert told == (strategy == "megatron")


def test_an_update_without_advantages_keeps_the_start(monkeypatch):
    worker = worker_with(monkeypatch)
    old, log_prob, advantages, mask = batch_of_pairs(5)
    empty = old, log_prob, torch.zeros_like(advantages), mask
    found, _, _ = make_updates(worker, [batch_of_pairs(1), empty, batch_of_pairs(3)], position=1)
    assert found == [literal_bounds(batch_of_pairs(1)), (0.6, 1.2), literal_bounds(batch_of_pairs(3))]


class TwoRanks:
    """Adds up the collectives of two ranks, of which one makes its whole update before the other.

    The first rank cannot know the second's sums, so the second must have none; it then gets those of the first.
    """

    def __init__(self, monkeypatch):
        self.of_source = []
        monkeypatch.setattr(torch.distributed, "all_reduce", self)

    def __call__(self, vector, group):
        if self.playing_source:
            self.of_source.append(vector.clone())
        else:
            # Else its tokens would count twice. Comparing bounds would not show it, because both ranks would agree.
            assert not vector.any()
            vector.add_(self.of_source.pop(0))


@pytest.mark.parametrize("calls_the_loss", [False, True])
def test_a_rank_that_is_no_source_does_what_the_source_does(monkeypatch, calls_the_loss):
    """An earlier pipeline stage never calls the loss; a second tensor rank calls it with the tokens of the first."""
    source, other = worker_with(monkeypatch), worker_with(monkeypatch)
    other.engine.source, other.engine.calls_the_loss = False, calls_the_loss
    world = TwoRanks(monkeypatch)
    source.updates_since_sent = other.updates_since_sent = 1
    for batch in wild_and_calm(48):
        world.playing_source = True
        update(source, batch)
        world.playing_source = False
        assert update(other, batch) is None
        assert not world.of_source  # both took part in the same collectives
        assert other.logged == source.logged and other.scope.latest == source.scope.latest
    assert other.engine.passes == source.engine.passes and other.engine.steps == 48
    assert source.engine.passes.count("forward") > 2 and len(source.engine.passes) > 48 + 2


def test_a_pipeline_with_one_micro_batch_searches_together(monkeypatch):
    """Its earlier stages never call the loss, so they could not join a search there."""
    last, earlier = (make_worker(on_megatron(), monkeypatch, rows=12) for _ in range(2))
    earlier.engine.source = earlier.engine.calls_the_loss = False
    world = TwoRanks(monkeypatch)
    for seed in (1, 3):
        world.playing_source = True
        assert bounds_of(update(last, batch_of_pairs(seed))) == literal_bounds(batch_of_pairs(seed))
        world.playing_source = False
        assert update(earlier, batch_of_pairs(seed)) is None
        assert not world.of_source and earlier.scope.latest == last.scope.latest


BAD = {"old_log_prob": 0, "log_prob": 1, "advantages": 2}


def spoilt(name, value):
    bad = [tensor.clone() for tensor in batch_of_pairs(1, masked=0)]
    bad[BAD[name]][4, 3] = value
    return bad


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("way", ["forecast", "forward", "on policy"])
def test_bad_input_raises_before_the_step(monkeypatch, name, value, way):
    monkeypatch.setattr(BoundsForecaster, "forecast", always(way == "forecast"))
    worker = worker_with(monkeypatch)
    with pytest.raises(ValueError, match=f"on response tokens: 1 in {name}"):
        train_call(worker, spoilt(name, value), bapo_on_policy_first_update=way == "on policy")
    assert worker.engine.steps == 0
    # Advantages and old log-probs are looked at before anything is computed.
    assert worker.engine.passes == ([] if name != "log_prob" else ["forward"] if way == "forward" else ["train"])


WAYS = {
    "forecast": dict(),
    "on policy": dict(),
    "in the loss": dict(rows=48),
    "micro_batch": dict(scope="micro_batch"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.6])
def test_one_unusable_old_log_prob_in_a_large_update_is_left_out(monkeypatch, way, value):
    """Rollout engines report one now and then. A share of 0.001 of the update's tokens may have none."""
    old, log_prob, advantages, mask = make_batch(1, rows=48, columns=34, masked=0)
    old[5, 3] = value
    share = 1 / mask.sum().item()
    assert 5e-4 < share < 1e-3
    worker = worker_with(monkeypatch, **WAYS[way])
    for _ in range(4):
        marks = {"bapo_on_policy_first_update": True} if way == "on policy" else {}
        (metrics,) = train_call(worker, (old, log_prob, advantages, mask), **marks)
        assert metrics["actor/bapo/masked_token_fraction"] == [pytest.approx(share, rel=0.2)]  # micro_batch: a mean
    assert worker.engine.steps == 4
    old[6, :3] = value
    with pytest.raises(ValueError, match="on response tokens: 4 in old_log_prob"):
        update(worker, (old, log_prob, advantages, mask))
    assert worker.engine.steps == 4


def test_invalid_input_of_another_rank_raises_here(monkeypatch):
    worker = worker_with(monkeypatch)
    bad = collect_clip_statistics(*spoilt("advantages", math.nan), worker.scope.config, 3.0)
    of_other = torch.cat([tensor.flatten() for tensor in bad.sums])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: vector.add_(of_other))
    with pytest.raises(ValueError, match="1 in advantages"):
        update(worker, batch_of_pairs(2))
    assert worker.engine.steps == 0


def literal_loss(batch, low, high):
    """Compute the mean of the clipped objective over response tokens, with its sign changed."""
    ratios, advantages, *_ = (column.tolist() for column in oracle.response_tokens(*batch))
    objectives = [oracle.surrogate(*token, low, high, 3.0)[0] for token in zip(ratios, advantages, strict=True)]
    return -sum(objectives) / len(objectives)


@pytest.mark.parametrize("scope, rows", [("mini_batch", slice(None)), ("micro_batch", slice(8, None))])
def test_an_evaluation_uses_the_latest_bounds_and_counts_nothing(monkeypatch, scope, rows):
    """With micro_batch the latest bounds are those of the last four rows."""
    config = config_of(scope)
    worker, other = make_worker(config, monkeypatch), worker_with(monkeypatch, scope)
    batch, expected = batch_of_pairs(5), [(0.6, 1.2)]

    def evaluate():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", None)  # no collective: ranks may evaluate alone
            output = worker.engine.infer_batch(make_mini_batch(*batch), loss_function=worker.loss_fn)
        assert config.policy_loss.current_bounds is None  # so that no worker that finds no bounds trains with them
        return sum(output["metrics"]["actor/pg_loss"].values)

    losses = [evaluate()]
    for seed in (2, 3):
        assert update(worker, batch_of_pairs(seed)) == update(other, batch_of_pairs(seed))
        expected.append(literal_bounds([tensor[rows] for tensor in batch_of_pairs(seed)]))
        losses.append(evaluate())
    assert losses == pytest.approx([literal_loss(batch, *bounds) for bounds in expected], rel=1e-5)
    assert len({f"{loss:.4f}" for loss in losses}) == 3


def test_a_call_outside_an_update_does_what_verls_does(monkeypatch):
    """verl's Tinker worker makes forwards and backwards itself, and adds up gradients over several calls."""
    worker, plain = worker_with(monkeypatch), worker_with(monkeypatch)
    plain.set_loss_fn(partial(ppo_loss, config=actor_config(PolicyLossConfig(), clip_ratio_low=0.4, clip_ratio_c=3.0)))
    data = make_mini_batch(*batch_of_pairs(1))
    for _ in range(2):
        for one in (worker, plain):
            one.engine.forward_backward_batch(data, one.loss_fn, forward_only=False)
    assert worker.engine.passes == ["train", "train"]  # the bounds of the start are [0.6, 1.2]
    gradient = plain.engine.module.weight.grad
    assert worker.engine.module.weight.grad == gradient != 0


def raise_in(patch, worker, place, call):
    """Have a function raise in one of its calls, counted from 0: ``engine.x`` of the worker, or by its module."""
    of_worker = place.split(".")[0] in ("engine", "scope")
    original = attrgetter(place)(worker) if of_worker else resolve_name(place)
    calls = []

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) > call:
            raise ZeroDivisionError
        return original(*args, **kwargs)

    if of_worker:
        owner, name = place.rsplit(".", 1)
        patch.setattr(attrgetter(owner)(worker), name, function)
    else:
        patch.setattr(place, function)


# The ways out of an update: the kind of update, what raises, and in which of its calls.
WAYS_OUT = [
    ("forecast", "engine.optimizer_zero_grad", 0),
    ("forecast", "torch.distributed.all_reduce", 0),
    ("forecast", "recipe.bapo.hook.scopes.EngineState", 0),
    ("forecast", "engine.module.forward", 1),
    ("forecast", "recipe.bapo.policy_loss.clipped_surrogate_loss", 1),
    ("forecast", "torch.Tensor.backward", 1),
    ("forecast", "recipe.bapo.hook.scopes.read_and_validate", 1),
    ("forecast", "scope.forecaster.learn", 0),
    ("forecast", "engine.optimizer_step", 0),
    ("redone", "recipe.bapo.hook.scopes.EngineState.restore", 0),
    ("redone", "torch.Tensor.backward", 4),
    ("forward", "engine.module.forward", 1),
    ("forward", "recipe.bapo.policy_loss.clipped_surrogate_loss", 1),
    ("on policy", "recipe.bapo.policy_loss.clipped_surrogate_loss", 0),
    ("on policy", "recipe.bapo.hook.worker.pop_mark", 1),
    ("one micro-batch", "recipe.bapo.hook.scopes.search_clip_bounds", 0),
    ("micro_batch", "recipe.bapo.hook.scopes.search_clip_bounds", 1),
    ("monitored", "torch.Tensor.backward", 1),
]


@pytest.mark.parametrize("kind, place, call", WAYS_OUT)
def test_an_exception_in_an_update_leaves_nothing_behind(monkeypatch, kind, place, call):
    """The next updates are those of a worker that never began that one."""
    if kind in ("forecast", "forward", "redone"):
        monkeypatch.setattr(BoundsForecaster, "forecast", always(kind != "forward"))
    config = config_of(kind if kind == "micro_batch" else "mini_batch")
    if kind == "monitored":
        config = actor_config(MonitorConfig(positive_contribution_target=TARGET), clip_ratio_c=3.0)
    rows = 12 if kind == "one micro-batch" else 4
    worker, other = (make_worker(config, monkeypatch, rows=rows, learning_rate=0.1) for _ in range(2))
    marks = {"bapo_on_policy_first_update": True} if kind == "on policy" else {}
    for one in (worker, other):
        train_call(one, batch_of_pairs(1), **marks)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        raise_in(patch, worker, place, call)
        train_call(worker, batch_of_pairs(2), send=None, **marks)
    found = []
    for one in (worker, other):
        evaluated = one.engine.infer_batch(make_mini_batch(*batch_of_pairs(5)), loss_function=one.loss_fn)["metrics"]
        evaluated = {name: metric.values for name, metric in evaluated.items()}
        updates = [update(one, batch_of_pairs(seed)) for seed in (3, 4)]
        for metrics in updates:  # the forecast may have learned from the update
            metrics.pop("actor/bapo/extra_forward"), metrics.pop("actor/bapo/redone")
        found.append((evaluated, updates, one.engine.module.weight.item(), one.updates_since_sent))
    assert found[0] == found[1]


def test_other_bounds_that_clip_the_same_tokens_are_not_redone(monkeypatch):
    """At ratio 1 rho is 0.5, so the bounds are forecast at the start. It is 0.95 / 2.05 = 0.463, below the target."""
    monkeypatch.setattr(BoundsForecaster, "forecast", always(True))
    _, _, advantages, _ = batch_of_pairs(1)
    old = torch.full_like(advantages, -1.0)
    batch = old, old + torch.where(advantages > 0, 0.95, 1.1).log(), advantages, torch.ones_like(old).bool()
    worker = worker_with(monkeypatch)
    found, kinds, _ = make_updates(worker, [batch])
    assert found == [literal_bounds(batch)] == [(0.9, 3.0)] and kinds == ["forecast"]
    assert worker.scope.bounds == (0.6, 1.2)  # the loss took these
    assert worker.scope.latest == (0.9, 3.0)  # what comes after the update takes these


def test_fixed_bounds_need_neither_forward_nor_second_pass(monkeypatch):
    monkeypatch.setattr("recipe.bapo.hook.scopes.can_be_restored", lambda engine: False)
    fixed = dict(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.3, ratio_upper_max=1.3)
    worker = make_worker(config_of(**fixed), monkeypatch)
    found, kinds, _ = make_updates(worker, wild_and_calm(12), position=1)
    assert set(kinds) == {"forecast"} and set(found) == {(0.8, 1.3)}


@pytest.mark.parametrize(
    "config, model, can_repeat, expected",
    [
        (config_of(), OFFLOAD, True, {"forecast", "redone"}),
        (config_of(), MODEL, False, {"forward"}),
        (on_megatron(), OFFLOAD, False, {"forward"}),  # there activation offload allows a forward alone
    ],
)
def test_where_one_way_is_ruled_out_the_other_is_taken(monkeypatch, config, model, can_repeat, expected):
    monkeypatch.setattr("recipe.bapo.hook.scopes.can_be_restored", lambda engine: can_repeat)
    batches = wild_and_calm(32)
    found, kinds, _ = make_updates(make_worker(config, monkeypatch, model), batches, position=1)
    assert found == [literal_bounds(batch) for batch in batches] and set(kinds) == expected


def test_each_micro_batch_has_its_own_search_with_micro_batch(monkeypatch):
    worker, batch = worker_with(monkeypatch, "micro_batch"), batch_of_pairs(3)
    parts = [literal_bounds(part) for part in zip(*(tensor.split(4) for tensor in batch), strict=True)]
    metrics = update(worker, batch)
    assert len(set(parts)) > 1
    for found, expected in zip(bounds_of(metrics), zip(*parts, strict=True), strict=True):
        assert found == pytest.approx(sum(expected) / 3)
    assert metrics["actor/bapo/extra_forward"] == metrics["actor/bapo/redone"] == [0]


def test_a_second_loss_function_starts_from_nothing(monkeypatch):
    worker = worker_with(monkeypatch)
    make_updates(worker, [batch_of_pairs(1)] * 3, position=1)
    worker.set_loss_fn(partial(ppo_loss, config=config_of("mini_batch")))
    _, kinds, _ = make_updates(worker, [batch_of_pairs(1)], position=1)
    assert kinds == ["forward"]  # no update was measured yet
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(PolicyLossConfig())))
    assert worker.engine.forward_backward_batch == worker.verl_forward_backward_batch
    assert "actor/bapo/clip_low" not in update(worker, batch_of_pairs(2))


def test_a_batch_of_another_kind_has_no_marks():
    """On verl's branch neo the worker gets another proto, on which ``tu.pop`` raises a TypeError."""
    assert pop_mark(object(), STEP, 0) == 0
    data = tu.get_tensordict(tensor_dict={}, non_tensor_dict={STEP: 3})
    assert [pop_mark(data, STEP, 0) for _ in range(2)] == [3, 0]


def test_distillation_is_refused_by_name_and_another_callable_goes_through(monkeypatch):
    worker = worker_with(monkeypatch)
    of_sft = partial(sft_loss, config=None)
    worker.set_loss_fn(of_sft)
    assert worker.loss_fn is of_sft and worker.scope is None
    refused = r"BAPOPolicyLossConfig needs verl's ppo_loss \(distillation.enabled=false\), not distillation_ppo_loss"
    with pytest.raises(ValueError, match=refused):
        worker.set_loss_fn(partial(distillation_ppo_loss, config=config_of(), distillation_config=None))


def test_unusable_settings_are_refused_when_the_loss_is_set(monkeypatch):
    config = actor_config(BAPOPolicyLossConfig(), loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="sum-norm with loss_scale_factor=null"):
        make_worker(config, monkeypatch)


@pytest.mark.parametrize("scope, rows", [("mini_batch", 4), ("mini_batch", 12), ("micro_batch", 12)])
def test_the_search_takes_the_sums_of_the_update(monkeypatch, scope, rows):
    """The bounds come from sums over all ranks: here another rank adds the tokens of a second batch."""
    worker, other = worker_with(monkeypatch, scope, rows=rows), batch_of_pairs(3)
    config = worker.scope.config

    def add_other(vector, group):
        still = not worker.engine.passes  # before any pass every ratio is 1
        stats = collect_clip_statistics(other[0], other[0] if still else other[1], *other[2:], config, 3.0)
        vector.add_(torch.cat([tensor.flatten() for tensor in stats.sums]))

    monkeypatch.setattr(torch.distributed, "all_reduce", add_other)
    both = [torch.cat(pair) for pair in zip(batch_of_pairs(1), other, strict=True)]
    found = bounds_of(update(worker, batch_of_pairs(1)))
    assert found == literal_bounds(both) != literal_bounds(batch_of_pairs(1))
