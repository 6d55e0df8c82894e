# SPDX-License-Identifier: Apache-2.0
"""Configs as the run script composes them."""

from pathlib import Path

import verl  # noqa: F401  loads the plugin
from recipe.bapo.config import compose_config

ROOT = Path(__file__).parents[2]


def compose_in_groups(*overrides):
    """A config with the groups of ``configs/``."""
    return compose_config(list(overrides), ROOT / "configs")


def composed(task, *overrides):
    """The example's config."""
    inputs = [
        f"actor_rollout_ref.model.path={task}/model",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/test.parquet",
    ]
    return compose_in_groups("experiment=example", "size=cpu", *inputs, *overrides)
