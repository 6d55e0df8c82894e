# SPDX-License-Identifier: Apache-2.0
"""Stale data, evaluation and verl's own entry point on the real stack. Minutes each."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.batches import batches_of_dump, values_of_dump
from support.metrics import METRICS
from support.oracle import sequential_search
from support.stack_runs import ROOT, explain, removing_what_others_leave, run_example

from bapo import BAPOConfig
from recipe.bapo.config import cpu_environment
from recipe.bapo.records.metrics import read_metrics
from recipe.bapo.report.facts import report_on

LOSS = "actor_rollout_ref.actor.policy_loss"
README, YOUR_OWN_RUN = ((ROOT / page).read_text() for page in ("README.md", "docs/your_own_run.md"))
SEARCHED = ("low", "high", "positive_contribution", "saturated")


def run_regime(tmp_path, config, steps, *overrides):
    """Run some steps of a file of configs/experiment and check what holds in all. Returns metrics and records."""
    length = (f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1")
    method = ("method=bapo_gradient", "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4")
    run = run_example(tmp_path / "run", *method, *length, *overrides, CONFIG=config)
    assert run.returncode == 0, explain(run, tmp_path / "run")
    data = [data for _, data in read_metrics(tmp_path / "run") if "training/global_step" in data]
    assert len(data) == steps
    for metrics in data:
        assert metrics["actor/entropy"] > 0 and metrics["actor/grad_norm"] > 0
        assert set(metrics) >= METRICS
    records = [json.loads(line) for line in (tmp_path / "run" / "bounds" / "rank0.jsonl").read_text().splitlines()]
    found = [{name: float.fromhex(record[name]) for name in SEARCHED} for record in records]
    assert len({search["positive_contribution"] for search in found}) > steps  # each update has its own data
    for search in found:
        if search["saturated"]:  # with so few updates, all searches may be saturated
            assert (search["low"], search["high"]) == (0.9, 3.0), search
        else:  # rho is 0 if all advantages are 0: a mini-batch may be one group whose answers are all wrong
            assert search["positive_contribution"] > 0.4 - 1e-6 or search["positive_contribution"] == 0, search
    return data, records


def test_sample_replay_at_staleness_32(tmp_path):
    dump = tmp_path / "dump"
    data, records = run_regime(
        tmp_path, "replay", 2, "staleness=32", f"actor_rollout_ref.actor.policy_loss.token_dump_dir={dump}"
    )
    assert len(records) == 2 * 32
    assert all(metrics["actor/bapo/clipfrac_negative"] > 0 for metrics in data)
    # The report on the dump agrees with the run, except for updates at ratio 1: there the training forward's log-probs
    # differ from the recomputed ones in their last bits, which may decide a tie.
    definition = BAPOConfig(contribution="gradient", positive_contribution_target=0.4)
    found = values_of_dump(dump, definition)
    assert len(found["low"]) == 64
    for update, record in enumerate(records):
        if record["source"] != "on_policy":
            assert (found["low"][update].hex(), found["high"][update].hex()) == (record["low"], record["high"])
        for key in ("positive_contribution_start", "positive_token_fraction"):
            assert found[key][update] == pytest.approx(float.fromhex(record[key]), abs=1e-5), key


def test_partial_rollout_resumes_responses_under_new_weights(tmp_path):
    dump = tmp_path / "dump"
    data, _ = run_regime(tmp_path, "partial_rollout", 3, f"actor_rollout_ref.actor.policy_loss.token_dump_dir={dump}")
    assert max(metrics["training/off_policy/trajectory_spans/max"] for metrics in data) > 1
    oldest = max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data)
    assert oldest > 0
    ages = [row["age"] for row in report_on(dump)["by_age"]]
    assert ages[0] == 0 and ages[-1] == oldest  # the oldest token of the dump is as old as in verl's metrics


@pytest.mark.slow
def test_separate_devices_train_on_what_older_weights_sampled(tmp_path):
    data, records = run_regime(tmp_path, "separate_async", 3)
    # Each step makes parameter_sync_step = 4 updates.
    assert len(records) == 3 * 4 and {line["source"] for line in records} == {"pass"}
    assert max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data) > 0
    # A small KL shows that the servers received the weights: they start with random ones (load_format=dummy).
    assert all(abs(metrics["actor/ppo_kl"]) < 0.5 for metrics in data)


@pytest.mark.slow
def test_evaluation_prints_the_spread_and_trains_nothing(tmp_path):
    run = run_example(tmp_path / "run", "actor_rollout_ref.rollout.val_kwargs.n=4", CONFIG="evaluate")
    assert run.returncode == 0, explain(run, tmp_path / "run")
    ((_, metrics),) = read_metrics(tmp_path / "run")
    (variable,) = {key.split("/")[-2] for key in metrics if re.fullmatch(r"val-core/bapo/guess/\w+/mean@4", key)}
    for kind, figure in (("core", "mean"), ("aux", "std")):
        name = f"val-{kind}/bapo/guess/{variable}/{figure}@4"
        assert 0 < metrics[name] < 1 and re.search(rf"^  {name} +{metrics[name]:.4f}$", run.stdout, re.M)
    assert not (tmp_path / "run" / "bounds").exists()


def run_verls_own(tmp_path, task, *overrides, **environment):
    """Run two steps of verl's own entry point, with the package installed. Returns the metrics of the steps.

    Each step has two mini-batches of 16 sequences, in micro-batches of 4.
    """
    with removing_what_others_leave() as folders:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "verl.trainer.main_ppo",
                *("--config-dir", ROOT / "recipe/bapo/config", "+platform=cpu"),
                f"actor_rollout_ref.model.path={task}/model",
                f"data.train_files={task}/train.parquet",
                f"data.val_files={task}/test.parquet",
                "algorithm.adv_estimator=grpo",
                "data.train_batch_size=8",
                "data.max_prompt_length=16",
                "data.max_response_length=30",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.max_model_len=64",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "reward.custom_reward_function.path=pkg://recipe.bapo.example.reward",
                "reward.custom_reward_function.name=compute_score",
                "trainer.n_gpus_per_node=1",
                "trainer.total_training_steps=2",
                "trainer.val_before_train=false",
                "trainer.logger=[file]",
                f"trainer.default_local_dir={tmp_path}/checkpoints",
                f"hydra.run.dir={tmp_path}/hydra",
                *overrides,
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                **cpu_environment(),
                **folders,
                "VERL_FILE_LOGGER_PATH": f"{tmp_path}/metrics.jsonl",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=open(tmp_path / "train.log", "w"),
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    assert run.returncode == 0, (tmp_path / "train.log").read_text()[-4000:]
    return [data for _, data in read_metrics(tmp_path) if "training/global_step" in data]


TWO_LINES = (f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig")


def check_exact_bounds(tmp_path, data, ranks=1):
    """Check that each update's bounds come from one search on its mini-batch, and that all ranks have the same."""
    assert all(set(metrics) >= METRICS for metrics in data)
    records = [(tmp_path / "bounds" / f"rank{rank}.jsonl").read_text() for rank in range(ranks)]
    assert all(record == records[0] for record in records)
    lines = [json.loads(line) for line in records[0].splitlines()]
    assert [line["update"] for line in lines] == list(range(4)) and {line["source"] for line in lines} == {"pass"}
    for step, metrics in enumerate(data):  # verl logs the mean over the updates of a step
        bounds = [float.fromhex(line["high"]) for line in lines[2 * step : 2 * step + 2]]
        assert metrics["actor/bapo/clip_high"] == pytest.approx(sum(bounds) / 2)


