# SPDX-License-Identifier: Apache-2.0
"""The monitor on a stand-in engine: what it logs, that it changes nothing, and that it never ends a run."""

import itertools
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import oracle
from support.actor import actor_config
from support.batches import batch_of_pairs, make_batch
from support.metrics import METRICS
from support.records import read_updates
from support.stand_in import MODEL, WHOLE, StandInEngine, make_mini_batch, make_worker, train_call, update
from support.versions import from_0_9
from torch.distributed.fsdp import FSDPModule

import bapo
import verl
from bapo import BAPOConfig, collect_clip_statistics, empty_clip_statistics
from recipe.bapo.hook.own_clip import own_clip_of
from recipe.bapo.hook.record import NOT_RECORDED, read_start
from recipe.bapo.hook.sent_weights import SENDING
from recipe.bapo.hook.verdict import EVERY
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from recipe.bapo.report.findings import read_runs
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

OFFLOAD = SimpleNamespace(override_config={}, enable_activation_offload=True)
TARGET = 0.47
ROOT = Path(__file__).parents[2]
OF_THE_LOSS = {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}


def worker_with(monkeypatch, loss=None, model=MODEL, rows=4, learning_rate=0.0, **settings):
    loss = loss or MonitorConfig(positive_contribution_target=TARGET)
    return make_worker(actor_config(loss, **settings), monkeypatch, model, rows=rows, learning_rate=learning_rate)


def test_it_logs_what_a_bapo_run_logs_and_what_its_own_loss_clips(monkeypatch):
    for seed, rows in ((1, 4), (2, 12), (2, 1)):
        worker, batch = worker_with(monkeypatch, rows=rows, clip_ratio_c=3.0), batch_of_pairs(seed)
        metrics = update(worker, batch)
        config = BAPOConfig(positive_contribution_target=TARGET)
        low, high, rho, start, steps, _ = oracle.sequential_search(*batch, config, 3.0)
        ratio, advantages, *_ = oracle.response_tokens(*batch)
        positive, negative = advantages > 0, advantages < 0
        expected = {
            "clip_low": low,
            "clip_high": high,
            "positive_contribution": rho,
            "positive_contribution_start": start,
            "search_steps": steps,
            "applied": 0,
            "invalid_tokens": 0,
            "own_clipfrac_positive": (ratio[positive] > 1.2).double().mean().item(),
            "own_clipfrac_negative": ((ratio < 0.8) | (ratio > 3))[negative].double().mean().item(),
            "entropy_covariance": oracle.entropy_covariance(*batch, 0.8, 1.2, 3.0),
            **oracle.diagnostics(*batch, low, high),
        }
        for name, value in expected.items():
            assert metrics[f"actor/bapo/{name}"] == [pytest.approx(value)], name
        assert METRICS - OF_THE_LOSS <= metrics.keys()


@pytest.mark.parametrize("sign, absent", [(1, "negative"), (-1, "positive")])
def test_the_shares_of_a_sign_without_tokens_are_0(monkeypatch, sign, absent):
    old, log_prob, advantages, mask = batch_of_pairs(1)
    metrics = update(worker_with(monkeypatch), (old, log_prob, sign * advantages.abs(), mask))
    for name in ("own_clipfrac", "clipfrac", "length"):
        assert metrics[f"actor/bapo/{name}_{absent}"] == [0], name
    present = "positive" if sign > 0 else "negative"
    assert 0 < metrics[f"actor/bapo/own_clipfrac_{present}"][0] < 1


COSTS = {  # what changes in a run, and the kinds of its updates: (extra_forward, redone)
    "several micro-batches": ({}, {(1, 0), (0, 0), (0, 1)}),
    "one micro-batch": (dict(rows=12), {(0, 0)}),
    "no forward alone": (dict(model=OFFLOAD), {(0, 0), (0, 1)}),
    "no second pass": ({}, {(1, 0), (0, 0)}),
    "one sign only": ({}, {(1, 0), (0, 0), (0, 1)}),
}


