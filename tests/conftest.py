# SPDX-License-Identifier: Apache-2.0
"""Settings and data shared by the tests."""

import os

os.environ["VERL_PLATFORM"] = "cpu"  # before anything imports verl

import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Make the example's task with a barely trained model: a folder with model/, train.parquet and test.parquet."""
    from scripts.example_task import make_task

    folder = tmp_path_factory.mktemp("task") / "task"
    make_task(folder, steps=6)
    return folder
