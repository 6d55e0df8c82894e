# SPDX-License-Identifier: Apache-2.0
"""Settings and data shared by the tests."""

import os
import re

os.environ["VERL_PLATFORM"] = "cpu"  # before anything imports verl

import pytest
import torch
from hypothesis import HealthCheck, settings

# too_slow judges the machine and not the test.
options = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=30, **options)
settings.register_profile("ci", **options)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)

# What a person may have set for runs of their own, and what changes what Python and its libraries print. BAPO_VENV and
# the variables of scripts/setup.sh stay: they choose the environment in which the run script works.
OF_THE_PERSON = re.compile(
    "MODEL_PATH|TRAIN_FILE|TEST_FILE|OUTPUT_DIR|NNODES|WAIT_SECONDS"
    "|BAPO_CACHE|BAPO_GPUS|BAPO_WARM_UP_STEPS|BAPO_DEVICE_ROOT|RAY_.*|VERL_(?!PLATFORM).*|VLLM_.*|WANDB_.*|NETRC|TENSORBOARD_DIR"
    "|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|DIST_INIT_METHOD|HYDRA_FULL_ERROR|PYTEST_ADDOPTS|TQDM_.*"
    "|COLUMNS|MPLBACKEND|MATPLOTLIBRC|PYTHON(WARNINGS|UNBUFFERED|DEVMODE|VERBOSE|OPTIMIZE|INSPECT)"
)


def pytest_configure():
    """Make the environment of the tests, and of the programs that they start, the same for everybody."""
    for name in filter(OF_THE_PERSON.fullmatch, list(os.environ)):
        del os.environ[name]
    os.environ["LC_ALL"] = "C.UTF-8"  # the shell's messages in English


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Make the example's task with a barely trained model: a folder with model/, train.parquet and test.parquet."""
    from scripts.example_task import make_task

    folder = tmp_path_factory.mktemp("task") / "task"
    make_task(folder, steps=6)
    return folder