@pytest.mark.parametrize("case", COSTS)
def test_it_says_what_each_update_would_have_cost_with_bapo(monkeypatch, case):
    changes, kinds = COSTS[case]
    if case == "no second pass":
        monkeypatch.setattr("recipe.bapo.hook.scopes.can_be_restored", lambda engine: False)
    costs = []
    for loss in (MonitorConfig, BAPOPolicyLossConfig):
        worker = worker_with(monkeypatch, loss(positive_contribution_target=TARGET), clip_ratio_c=3.0, **changes)
        costs.append([])
        for number in range(24):  # first and second updates differ, and every sixth call has quite others
            batches = [batch_of_pairs(1 + k + 2 * (number // 6)) for k in range(2)]
            if case == "one sign only" and number % 7 == 3:  # an update without a token with A < 0
                old, log_prob, advantages, mask = batches[1]
                batches[1] = old, log_prob, advantages.abs(), mask
            for metrics in train_call(worker, *batches, bapo_on_policy_first_update=number % 3 == 0):
                costs[-1].append(tuple(metrics[f"actor/bapo/{name}"][0] for name in ("extra_forward", "redone")))
    monitored, of_bapo = costs
    assert monitored == of_bapo and set(of_bapo) == kinds


def test_one_collective_one_read_and_no_pass_more_an_update(monkeypatch):
    reads, groups = [], []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(len(tensor)) or tolist(tensor))
    worker = worker_with(monkeypatch)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: groups.append(group))
    data = make_mini_batch(*batch_of_pairs(1))
    reads.clear()
    worker.train_batch(data)
    assert groups == [torch.distributed.group.WORLD] and len([count for count in reads if count > 16]) == 1
    assert worker.engine.passes == ["train"]


@pytest.mark.parametrize("name, position", [("log_prob", 1), ("advantages", 2)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_input_is_counted_and_warned_of_once(monkeypatch, capsys, tmp_path, name, position, value):
    loss = MonitorConfig(record_dir=str(tmp_path))
    worker = worker_with(monkeypatch, loss)
    bad = [tensor.clone() for tensor in batch_of_pairs(1)]
    bad[position][4, 3], bad[3][4, 3] = value, True
    for _ in range(2):
        metrics = update(worker, bad)
        assert metrics["actor/bapo/invalid_tokens"] == [1] and "actor/bapo/clip_low" not in metrics
    assert worker.engine.steps == 2
    assert capsys.readouterr().err.count("1 log-probs or advantages of response tokens are not finite") == 1
    after = update(worker, batch_of_pairs(2))
    assert after["actor/bapo/clip_low"] == update(worker_with(monkeypatch), batch_of_pairs(2))["actor/bapo/clip_low"]
    first, *_, last = read_updates(next(tmp_path.iterdir()))
    assert first.values == {"invalid_tokens": 1} and last.values["low"] == after["actor/bapo/clip_low"][0]


def test_old_log_probs_that_are_minus_infinity_are_left_out(monkeypatch, capsys):
    worker = worker_with(monkeypatch)
    old, log_prob, advantages, mask = batch_of_pairs(1)
    old[4], mask[4] = -math.inf, True
    share = 17 / mask.sum().item()
    for _ in range(2):
        metrics = update(worker, (old, log_prob, advantages, mask))
        assert metrics["actor/bapo/masked_token_fraction"] == [pytest.approx(share)]
    assert worker.engine.steps == 2
    assert capsys.readouterr().err.count("the monitor leaves out 17 response tokens without a usable old log-prob") == 1


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 1, 2}, set()])
def test_a_fault_in_collecting_still_joins_the_collective(monkeypatch, capsys, failing):
    """Another rank fails too, or, in the last case, two others do. The update after it is measured again."""
    worker = worker_with(monkeypatch)
    sums, calls = [], itertools.count()
    nothing = empty_clip_statistics(BAPOConfig()).sums
    of_a_failing_rank = torch.cat([tensor.flatten() for tensor in nothing._replace(uncollected=torch.ones(()))])

    def collect(*args):
        return fail() if next(calls) % 3 in failing else collect_clip_statistics(*args)  # of three micro-batches

    def all_reduce(vector, group):
        sums.append(vector.sum().item())
        vector.add_(of_a_failing_rank, alpha=1 if failing else 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe.bapo.hook.scopes.collect_clip_statistics", collect)
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        for _ in range(2):
            metrics = update(worker, batch_of_pairs(1))
            # It counts as not measured.
            kept = {f"actor/bapo/{name}" for name in ("applied", "measured", "skipped")}
            assert {name for name in metrics if "bapo" in name} == kept and metrics["actor/bapo/measured"] == [0]
    assert sums == [1, 1] if failing else len(sums) == 2  # one number says so to all ranks
    after, expected = update(worker, batch_of_pairs(2)), update(worker_with(monkeypatch), batch_of_pairs(2))
    assert after["actor/bapo/clip_low"] == expected["actor/bapo/clip_low"] and worker.engine.steps == 3
    text = "summing the tokens of a micro-batch failed (RuntimeError: boom on two lines). Training"
    told = capsys.readouterr().err.count(text)
    assert told == bool(failing)


@pytest.mark.parametrize("ranks, trains, told", [(2, True, 1), (2, False, 0), (1, True, 0)])
def test_a_wrong_gradient_of_a_head_that_is_trained_is_told(monkeypatch, capsys, ranks, trains, told):
    """A LoRA run does not train its head, and one rank has nothing to add up."""
    worker = worker_with(monkeypatch)
    head = torch.nn.Linear(2, 3)
    head.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})  # as torch's fully_shard does
    head.weight.requires_grad_(trains).device_mesh = SimpleNamespace(size=lambda: ranks)
    model = torch.nn.ModuleDict({"lm_head": head})
    model._verl_fused_kernels_backend = "torch"
    worker.engine.module = torch.nn.Sequential(model)
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(MonitorConfig())))
    assert capsys.readouterr().err.count("verl's own gradient of lm_head is wrong in this run") == told


