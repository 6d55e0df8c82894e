# SPDX-License-Identifier: Apache-2.0
"""Stale data, evaluation and verl's own entry point on the real stack. Minutes each."""

import math
import os
import re
import subprocess
import sys

import pytest
from support.capture import (
    bounds_of,
    bounds_used,
    environment_of_capture,
    read_updates,
    tokens_of_updates,
    values_of_updates,
)
from support.metrics import METRICS
from support.oracle import sequential_search
from support.stack_runs import ROOT, SHORT_STEPS, explain, removing_what_others_leave, run_example, updates_of

from bapo import BAPOConfig
from recipe.bapo.config import cpu_environment
from recipe.bapo.hook.verdict import EVERY
from recipe.bapo.host.metrics import read_metrics

LOSS = "actor_rollout_ref.actor.policy_loss"
README, MONITOR_PAGE = ((ROOT / page).read_text() for page in ("README.md", "docs/monitor.md"))
CAPTURE = "actor_rollout_ref.model.external_lib=support.capture"


def run_regime(tmp_path, experiment, steps, *overrides):
    """Run some steps of a file of configs/experiment and check what holds in all. Returns metrics and updates."""
    length = (f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1")
    method = ("method=bapo_gradient", "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4")
    capture = environment_of_capture(tmp_path / "capture")
    run = run_example(tmp_path / "run", f"experiment={experiment}", *method, *length, CAPTURE, *overrides, **capture)
    assert run.returncode == 0, explain(run, tmp_path / "run")
    data = [data for _, data in read_metrics(tmp_path / "run") if "training/global_step" in data]
    assert len(data) == steps
    for metrics in data:
        assert metrics["actor/entropy"] > 0 and metrics["actor/grad_norm"] > 0
        assert set(metrics) >= METRICS
    updates = read_updates(tmp_path / "capture")
    rho = [update["logged"]["positive_contribution"] for update in updates]
    assert len(set(rho)) > steps  # each update has its own data
    for update, contribution in zip(updates, rho, strict=True):
        if update["logged"]["saturated"]:  # with so few updates, all searches may be saturated
            assert bounds_of(update) == (0.9, 3.0), update["logged"]
        else:  # rho is 0 if all advantages are 0: a mini-batch may be one group whose answers are all wrong
            assert contribution > 0.4 - 1e-6 or contribution == 0, update["logged"]
    return data, updates


@pytest.mark.slow
def test_sample_replay_at_staleness_32(tmp_path):
    data, updates = run_regime(tmp_path, "replay", 2, "staleness=32")
    assert len(updates) == 2 * 32
    assert all(metrics["actor/bapo/clipfrac_negative"] > 0 for metrics in data)
    # A search on the captured tokens agrees with the run, except for the first update on a batch. It takes every ratio
    # as 1, but the training forward's log-probs differ from the old ones in their last bits, which may decide a tie.
    definition = BAPOConfig(contribution="gradient", positive_contribution_target=0.4)
    found = values_of_updates(tmp_path / "capture", definition)
    for number, (update, values) in enumerate(zip(updates, found, strict=True)):
        if number % 32 > 0:
            assert bounds_of(update) == (values["clip_low"], values["clip_high"])
        for name in ("positive_contribution_start", "positive_token_fraction", "length_positive"):
            assert update["logged"][name] == pytest.approx(values[name], abs=1e-5), name


def test_partial_rollout_resumes_responses_under_new_weights(tmp_path):
    # Far more responses are asked for than are sampled at a time, so that some are unfinished at each update, however
    # fast the machine is.
    crowd = ("actor_rollout_ref.rollout.max_num_seqs=16", "trainer.v1.colocate_async.num_warmup_batches=2")
    data, _ = run_regime(tmp_path, "partial_rollout", 3, *crowd)
    assert max(metrics["training/off_policy/trajectory_spans/max"] for metrics in data) > 1
    assert max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data) > 0


@pytest.mark.slow
def test_separate_devices_train_on_what_older_weights_sampled(tmp_path):
    data, updates = run_regime(tmp_path, "separate_async", 3)
    assert len(updates) == 3 * 4  # each step makes parameter_sync_step = 4
    assert max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data) > 0
    # A small KL shows that the servers received the weights: they start with random ones (load_format=dummy).
    assert all(abs(metrics["actor/ppo_kl"]) < 0.5 for metrics in data)


