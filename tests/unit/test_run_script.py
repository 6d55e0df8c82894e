# SPDX-License-Identifier: Apache-2.0
"""The run script names what is missing or wrong in its environment in a line, before it sets anything up."""

import json
import os
import subprocess

import pytest
from support.commands import ROOT, run_script
from support.gpus import write_nvidia_smi


@pytest.mark.parametrize(
    "environment, overrides, message",
    [
        ({"TRAIN_FILE": "/no/such.parquet"}, [], "Error: TRAIN_FILE=/no/such.parquet does not exist"),
        ({"CONFIG": "nothing"}, [], "Error: CONFIG=nothing is not usable: choose from"),
        ({"SIZE": "nothing"}, [], "Error: SIZE=nothing is not usable: choose from cpu cpu_example"),
        ({"CONFIG": "paper_7b"}, [], "Error: CONFIG=paper_7b is for GPUs"),
        ({"GPUS_PER_NODE": "many"}, [], "Error: GPUS_PER_NODE=many is not usable"),
        ({"MODEL_PATH": "/no/such"}, [], "Error: MODEL_PATH=/no/such is not a folder"),
        ({"TRAIN_FILE": "/tmp"}, [], "Error: TRAIN_FILE=/tmp is a folder: give a parquet file"),
        ({"CONFIG": "../size/cpu"}, [], "Error: CONFIG=../size/cpu is not usable: choose from"),
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


def test_nothing_in_the_environment_is_run_and_json_stays_json(tmp_path):
    value = f"gpus[$(touch {tmp_path}/ran)]"
    for arguments in ((), ("--preflight", "--json")):
        run = run_script(*arguments, CONFIG="separate_async", GPUS_PER_NODE=value, VERL_PLATFORM="cpu")
        assert run.returncode == 1 and f"Error: GPUS_PER_NODE={value} is not usable" in run.stderr
    (line,) = json.loads(run.stdout)
    assert line["status"] == "failed" and value in line["detail"] and not (tmp_path / "ran").exists()
    run = run_script("--preflight", "--json", OUTPUT_DIR='/tmp/${x}\\ "quoted"')
    (line,) = json.loads(run.stdout)
    assert line["detail"].startswith('OUTPUT_DIR=/tmp/${x}\\ "quoted" is not usable: name a folder without ${')


def test_help_is_the_scripts_header():
    run = run_script("--help")
    assert run.returncode == 0 and "--preflight [--json]" in run.stdout and "GPUS_PER_NODE" in run.stdout


def test_those_that_train_and_sample_may_be_different_nodes_of_a_cluster(tmp_path):
    write_nvidia_smi(tmp_path, gpus=8)
    gpus = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERL_PLATFORM": "", "CONFIG": "separate_async"}
    apart = {**gpus, "GPUS_PER_NODE": "8", "ROLLOUT_GPUS_PER_NODE": "8"}
    alone = run_script(**apart)
    assert "GPUS_PER_NODE=8 to train and ROLLOUT_GPUS_PER_NODE=8 to sample on each node, and this" in alone.stderr
    joined = run_script(**apart, RAY_ADDRESS="http://10.0.0.1:8265")
    assert "Error: MODEL_PATH is not set" in joined.stderr  # the next thing that is asked for


def test_gpus_that_cuda_is_told_to_leave_are_not_counted(tmp_path):
    write_nvidia_smi(tmp_path, gpus=8)
    chosen = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERL_PLATFORM": "", "CUDA_VISIBLE_DEVICES": "2,GPU-5a"}
    run = run_script(CONFIG="separate_async", ROLLOUT_GPUS_PER_NODE="3", **chosen)
    assert run.returncode == 1 and "ROLLOUT_GPUS_PER_NODE=3 to sample on each node, and this node has 2" in run.stderr


@pytest.mark.parametrize("platform", ["gpu", "huawei"])
def test_a_platform_that_verl_or_we_do_not_know_is_named(platform):
    run = run_script(VERL_PLATFORM=platform)
    assert run.returncode == 1 and f"VERL_PLATFORM={platform} is not usable: leave it unset" in run.stderr


def test_verls_own_name_of_the_platform_is_none(tmp_path):
    write_nvidia_smi(tmp_path)
    run = run_script(PATH=f"{tmp_path}:{os.environ['PATH']}", VERL_PLATFORM="nvidia", CUDA_VISIBLE_DEVICES="0")
    assert run.returncode == 1 and "Error: MODEL_PATH is not set" in run.stderr
    without = run_script(PATH=f"{tmp_path}:{os.environ['PATH']}", VERL_PLATFORM="nvidia", CUDA_VISIBLE_DEVICES="")
    assert without.returncode == 1 and "VERL_PLATFORM=nvidia, but no GPU is visible here" in without.stderr


def test_the_gsm8k_script_leaves_the_platform_to_verl(tmp_path, task):
    write_nvidia_smi(tmp_path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "platform=${VERL_PLATFORM-unset} $MODEL_PATH $@"\n')
    python.chmod(0o755)
    given = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "MODEL_PATH")}
    given |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BAPO_VENV": str(tmp_path), "OUTPUT_DIR": f"{tmp_path}/run"}
    given |= {"TRAIN_FILE": f"{task}/train.parquet", "TEST_FILE": f"{task}/test.parquet"}
    script = ["bash", f"{ROOT}/recipe/bapo/run_gsm8k_gpu.sh", "trainer.total_epochs=1"]
    run = subprocess.run(script, env=given, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    start = run.stdout.splitlines()[-1].split()
    assert start[:4] == ["platform=unset", "Qwen/Qwen2.5-0.5B-Instruct", "-m", "recipe.bapo.launch"]
    assert "experiment=replay" in start and "size=gpu" in start and start[-1] == "trainer.total_epochs=1"


def test_a_machine_with_amd_gpus_does_not_train_the_toy_task(tmp_path):
    (tmp_path / "rocm-smi").write_text("#!/bin/sh\n")
    (tmp_path / "rocm-smi").chmod(0o755)
    run = run_script(PATH=f"{tmp_path}:{os.environ['PATH']}", VERL_PLATFORM="")
    assert run.returncode == 1 and "Error: this machine has AMD GPUs, which are not supported" in run.stderr


@pytest.mark.parametrize(
    "gpus, environment, message",
    [
        (1, {}, "Error: MODEL_PATH is not set: Hugging Face folder or hub name."),
        (8, {"CONFIG": "separate_async"}, "Error: MODEL_PATH is not set: Hugging Face folder or hub name."),
        (
            1,
            {"CONFIG": "separate_async"},
            "GPUS_PER_NODE=1 to train and ROLLOUT_GPUS_PER_NODE=0 to sample on each node, and this node has 1",
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
