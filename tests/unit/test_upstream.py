"""The recipe's folder stands alone: in another tree, with only the package bapo beside it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipe" / "bapo"


def documented_command():
    """The arguments of the README's command for training."""
    (command,) = re.findall(
        r"^    python -m recipe\.bapo\.main_bapo((?:.*\\\n)*.*)", (RECIPE / "README.md").read_text(), re.M
    )
    return shlex.split(command.replace("\\\n", " "))


def test_it_works_in_a_tree_of_its_own(task, tmp_path):
    shutil.copytree(RECIPE, tmp_path / "tree" / "recipe" / "bapo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "bapo", tmp_path / "installed" / "bapo", ignore=shutil.ignore_patterns("__pycache__"))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "recipe.bapo.checks", *documented_command()),
            f"actor_rollout_ref.model.path={task}/model",
            f"data.train_files={task}/train.parquet",
            f"data.val_files={task}/test.parquet",
            "trainer.n_gpus_per_node=1",
            "trainer.save_freq=-1",
        ],
        cwd=tmp_path / "tree",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/tree:{tmp_path}/installed"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_readme_has_the_sections_of_the_collection():
    text = (RECIPE / "README.md").read_text()
    for section in ("Installation", "Training", "Evaluation", "Citation"):
        assert f"\n## {section}\n" in text


def test_the_required_verl_is_the_one_that_preflight_wants():
    from recipe.bapo.checks.machine import VERL

    lines = dict(line.split("=", 1) for line in (RECIPE / "REQUIRED_VERL.txt").read_text().splitlines() if "=" in line)
    assert lines["VERL_VERSION"] == VERL and lines["PIP_INSTALL"].endswith(f"verl=={VERL}")
    assert f"verl=={VERL}\n" in (ROOT / "requirements.txt").read_text()