@pytest.mark.slow
def test_evaluation_prints_the_spread_and_trains_nothing(tmp_path):
    run = run_example(tmp_path / "run", "experiment=evaluate", "actor_rollout_ref.rollout.val_kwargs.n=4")
    assert run.returncode == 0, explain(run, tmp_path / "run")
    ((_, metrics),) = read_metrics(tmp_path / "run")
    (variable,) = {key.split("/")[-2] for key in metrics if re.fullmatch(r"val-core/bapo/guess/\w+/mean@4", key)}
    for kind, figure in (("core", "mean@4"), ("aux", "std@4"), ("core", "best@4/mean")):
        name = f"val-{kind}/bapo/guess/{variable}/{figure}"
        assert 0 < metrics[name] < 1 and re.search(rf"^  {name} +{metrics[name]:.4f}$", run.stdout, re.M)
    assert not any(name.startswith("actor/") for name in metrics)


def run_verls_own(tmp_path, task, *overrides, steps=2, **environment):
    """Run some steps of verl's own entry point, with the package installed. Returns the metrics of the steps.

    Each step has two mini-batches of 16 sequences, in micro-batches of 4. The updates are captured.
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
                f"trainer.total_training_steps={steps}",
                "trainer.val_before_train=false",
                "trainer.logger=[file]",
                f"trainer.default_local_dir={tmp_path}/checkpoints",
                f"hydra.run.dir={tmp_path}/hydra",
                CAPTURE,
                *overrides,
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                **cpu_environment(),
                **folders,
                **environment_of_capture(tmp_path / "capture"),
                "VERL_FILE_LOGGER_PATH": f"{tmp_path}/metrics.jsonl",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=open(tmp_path / "train.log", "w"),
            stderr=subprocess.STDOUT,
            timeout=900,
        )
    assert run.returncode == 0, (tmp_path / "train.log").read_text()[-4000:]
    return [data for _, data in read_metrics(tmp_path) if "training/global_step" in data]


TWO_LINES = (f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig")


def read_same_updates(tmp_path, ranks):
    """Return the captured updates of rank 0, after checking that all ranks have logged the same."""
    updates = read_updates(tmp_path / "capture")
    for rank in range(1, ranks):
        of_rank = read_updates(tmp_path / "capture", rank)
        assert [update["logged"] for update in of_rank] == [update["logged"] for update in updates]
    return updates


def check_exact_bounds(tmp_path, data, ranks=1):
    """Check that each update's bounds come from one search on its mini-batch, and that all ranks have the same."""
    assert all(set(metrics) >= METRICS for metrics in data)
    updates = read_same_updates(tmp_path, ranks)
    assert len(updates) == 2 * len(data)
    for update, values in zip(updates, values_of_updates(tmp_path / "capture", BAPOConfig()), strict=True):
        assert bounds_of(update) == (values["clip_low"], values["clip_high"])
    check_means(data, [bounds_of(update) for update in updates])


def check_means(data, used):
    """Check that verl logs the mean of the bounds over the updates of a step."""
    updates = len(used) // len(data)
    for step, metrics in enumerate(data):
        highs = [high for _, high in used[step * updates : (step + 1) * updates]]
        assert metrics["actor/bapo/clip_high"] == pytest.approx(sum(highs) / updates)


def said_to_the_user(tmp_path):
    """Return what we said in the output of a run, without the prefix of Ray and the number of workers that said so."""
    log = (tmp_path / "train.log").read_text()
    return [line.partition("BAPO: ")[2] for line in log.splitlines() if "BAPO: " in line]


SHIPPED = ROOT / "recipe/bapo/example/files"  # the example's task, whose model gets some rewards


def test_the_readmes_two_lines_make_a_run_of_verls_an_exact_bapo_run(tmp_path):
    """vLLM is in the process of the worker. What we say has to arrive in the run's output all the same."""
    section = README.partition("## Switch on")[2].partition("\n## ")[0]
    lines = re.findall(r"^    (actor_rollout_ref\.actor\.policy_loss\.\S+)", section, re.M)
    assert tuple(lines) == TWO_LINES
    (tmp_path / "file").touch()
    unwritable = f"+{LOSS}.record_dir={tmp_path}/file/below"
    data = run_verls_own(tmp_path, SHIPPED, *lines, unwritable, steps=EVERY)
    check_exact_bounds(tmp_path, data)
    said = said_to_the_user(tmp_path)
    assert len([line for line in said if line.startswith("no record is written from now on, because ")]) == 1
    (verdict,) = [line for line in said if f"the last {EVERY} training calls" in line]
    assert "BAPO's bounds, with the target" in verdict or "the loss clipped hardly anything" in verdict