def check_bounds_of_the_batch_before(tmp_path, data, updates, on_a_batch, ranks=1):
    """Check that each update uses the result of a literal search on the same update of the previous rollout batch.

    Returns the bounds ``(low, high)`` of each update.
    """
    assert all(set(metrics) >= METRICS for metrics in data)
    records = [(tmp_path / "bounds" / f"rank{rank}.jsonl").read_text() for rank in range(ranks)]
    assert all(record == records[0] for record in records)
    lines = [json.loads(line) for line in records[0].splitlines()]
    assert len(lines) == updates and {line["source"] for line in lines} == {"previous_batch"}
    searched = [sequential_search(*batch, BAPOConfig(), 3.0)[:2] for batch in batches_of_dump(tmp_path / "dump")]
    assert len(searched) == updates
    used = [(float.fromhex(line["low"]), float.fromhex(line["high"])) for line in lines]
    # Updates on the first batch use the result of the latest search, and the very first one the start of the ranges.
    assert used == [(0.6, 1.2), *searched[: on_a_batch - 1], *searched[: updates - on_a_batch]]
    return used


def test_the_readmes_two_lines_make_a_run_of_verls_an_exact_bapo_run(tmp_path, task):
    lines = re.findall(r"^    (actor_rollout_ref\.actor\.policy_loss\.\S+)", README, re.M)
    assert tuple(lines) == TWO_LINES
    check_exact_bounds(tmp_path, run_verls_own(tmp_path, task, *lines, f"+{LOSS}.bounds_record_dir={tmp_path}/bounds"))


