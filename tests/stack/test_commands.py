# SPDX-License-Identifier: Apache-2.0
"""The commands that people type, up to the start of Ray. Each imports verl and takes some seconds."""

import os
import re
import shlex
import shutil
import subprocess
import sys

from support.gpus import write_model
from support.stack_runs import ROOT, run_example

RECIPE = ROOT / "recipe" / "bapo"


def test_a_wrong_key_ends_the_run_before_ray_starts(tmp_path):
    key = "actor_rollout_ref.actor.policy_loss.positive_contribution"
    run = run_example(tmp_path / "run", f"{key}=0.4")
    assert run.returncode == 1 and f"Could not override '{key}'." in run.stderr, run.stdout + run.stderr
    assert len(run.stderr.splitlines()) <= 8 and "Starting Ray" not in run.stdout


def test_preflight_prints_its_table_alone_and_fails(tmp_path):
    run = run_example(tmp_path / "run", "--preflight", "trainer.critic_warmup=9")
    lines = run.stdout.splitlines()
    status = {line.split()[0] for line in lines} - {"warning"}  # a small machine may be warned of
    assert run.returncode == 1 and status == {"ok", "skipped", "failed"}, run.stdout + run.stderr
    (failed,) = [line for line in lines if line.startswith("failed")]
    assert "trainer.critic_warmup=9 without a critic keeps the actor from training" in failed


def test_a_papers_config_is_checked_on_a_login_node(task, tmp_path):
    (overrides,) = re.findall(
        r"^    MODEL_PATH=.* bash recipe/bapo/run_bapo_example.sh (experiment=paper_7b .*) --preflight$",
        (ROOT / "docs/running.md").read_text(),
        re.M,
    )
    inputs = {
        "MODEL_PATH": write_model(task, tmp_path / "7B", "7B"),
        "TRAIN_FILE": task / "train.parquet",
        "TEST_FILE": task / "test.parquet",
    }
    variables = {name: str(path) for name, path in inputs.items()}
    reward = "reward.custom_reward_function.path=pkg://recipe.bapo.example.reward"  # scores the task's data
    environment = {**variables, "VERL_PLATFORM": "", "CUDA_VISIBLE_DEVICES": ""}
    run = run_example(tmp_path / "run", *shlex.split(overrides), "--preflight", reward, **environment)
    warned = [line.split()[1] for line in run.stdout.splitlines() if not line.startswith(("ok", "skipped"))]
    assert run.returncode == 0 and set(warned) <= {"disk"}, run.stdout + run.stderr
    assert "GPUs: 8 to train; 0 are here" in run.stdout


def documented_command():
    """Return the arguments of the documented command for our trainer."""
    page = (ROOT / "docs/your_own_run.md").read_text()
    (command,) = re.findall(r"^    python -m recipe\.bapo\.main_bapo((?:.*\\\n)*.*)", page, re.M)
    return shlex.split(command.replace("\\\n", " "))


def test_it_works_in_a_tree_of_its_own(task, tmp_path):
    shutil.copytree(RECIPE, tmp_path / "tree" / "recipe" / "bapo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "bapo", tmp_path / "installed" / "bapo", ignore=shutil.ignore_patterns("__pycache__"))
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "recipe.bapo.preflight",
                "--config-name",
                "bapo_trainer",
                *documented_command(),
            ),
            f"actor_rollout_ref.model.path={task}/model",
            f"data.train_files={task}/train.parquet",
            f"data.val_files={task}/test.parquet",
            "trainer.n_gpus_per_node=1",
            "trainer.save_freq=-1",
            "data.max_prompt_length=128",  # the tiny model has 1,024 positions
            "data.max_response_length=128",
            "reward.custom_reward_function.path=pkg://recipe.bapo.example.reward",  # scores the example's data
        ],
        cwd=tmp_path / "tree",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/tree:{tmp_path}/installed"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
