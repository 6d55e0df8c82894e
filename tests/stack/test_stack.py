"""The real stack on this machine: Ray, verl's trainer, FSDP2 over gloo and vLLM servers. Minutes each."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.stack_runs import explain, removing_what_others_leave, run_example

from bapo import BAPOConfig
from recipe.bapo.records.metrics import read_metrics, validation_reward
from recipe.bapo.replay import search, statistics_of

pytestmark = pytest.mark.stack


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The main job as the README gives it: its console output, its folder and its metrics per step."""
    output = tmp_path_factory.mktemp("example") / "run"
    run = run_example(output)
    assert run.returncode == 0, explain(run, output)
    records = read_metrics(output)
    return run.stdout, output, [data for step, data in records if "training/global_step" in data], records


def test_the_example_learns(example):
    _, _, steps, records = example
    assert len(steps) == 16
    rewards = [data["critic/rewards/mean"] for data in steps]
    validations = [value for _, data in records if (value := validation_reward(data)) is not None]
    assert len(validations) == 2
    # Sampling is not seeded. In 24 runs of the study's loop with these settings the sum of both gains was 0.44 to 0.80,
    # in 24 with a learning rate of 0 it was -0.05 to 0.03; validations of 288 samples add a deviation of 0.02 to 0.03.
    gains = mean(rewards[-6:]) - mean(rewards[:6]), validations[1] - validations[0]
    assert sum(gains) > 0.2, gains


