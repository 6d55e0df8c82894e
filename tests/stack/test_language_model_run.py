# SPDX-License-Identifier: Apache-2.0
"""Fetch, convert and barely warm up the language model, and train it for two steps on the real stack: some minutes."""

import re

import pytest
from support.stack_runs import ROOT, explain, run_example

from recipe.bapo.host.metrics import read_metrics

SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.val_max_samples=16",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
)


@pytest.mark.slow
def test_the_language_model_is_made_once_and_trains_and_its_answers_are_shown(tmp_path):
    environment = {"BAPO_CACHE": str(tmp_path / "cache"), "BAPO_WARM_UP_STEPS": "20"}
    run = run_example(tmp_path / "run", "experiment=language_model", *SMALL, **environment)
    assert run.returncode == 0, explain(run, tmp_path / "run")
    assert "warming up: 100%" in run.stderr and "Made in" in run.stderr
    (made,) = (tmp_path / "cache").glob("language_model_*")  # beside the converted model
    steps = [data for _, data in read_metrics(tmp_path / "run") if "training/global_step" in data]
    assert [data["training/global_step"] for data in steps] == [1, 2]
    # The weights reach vLLM in both steps: its probabilities differ from the trainer's by rounding only.
    assert all(data["training/rollout_probs_diff_mean"] < 1e-3 for data in steps)
    assert all(data["prompt_length/max"] == 12 and data["response_length/max"] <= 30 for data in steps)
    shown = run.stdout.partition("before and after:\n")[2].splitlines()
    assert re.fullmatch(r"  Sort:( \d\d){3}", shown[0]) and len([line for line in shown if "(reward " in line]) == 6

    again = run_example(tmp_path / "again", "experiment=language_model", "--preflight", **environment)
    assert (
        again.returncode == 0 and "warmed up by 20 supervised steps" in again.stdout and not again.stderr.count("Made")
    )
    assert ROOT / ".cache" not in made.parents