def fail(*args, **kwargs):
    raise RuntimeError("boom\non two lines")


# What the monitor calls in an update, after it, and in every tenth call of the trainer.
CALLS = {
    "search": "recipe.bapo.hook.monitor.search_clip_bounds",
    "forecast": "recipe.bapo.hook.scopes.BoundsForecaster.forecast",
    "sums": "recipe.bapo.hook.scopes.collect_clip_statistics",
    "one micro-batch": "recipe.bapo.hook.monitor.Monitor._is_one_micro_batch",
    "output layer": "recipe.bapo.hook.monitor.head_gradient_is_wrong",
    "gradient norm": "recipe.bapo.hook.worker.math",  # whose attribute is then missing
    "metrics": "recipe.bapo.hook.worker.bounds_metrics",
    "making the record": "recipe.bapo.hook.worker.Record",
    "writing the record": "recipe.bapo.hook.record.Record.write",
    "verdict": "recipe.bapo.hook.worker.judge",
    "marks": "recipe.bapo.hook.worker.pop_mark",
}


def train(worker, calls=EVERY, send=WHOLE):
    """Make an update in each of some calls of the trainer. Returns the weight after each, and verl's metrics."""
    found = []
    for number in range(calls):
        (metrics,) = train_call(worker, batch_of_pairs(number), send=send)
        verls = {name: value for name, value in metrics.items() if not name.startswith("actor/bapo/")}
        found.append((worker.engine.module.weight.item(), verls))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_in_the_monitor_becomes_one_warning(monkeypatch, capsys, tmp_path, name):
    expected = train(worker_with(monkeypatch, PolicyLossConfig(), learning_rate=0.1))
    if name in ("making the record", "output layer"):  # these come before the first update
        monkeypatch.setattr(CALLS[name], fail)
    worker = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path)), learning_rate=0.1)
    monkeypatch.setattr(CALLS[name], fail)
    assert train(worker) == expected and len({weight for weight, _ in expected}) == EVERY
    told = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert len(told) == 1 and told[0].startswith("BAPO: ") and "Training goes on" in told[0]