def test_the_bounds_stay_in_their_ranges_and_move(example):
    _, output, steps, _ = example
    lines = [json.loads(line) for line in (output / "bounds" / "rank0.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(16 * 8))  # 8 updates per rollout batch
    assert [line["source"] for line in lines] == (["ratio 1"] + 7 * ["pass"]) * 16  # the trainer's mark arrives
    low = [float.fromhex(line["low"]) for line in lines]
    high = [float.fromhex(line["high"]) for line in lines]
    assert min(low) >= 0.6 and max(low) <= 0.9 and min(high) >= 1.2 and max(high) <= 3.0
    assert len(set(high)) > 1 and len(set(low)) > 1
    for step, data in enumerate(steps):
        assert data["actor/bapo/clip_low"] == pytest.approx(mean(low[8 * step : 8 * step + 8]), abs=1e-9)
        assert data["actor/bapo/clip_high"] == pytest.approx(mean(high[8 * step : 8 * step + 8]), abs=1e-9)


def test_the_positive_contribution_starts_below_the_target(example):
    _, _, steps, _ = example
    assert mean(data["actor/bapo/positive_contribution_start"] for data in steps[:6]) < 0.5
    for data in steps:
        assert 0 <= data["actor/bapo/positive_contribution"] <= 1
        assert 0 <= data["actor/bapo/saturated"] <= 1
    assert any(data["actor/bapo/saturated"] < 1 for data in steps)


def test_ratios_leave_1_and_every_metric_is_logged(example):
    _, _, steps, _ = example
    for data in steps:
        assert data["actor/entropy"] > 0 and data["actor/grad_norm"] > 0
        for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"):
            assert f"actor/{name}" in data
        assert len([key for key in data if key.startswith("actor/bapo/")]) == 9
    assert mean(data["actor/bapo/clipfrac_negative"] for data in steps) > 0


def test_the_weights_reach_vllm(example):
    # Rollout (vLLM) and actor (FSDP2) log-probs of the same tokens, step after step, while the weights change.
    _, _, steps, _ = example
    assert all(data["training/rollout_probs_diff_mean"] < 1e-3 for data in steps)
    assert all(data["training/rollout_actor_probs_pearson_corr"] > 0.999 for data in steps)


def test_the_console_has_a_line_per_step_and_a_summary(example):
    stdout, output, _, _ = example
    assert re.findall(r"^step +(\d+)/16 ", stdout, re.M) == [str(i) for i in range(1, 17)]
    summary = stdout[stdout.index("16 steps, mean") :]
    for text in ("training reward", "entropy", "positive contribution", "mean bounds", str(output)):
        assert text in summary
    assert len(stdout.splitlines()) < 60
    assert (output / "dynamics.png").stat().st_size > 10_000


@pytest.mark.slow  # tests/test_cluster.py has two ranks, each on a node of its own
def test_two_ranks_hold_bit_identical_bounds(tmp_path):
    run = run_example(
        tmp_path / "run", "trainer.total_training_steps=2", "trainer.val_before_train=false", GPUS_PER_NODE="2"
    )
    assert run.returncode == 0, explain(run, tmp_path / "run")
    records = [(tmp_path / "run" / "bounds" / f"rank{rank}.jsonl").read_text() for rank in (0, 1)]
    assert records[0] == records[1] and len(records[0].splitlines()) == 2 * 8
    # Of real data: each update's share is its own. (The bounds need not differ: all may be the largest.)
    assert len({json.loads(line)["positive_contribution"] for line in records[0].splitlines()}) > 8


def run_regime(tmp_path, config, steps, *overrides):
    """A few steps of one of ``configs/``; returns their metrics, after what holds in every regime."""
    length = (f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1")
    # With gradient and a lower target the search stops on its way; else it may run to its end in all of so few updates.
    method = ("method=bapo_gradient", "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4")
    run = run_example(tmp_path / "run", *method, *length, *overrides, CONFIG=config)
    assert run.returncode == 0, explain(run, tmp_path / "run")
    data = [data for _, data in read_metrics(tmp_path / "run") if "training/global_step" in data]
    assert len(data) == steps
    for metrics in data:
        assert metrics["actor/entropy"] > 0 and metrics["actor/grad_norm"] > 0
        assert len([key for key in metrics if key.startswith("actor/bapo/")]) == 9
        assert {f"training/off_policy/{name}" for name in ("cut_fraction", "updates_per_rollout_batch")} <= set(metrics)
    records = (tmp_path / "run" / "bounds" / "rank0.jsonl").read_text().splitlines()
    assert len({json.loads(line)["high"] for line in records}) > 1  # the bounds move
    return data, [json.loads(line) for line in records]


def test_sample_replay_at_staleness_32(tmp_path):
    dump = tmp_path / "dump"
    data, records = run_regime(
        tmp_path, "replay", 2, "staleness=32", f"actor_rollout_ref.actor.policy_loss.token_dump_dir={dump}"
    )
    assert len(records) == 2 * 32
    assert all(metrics["actor/bapo/clipfrac_negative"] > 0 for metrics in data)
    # What the command line says about the dump is what the run did, but for the updates at ratio 1, where the training
    # forward's log-probs differ from the recomputed ones in their last bits and may sit on a tie.
    definition = BAPOConfig(contribution="gradient", positive_contribution_target=0.4)
    found = search(statistics_of(dump, definition, 3.0)["gradient", "rollout_prob"], definition)
    assert len(found["low"]) == 64
    for update, record in enumerate(records):
        if record["source"] != "ratio 1":
            assert (found["low"][update].hex(), found["high"][update].hex()) == (record["low"], record["high"])
        for key in ("positive_contribution_start", "positive_token_fraction"):
            assert found[key][update] == pytest.approx(float.fromhex(record[key]), abs=1e-5), key


def test_partial_rollout_resumes_responses_under_new_weights(tmp_path):
    data, _ = run_regime(tmp_path, "partial_rollout", 3)
    assert max(metrics["training/off_policy/cut_fraction"] for metrics in data) > 0
    assert max(metrics["training/off_policy/trajectory_spans/max"] for metrics in data) > 1
    assert max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data) > 0


def test_separate_devices_train_on_what_older_weights_sampled(tmp_path):
    data, records = run_regime(tmp_path, "separate_async", 3)
    assert len(records) == 3 * 4 and {line["source"] for line in records} == {
        "pass"
    }  # parameter_sync_step updates each
    assert max(metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in data) > 0
    # The weights arrive at the servers: what they sampled agrees with the trainer's log-probs at the step's start.
    assert all(abs(metrics["actor/ppo_kl"]) < 0.1 for metrics in data)


def test_evaluation_prints_the_spread_and_trains_nothing(tmp_path):
    run = run_example(tmp_path / "run", "actor_rollout_ref.rollout.val_kwargs.n=4", CONFIG="evaluate")
    assert run.returncode == 0, explain(run, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "validation" / "step_0.json").read_text())["sources"]["bapo/guess"]
    assert (found["problems"], found["n"]) == (288, 4) and found["std"] > 0
    assert 0 < found["lowest"] <= found["mean"] <= found["highest"] < 1
    assert re.search(rf"^bapo/guess +288 +4 +{found['mean']:.4f} ", run.stdout, re.M)
    assert not (tmp_path / "run" / "bounds").exists()


def test_any_verl_run_can_use_the_loss(tmp_path, task):
    """verl's own entry point: the package is installed, so ``loss_mode=bapo`` and its ``_target_`` are enough."""
    from recipe.bapo.cpu.settings import ENVIRONMENT, OVERRIDES

    with removing_what_others_leave():
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "verl.trainer.main_ppo",
                *OVERRIDES,
                "actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
                "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
                "+actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.45",
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
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
                "reward.custom_reward_function.path=pkg://recipe.bapo.example.reward",
                "reward.custom_reward_function.name=compute_score",
                "trainer.n_gpus_per_node=1",
                "trainer.total_training_steps=1",
                "trainer.val_before_train=false",
                "trainer.logger=[file]",
                f"trainer.default_local_dir={tmp_path}/checkpoints",
                f"hydra.run.dir={tmp_path}/hydra",
            ],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")},
            stdin=subprocess.DEVNULL,
            stdout=open(tmp_path / "train.log", "w"),
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    assert run.returncode == 0, (tmp_path / "train.log").read_text()[-4000:]
    ((_, data),) = read_metrics(tmp_path)
    assert 0.6 <= data["actor/bapo/clip_low"] <= 0.9 and 1.2 <= data["actor/bapo/clip_high"] <= 3.0
