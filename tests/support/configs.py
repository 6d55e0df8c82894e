"""Configs as the run script composes them."""

from pathlib import Path

from hydra import compose, initialize_config_dir

import verl  # noqa: F401  loads the plugin
from recipe.bapo.cpu import settings

ROOT = Path(__file__).parents[2]


def composed(task, *overrides):
    """The example's config as the run script would compose it."""
    inputs = [
        f"actor_rollout_ref.model.path={task}/model",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/test.parquet",
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("example", ["size=cpu", *settings.OVERRIDES, *inputs, *overrides])