ASYNCHRONOUS = {
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "separate_async": [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        # Without it verl takes old log-probs from the wrong weights here (docs/silent_faults.md).
        "algorithm.rollout_correction.bypass_mode=true",
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
    data = run_verls_own(tmp_path, task, *TWO_LINES, f"trainer.n_gpus_per_node={ranks}", *overrides)
    check_exact_bounds(tmp_path, data, ranks)


def check_monitored(tmp_path, data, updates, positions):
    """Check the logged means and the record against a literal search on the captured tokens of each update.

    ``positions`` are those of the updates since the rollout servers got their weights, again and again.
    """
    literal = [sequential_search(*tokens, BAPOConfig(), 3.0) for tokens in tokens_of_updates(tmp_path / "capture")]
    recorded = updates_of(tmp_path / "record")
    assert len(recorded) == len(literal) == updates
    places = [found.numbers["update"] for found in recorded]
    assert places == positions * (updates // len(positions))
    for found, (low, high, rho, start, *_) in zip(recorded, literal, strict=True):
        assert (found.values["low"], found.values["high"]) == (low, high)
        assert found.values["positive_contribution"] == pytest.approx(rho)
        assert found.values["positive_contribution_start"] == pytest.approx(start)
    check_means(data, [bounds[:2] for bounds in literal])
    for metrics in data:
        assert set(metrics) >= METRICS
        assert metrics["actor/bapo/applied"] == 0
    assert all(set(bounds_used(update)) == {None} for update in read_updates(tmp_path / "capture"))


SPOILING = "actor_rollout_ref.model.external_lib=[support.capture,support.spoil]"
MONITOR = f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"


def test_one_line_monitors_a_run_of_verls(tmp_path):
    line = re.search(r"^ +(actor_rollout_ref\.actor\.policy_loss\._target_\S+)", MONITOR_PAGE, re.M)[1]
    assert line == MONITOR
    options = (f"+{LOSS}.record_dir={tmp_path}/record", "actor_rollout_ref.actor.ppo_epochs=2")
    data = run_verls_own(tmp_path, SHIPPED, line, *options, SPOILING, steps=EVERY, SPOIL="old_log_prob")
    check_monitored(tmp_path, data, updates=4 * EVERY, positions=[0, 1, 2, 3])
    said = said_to_the_user(tmp_path)
    assert said[0].startswith("bapo-verl ") and "monitors loss_mode=vanilla, target 0.4, in verl" in said[0]
    assert said[1] == "the monitor leaves out 1 response tokens without a usable old log-prob."
    assert f"the last {EVERY} training calls" in said[2] and len(said) == 3


@pytest.mark.slow
def test_a_merged_adapter_reaches_the_servers_and_nothing_is_told(tmp_path, task):
    """In separate_async verl sends an adapter only merged. Not merged, preflight refuses it, and vLLM 0.28 ends."""
    lora = ["lora_rank=4", "lora_alpha=8", "target_modules=all-linear", "lora.merge=true"]
    overrides = [f"actor_rollout_ref.model.{one}" for one in lora]
    run_verls_own(tmp_path, task, MONITOR, *ASYNCHRONOUS["separate_async"], *overrides, steps=2)
    assert not [line for line in said_to_the_user(tmp_path) if "adapter" in line]


@pytest.mark.slow
def test_an_update_that_verl_skips_is_seen_in_console_summary_and_metrics(tmp_path):
    overrides = ("actor_rollout_ref.model.external_lib=support.spoil", "trainer.total_training_steps=2")
    path = {"SPOIL": "gradient", "PYTHONPATH": str(ROOT / "tests")}
    run = run_example(tmp_path / "run", SHORT_STEPS, *overrides, "trainer.val_before_train=false", **path)
    assert run.returncode == 0, explain(run, tmp_path / "run")
    first, second = [data for _, data in read_metrics(tmp_path / "run") if "training/global_step" in data]
    assert first["actor/bapo/skipped"] == pytest.approx(1 / 8) and second["actor/bapo/skipped"] == 0
    assert math.isnan(first["actor/grad_norm"]) and math.isfinite(second["actor/grad_norm"])
    warning = "Warning: in step 1 the gradient norm was not finite. FSDP skips such an update."
    assert run.stdout.count(warning) == 1
    assert re.search(r"^  steps with a gradient norm that is not finite +1  of 2$", run.stdout, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_one_line_monitors_a_run_of_verls_with(mode, tmp_path, task):
    record = f"+{LOSS}.record_dir={tmp_path}/record"
    data = run_verls_own(tmp_path, task, MONITOR, record, *ASYNCHRONOUS[mode])
    # A step of colocate_async has two mini-batches; in separate_async two calls, of one each, share the servers'
    # weights.
    check_monitored(tmp_path, data, updates=4, positions=[0, 1])