@pytest.mark.parametrize("names", [SENDING, ["get_data_parallel_rank"]])
def test_an_engine_without_a_method_that_we_use_ends_no_run(monkeypatch, tmp_path, names):
    """An engine of another version of verl, or of the user's own. Every call then counts as a new rollout batch."""
    expected = train(worker_with(monkeypatch, PolicyLossConfig(), learning_rate=0.1))
    for owner in (StandInEngine, BaseEngine):
        for name in vars(owner).keys() & set(names):
            monkeypatch.delattr(owner, name)
    worker = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path)), learning_rate=0.1)
    assert train(worker, send=None) == expected
    if names == SENDING:
        (path,) = tmp_path.iterdir()
        assert {one.numbers["update"] for one in read_updates(path)} == {0}


def test_no_memory_to_sum_tokens_with_ends_no_run(monkeypatch, capsys):
    worker = worker_with(monkeypatch)
    monkeypatch.setattr("recipe.bapo.hook.scopes.collect_clip_statistics", fail)
    monkeypatch.setattr("recipe.bapo.hook.scopes.empty_clip_statistics", fail)  # it needs memory, too
    assert "actor/bapo/clip_low" not in update(worker, batch_of_pairs(1))
    assert worker.engine.steps == 1 and capsys.readouterr().err.count("failed (RuntimeError") == 1


MEGATRON = SimpleNamespace(dynamic_context_parallel=True)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"strategy": "veomni"}, "strategy=veomni was not tried"),
        ({"strategy": "megatron", "megatron": MEGATRON}, "dynamic_context_parallel=true each rank"),
        ({"strategy": "megatron"}, "without Megatron's section of the config: set model_engine=megatron"),
        ({"clip_ratio_c": "three"}, "'>' not supported"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c above 1 or null, not 1.0"),
    ],
)
def test_where_it_cannot_measure_it_leaves_verls_worker_as_it_is(monkeypatch, capsys, changes, reason):
    config = actor_config(MonitorConfig())
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    worker = make_worker(config, monkeypatch)
    said = re.findall("^BAPO: .*MonitorConfig does nothing in this run: (.*)$", capsys.readouterr().err, re.M)
    assert len(said) == 1 and reason in said[0]  # the console shows what begins like this
    assert worker.engine.forward_backward_batch == worker.verl_forward_backward_batch
    assert worker.loss_fn.keywords["config"] is config
    train_call(worker)


def test_a_loss_that_is_not_ppos_is_not_monitored(monkeypatch, capsys):
    worker = worker_with(monkeypatch)
    loss_fn = partial(distillation_ppo_loss, config=actor_config(MonitorConfig()), distillation_config=None)
    worker.set_loss_fn(loss_fn)
    assert worker.loss_fn is loss_fn and worker.scope is None
    assert "MonitorConfig does nothing in this run: " in capsys.readouterr().err


def test_a_config_that_cannot_be_used_is_refused_when_it_is_built():
    with pytest.raises(ValueError, match="loss_mode=bapo with MonitorConfig"):
        MonitorConfig(loss_mode="bapo")
    with pytest.raises(ValueError, match="ratio_lower_max=1.2"):
        MonitorConfig(ratio_lower_max=1.2)