def test_a_third_line_takes_the_bounds_of_the_batch_before_without_a_forward(tmp_path, task):
    lines = re.findall(r"^    (\+\+actor_rollout_ref\.actor\.policy_loss\.bound_scope=\S+)", YOUR_OWN_RUN, re.M)
    assert lines == [f"++{LOSS}.bound_scope=previous_batch"]
    passes = tmp_path / "passes.txt"
    data = run_verls_own(
        tmp_path,
        task,
        *TWO_LINES,
        *lines,
        f"+{LOSS}.bounds_record_dir={tmp_path}/bounds",
        f"+{LOSS}.token_dump_dir={tmp_path}/dump",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.model.external_lib=tests.support.count_forwards",
        FORWARDS_FILE=str(passes),
        PYTHONPATH=str(ROOT),
    )
    # In each of two steps verl recomputes the old log-probs, and then makes four updates.
    assert passes.read_text().split() == ["infer", *4 * ["train"]] * 2
    assert all(set(metrics) >= METRICS for metrics in data)
    used = check_bounds_of_the_batch_before(tmp_path, data, updates=8, on_a_batch=4)
    for step, metrics in enumerate(data):
        highs = [high for _, high in used[4 * step : 4 * step + 4]]
        assert metrics["actor/bapo/clip_high"] == pytest.approx(sum(highs) / 4)


ASYNCHRONOUS = {
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "separate_async": [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ],
}
DYNAMIC = [
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, overrides",
    [(1, DYNAMIC), (2, []), *((1, overrides) for overrides in ASYNCHRONOUS.values())],
    ids=["dynamic batches", "two ranks", *ASYNCHRONOUS],
)
def test_the_two_lines_are_exact_with(ranks, overrides, tmp_path, task):
    record = f"+{LOSS}.bounds_record_dir={tmp_path}/bounds"
    data = run_verls_own(tmp_path, task, *TWO_LINES, record, f"trainer.n_gpus_per_node={ranks}", *overrides)
    check_exact_bounds(tmp_path, data, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("mode, on_a_batch", [("colocate_async", 2), ("separate_async", 1)])
def test_the_third_line_takes_the_bounds_of_the_batch_before_with(mode, on_a_batch, tmp_path, task):
    folders = (f"+{LOSS}.bounds_record_dir={tmp_path}/bounds", f"+{LOSS}.token_dump_dir={tmp_path}/dump")
    scope = f"+{LOSS}.bound_scope=previous_batch"
    data = run_verls_own(tmp_path, task, *TWO_LINES, scope, *folders, *ASYNCHRONOUS[mode])
    # In separate_async each step has two local steps. Each is a call with one update, so it counts as its own batch.
    check_bounds_of_the_batch_before(tmp_path, data, updates=4, on_a_batch=on_a_batch)


@pytest.mark.slow
def test_two_lines_dump_the_tokens_of_any_loss(tmp_path, task):
    dump = (f"{LOSS}._target_=recipe.bapo.policy_loss.DumpConfig", f"+{LOSS}.token_dump_dir={tmp_path}/dump")
    data = run_verls_own(tmp_path, task, f"{LOSS}.loss_mode=gspo", *dump)
    assert not any(key.startswith("actor/bapo/") for metrics in data for key in metrics)
    report = report_on(tmp_path / "dump")
    assert (report["dump"]["updates"], report["dump"]["loss_mode"]) == (4, "gspo")
    assert "GSPO" in {row["method"] for row in report["methods"]}
