# SPDX-License-Identifier: Apache-2.0
"""The recipe in the form of verl's collection: its style, its config, and an update of the real worker with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.actor import free_port

from scripts.verl_recipe.export import COLLECTIONS_STYLE, export

ROOT = Path(__file__).parents[2]
UPDATE = """
import json, sys
from support.actor import make_actor, make_mini_batch, run_update

model, port, record = sys.argv[1:]
actor = make_actor(
    [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
        "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        f"+actor_rollout_ref.actor.policy_loss.bounds_record_dir={record}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ],
    port=int(port),
    stock=True,
)
run_update(actor, make_mini_batch(actor, seed=7, rows=8))
config = next(base for base in type(actor.bapo_config).__mro__ if base.__name__ == "BAPOConfig")
modules = [type(actor).__module__, config.__module__]
print(json.dumps({"modules": modules, "installed": "bapo" in sys.modules, "file": sys.modules[modules[0]].__file__}))
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return export(tmp_path_factory.mktemp("collection") / "recipe")


def test_it_passes_the_collections_style(recipe, tmp_path):
    (tmp_path / "ruff.toml").write_text(COLLECTIONS_STYLE)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", tmp_path / "ruff.toml", recipe], capture_output=True
        )
        assert done.returncode == 0, done.stdout.decode()


def run_with(recipe, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": f"{recipe.parents[1]}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def with_platform(recipe, tmp_path_factory):
    """Return the recipe with our CPU platform added, because verl has none."""
    target = tmp_path_factory.mktemp("cpu") / "recipe" / "bapo"
    shutil.copytree(recipe, target)
    shutil.copytree(ROOT / "recipe/bapo/cpu", target / "cpu")
    shutil.copytree(ROOT / "recipe/bapo/config/platform", target / "config/platform")
    shutil.copy(ROOT / "recipe/bapo/config/__init__.py", target / "config/__init__.py")
    return target


def test_its_entry_point_composes_its_config(with_platform, tmp_path):
    shown = run_with(with_platform, "-m", "recipe.bapo.main_bapo", "--cfg", "job", cwd=tmp_path)
    assert "positive_contribution_target: 0.4" in shown and "adv_estimator: grpo" in shown


def test_an_update_of_the_real_worker(with_platform, task, tmp_path):
    record = tmp_path / "bounds"
    printed = run_with(with_platform, "-c", UPDATE, task / "model", str(free_port()), record, cwd=tmp_path)
    found = json.loads(printed.splitlines()[-1])
    assert found["modules"] == ["recipe.bapo.worker", "recipe.bapo.core.config"] and not found["installed"]
    assert found["file"] == str(with_platform / "worker.py")
    (line,) = (record / "rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["source"] == "pass"