@pytest.mark.parametrize(
    "config", [MonitorConfig, BAPOPolicyLossConfig, partial(BAPOPolicyLossConfig, bound_scope="micro_batch")]
)
def test_the_record_holds_each_updates_sums_and_place(monkeypatch, tmp_path, config):
    worker, logged = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path / "before"))), []
    train_call(worker, batch_of_pairs(1))
    # Each loss that is set has a record of its own, in which calls are counted from 0.
    loss = config(record_dir=str(tmp_path / "record"), positive_contribution_target=TARGET)
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(loss, clip_ratio_c=3.0)))
    for step in (7, 8):
        logged += train_call(worker, *(batch_of_pairs(10 * step + k) for k in range(2)), bapo_step=step)
    (path,) = (tmp_path / "record").iterdir()
    start, updates = read_start(path), read_updates(path)
    places = [tuple(update.numbers[name] for name in ("call", "update", "step")) for update in updates]
    assert places == [(0, 0, 7), (0, 1, 7), (1, 0, 8), (1, 1, 8)]
    assert start.about["applied"] == (config is not MonitorConfig) and start.about["clip_ratio_c"] == 3.0
    for found, metrics, seed in zip(updates, logged, (70, 71, 80, 81), strict=True):
        assert found.values["low"] == metrics["actor/bapo/clip_low"][0]
        own = worker.scope.own_clip
        expected = collect_clip_statistics(*batch_of_pairs(seed), BAPOConfig(), 3.0, own)
        for name in expected.sums._fields:
            if name not in NOT_RECORDED:
                one, other = getattr(found.stats.sums, name), getattr(expected.sums, name)
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if config is MonitorConfig:
        assert start.about["own_clip"] == {"kind": "clip", "low": 0.8, "high": 1.2, "dual_clip": 3.0, "of": "ratio"}


@pytest.mark.parametrize("calls_a_step", [1, 2])  # separate_async makes several before it sends weights
def test_a_resumed_run_of_verls_own_trainer_is_one_run(monkeypatch, tmp_path, calls_a_step):
    """It sets no mark, so the step is that of the checkpoint with the rollout batches since."""
    monkeypatch.setattr(TrainingWorker, "load_checkpoint", lambda worker, path, *more: None)
    starts = {None: 3, "/runs/one/global_step_2/actor": 2, "/runs/global_step_9/global_step_4/actor": 1}
    for checkpoint, steps in starts.items():
        worker = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path)))
        if checkpoint:
            worker.load_checkpoint(checkpoint, None)
        for _ in range(steps):
            for call in range(calls_a_step):
                train_call(worker, batch_of_pairs(1), send=WHOLE if call == 0 else None)
    (run,) = read_runs(tmp_path)
    assert len(run.starts) == 3
    assert run.recorded["step"].tolist() == [step for step in (1, 2, 3, 4, 5) for _ in range(calls_a_step)]


def test_the_versions_are_told_and_recorded(monkeypatch, capsys, tmp_path):
    worker = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path)))
    told = capsys.readouterr().err
    assert f"bapo-verl {bapo.__version__} monitors loss_mode=vanilla, target 0.4, in verl {verl.__version__}" in told
    train_call(worker, batch_of_pairs(1))
    about = read_start(next(tmp_path.iterdir())).about
    assert (about["bapo"], about["verl"]) == (bapo.__version__, verl.__version__)
    worker_with(monkeypatch, BAPOPolicyLossConfig(), clip_ratio_c=3.0)
    assert f"bapo-verl {bapo.__version__} trains with BAPO's bounds, target 0.4" in capsys.readouterr().err


@pytest.mark.parametrize("source, share", [(True, 1), (False, 0)])
def test_only_the_first_rank_with_outputs_records_and_judges(monkeypatch, capsys, tmp_path, source, share):
    for is_source, its_share, said in ((source, share, 0), (True, 0, 2)):
        worker = worker_with(monkeypatch, MonitorConfig(record_dir=str(tmp_path)))
        worker.engine.source, worker.engine.data_parallel_rank = is_source, its_share
        for _ in range(2 * EVERY):
            train_call(worker, batch_of_pairs(1))
        assert capsys.readouterr().err.count("BAPO: in") == said
        assert len(list(tmp_path.iterdir())) == bool(said)


@pytest.mark.parametrize("loss", [MonitorConfig, BAPOPolicyLossConfig])
def test_a_verdict_is_about_the_calls_since_the_last_one(monkeypatch, capsys, loss):
    """The last one of this loss: a loss that is set later starts from nothing."""
    worker = worker_with(monkeypatch, loss(positive_contribution_target=TARGET))
    old, log_prob, advantages, mask = batch_of_pairs(1)
    train_call(worker, (old, log_prob, advantages, mask))
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(loss(positive_contribution_target=TARGET))))
    for window in ((old, log_prob, torch.zeros_like(advantages), mask), (old, log_prob, advantages, mask)):
        told = []
        for _ in range(EVERY):
            train_call(worker, window)
            told.append(capsys.readouterr().err)
        assert [text.count(f"the last {EVERY} training") for text in told] == [0] * (EVERY - 1) + [1]
        assert ("only 0 updates had an advantage" in told[-1]) == (window[2] is not advantages)
    assert "100.0%" in told[-1]


