# SPDX-License-Identifier: Apache-2.0
"""A copy of ``bapo/`` and of the few files that hook it into verl makes updates without the rest of this repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPDATE = """
import sys
from pathlib import Path

from support.actor import free_port, make_actor, make_mini_batch, run_update

root, model = sys.argv[1:]
overrides = [
    f"actor_rollout_ref.model.path={model}",
    "actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
    "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]
actor = make_actor(overrides, port=free_port())
metrics, _ = run_update(actor, make_mini_batch(actor, seed=7, rows=16))
assert 0.6 <= metrics["actor/bapo/clip_low"][0][0] <= 0.9
files = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
assert "verl.trainer.ppo.v1" not in sys.modules  # verl's branch neo has no V1 trainers
ours = [file for file in files if file.is_relative_to(f"{root}/bapo") or file.is_relative_to(f"{root}/recipe")]
assert not ours, ours
"""


def test_a_copy_of_core_and_hook_makes_an_update(tmp_path, task):
    shutil.copytree(ROOT / "bapo", tmp_path / "bapo")
    # The test needs our CPU platform, with its config; of the patches a user with GPUs needs that of fused heads alone.
    for name in ("hook", "verl_patches", "config"):
        shutil.copytree(ROOT / "recipe/bapo" / name, tmp_path / "recipe/bapo" / name)
    for name in ("__init__", "policy_loss"):
        shutil.copy(ROOT / "recipe/bapo" / f"{name}.py", tmp_path / "recipe/bapo")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}", "VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-c", UPDATE, ROOT, task / "model"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
