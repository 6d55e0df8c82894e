# SPDX-License-Identifier: Apache-2.0
"""The run script names what is missing or wrong in its environment in a line, before it sets anything up."""

import os

import pytest
from support.commands import run_script


@pytest.mark.parametrize(
    "environment, overrides, message",
    [
        ({"TRAIN_FILE": "/no/such.parquet"}, [], "Error: TRAIN_FILE=/no/such.parquet does not exist"),
        ({"CONFIG": "nothing"}, [], "Error: CONFIG=nothing is not usable: choose from"),
        ({"SIZE": "nothing"}, [], "Error: SIZE=nothing is not usable: choose from cpu cpu_example"),
        ({"CONFIG": "paper_7b"}, [], "Error: CONFIG=paper_7b is for GPUs"),
        ({"GPUS_PER_NODE": "many"}, [], "Error: GPUS_PER_NODE=many is not usable"),
        ({"MODEL_PATH": "/no/such"}, [], "Error: MODEL_PATH=/no/such is not a folder"),
        ({"NNODES": "2", "VERL_PLATFORM": ""}, [], "Error: NNODES=2 but this machine has no GPU"),
        (
            {"RAY_ADDRESS": "http://h:1", "VERL_PLATFORM": ""},
            [],
            "Error: RAY_ADDRESS=http://h:1 but this machine has no GPU",
        ),
    ],
)
def test_the_script_ends_before_ray_starts(environment, overrides, message, tmp_path):
    run = run_script(*overrides, OUTPUT_DIR=str(tmp_path / "run"), **environment)
    assert run.returncode != 0
    assert message in run.stderr, run.stdout + run.stderr
    assert len(run.stderr.splitlines()) <= 8 and "Starting Ray" not in run.stdout


@pytest.mark.parametrize(
    "gpus, environment, message",
    [
        (1, {}, "Error: MODEL_PATH is not set: Hugging Face folder or hub name."),
        (8, {"CONFIG": "separate_async"}, "Error: MODEL_PATH is not set: Hugging Face folder or hub name."),
        (
            1,
            {"CONFIG": "separate_async"},
            "GPUS_PER_NODE=1 to train and ROLLOUT_GPUS_PER_NODE=0 to sample, and there are 1",
        ),
        (8, {"CONFIG": "separate_async", "GPUS_PER_NODE": "8"}, "GPUS_PER_NODE=8 to train and ROLLOUT_GPUS_PER_NODE=0"),
        (8, {"CONFIG": "separate_async", "ROLLOUT_GPUS_PER_NODE": "9"}, "ROLLOUT_GPUS_PER_NODE=9 to sample"),
    ],
)
def test_with_gpus_what_is_missing_is_named(tmp_path, gpus, environment, message):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\n" + "echo 'GPU 0: a test'\n" * gpus)
    fake.chmod(0o755)
    run = run_script(PATH=f"{tmp_path}:{os.environ['PATH']}", VERL_PLATFORM="", **environment)
    assert run.returncode == 1 and message in run.stderr and len(run.stderr.splitlines()) == 1