LOSSES = ["vanilla", "clip_cov", "cispo", "bypass_mode", "gspo", "geo_mean", "dppo_tv", "dppo_kl", "sapo", "gpg"]
LOSSES.append(pytest.param("dro", marks=from_0_9))


def test_bypass_mode_clips_unless_it_names_another_loss():
    for correction, clips in (({"rollout_rs": None}, True), ({"loss_type": "reinforce"}, False)):
        config = actor_config(MonitorConfig(loss_mode="bypass_mode", rollout_correction=correction))
        assert (own_clip_of(config) is not None) == clips


SETTINGS = [
    {},
    {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0},
    {"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio": 0.3},  # null: verl takes clip_ratio
    {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},
    {"clip_ratio_low": 0.02, "clip_ratio_high": 0.01},
]
KINDS = dict.fromkeys(("vanilla", "clip_cov", "bypass_mode", "gspo", "geo_mean", "dppo_tv", "dppo_kl"), "clip")
KINDS["cispo"] = "cap"


@pytest.mark.parametrize("loss_mode", LOSSES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_the_loss_does_to_tokens_is_what_autograd_finds(loss_mode, settings):
    """Of ``clip_cov`` this is the clip of the ratio alone, so its drawn tokens are switched off here."""
    of_dro = {"dro_beta": 0.1} if loss_mode == "dro" else {}
    config = actor_config(MonitorConfig(loss_mode=loss_mode, clip_cov_lb=1e9, **of_dro), **settings)
    own = own_clip_of(config)
    assert (own and own.kind) == KINDS.get(loss_mode)
    if own is None:
        return
    loss_fn = get_policy_loss_fn(loss_mode)
    both_signs_clipped = False
    for seed in range(20):
        old, log_prob, advantages, mask = make_batch(seed, rows=16, spread=(0.05, 0.8)[seed % 2], zero_advantage=0)
        left, clipped = own(old, log_prob, advantages, mask)
        leaf = log_prob.clone().requires_grad_()
        loss, _ = loss_fn(old, leaf, advantages, mask.float(), "seq-mean-token-sum", config)
        by_autograd = -torch.autograd.grad(loss, leaf)[0] * len(old) / advantages
        both_signs_clipped |= bool((clipped & mask)[advantages > 0].any() and (clipped & mask)[advantages < 0].any())
        if own.kind == "clip":
            assert torch.equal(clipped[mask], by_autograd[mask] == 0)
        if own.of in ("sequence ratio", "log-ratio"):  # verl may average over a response, so a row has a factor
            factor = torch.where(mask & ~clipped, by_autograd / left, math.nan).nanmedian(1, keepdim=True).values
            by_autograd = torch.where(by_autograd == 0, 0, by_autograd / factor)
        torch.testing.assert_close(left[mask], by_autograd[mask], rtol=2e-5, atol=0)
    assert both_signs_clipped


def test_the_page_has_a_row_for_every_key(monkeypatch):
    text = (ROOT / "docs/monitor.md").read_text()
    table = text[text.index("| key | meaning |") :].split("\n\n")[0]
    rows = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    logged = set()
    for loss in ("vanilla", "cispo", "gspo"):
        logged |= update(worker_with(monkeypatch, MonitorConfig(loss_mode=loss)), batch_of_pairs(1)).keys()
    names = [name.removeprefix("actor/bapo/") for name in logged if name.startswith("actor/bapo/")]
    assert sorted(rows) == sorted(names)
    of_bapo = update(worker_with(monkeypatch, BAPOPolicyLossConfig()), batch_of_pairs(1)).keys()
    assert {name for name in of_bapo if "actor/bapo/" in name} <= logged
