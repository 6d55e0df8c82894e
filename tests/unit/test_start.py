# SPDX-License-Identifier: Apache-2.0
"""What a run gets on a laptop, on one GPU, two and eight, and on a cluster, and what is refused in one line."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import LIMIT, ROOT
from support.starts import start_on

from recipe.bapo.config import EXAMPLE
from recipe.bapo.host.files import output_folder
from recipe.bapo.run import machine, start

OWN = {"MODEL_PATH": "hub/model", "TRAIN_FILE": "/train.parquet", "TEST_FILE": "/test.parquet"}
ON_TWO_NODES = {**OWN, "NNODES": "2"}
CLUSTER = {**OWN, "RAY_ADDRESS": "http://h:8265"}
LOOPBACK, SAMPLER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "VLLM_USE_FLASHINFER_SAMPLER"
TRAIN, SAMPLE = "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node"
LANGUAGE_MODEL = "pkg://recipe.bapo.language_model.task"
DICE = "pkg://recipe.bapo.example.reward"


@pytest.mark.parametrize(
    "gpus, command, variables, device, batch, response, reward, processes, train",
    [
        # A machine without a GPU. VERL_PLATFORM=cpu makes one of a machine with GPUs.
        (0, "", {}, "cpu", 64, 30, DICE, 1, 1),
        (8, "", {"VERL_PLATFORM": "cpu"}, "cpu", 64, 30, DICE, 1, 1),
        (0, f"experiment=replay {TRAIN}=2", {}, "cpu", 64, 30, DICE, 1, 2),
        (0, "experiment=partial_rollout", {}, "cpu", 32, 120, DICE, 1, 1),
        (0, "experiment=language_model", {}, "cpu", 32, 30, LANGUAGE_MODEL, 1, 1),
        (0, "", {"MODEL_PATH": "/model"}, "cpu", 64, 30, DICE, 1, 1),
        (0, "", OWN, "cpu", 32, 256, None, 1, 1),
        # GPUs without the user's model: batches can be divided among two, four and eight.
        (1, "", {}, "cuda", 64, 30, LANGUAGE_MODEL, 1, 1),
        (3, "", {}, "cuda", 64, 30, LANGUAGE_MODEL, 1, 2),
        (7, "", {}, "cuda", 256, 30, LANGUAGE_MODEL, 1, 4),
        (8, f"{TRAIN}=1", {}, "cuda", 64, 30, LANGUAGE_MODEL, 1, 1),
        # GPUs and the user's model.
        (1, "", OWN, "cuda", 256, 8192, None, 1, 1),
        (8, "", OWN, "cuda", 256, 8192, None, 8, 8),
        (8, "", {**OWN, "VERL_PLATFORM": "nvidia", "CUDA_VISIBLE_DEVICES": "2,GPU-5a"}, "cuda", 256, 8192, None, 1, 2),
        (8, f"{TRAIN}=2", OWN, "cuda", 256, 8192, None, 1, 2),
        (1, "", ON_TWO_NODES, "cuda", 256, 8192, None, 8, 1),
        (1, "experiment=gsm8k", OWN, "cuda", 256, 1024, None, 1, 1),
        # A login node, where a run of a node of eight GPUs is checked.
        (0, "experiment=paper_7b --preflight", OWN, "cuda", 256, 8192, None, 8, 8),
        (0, f"experiment=table_8_gpus {TRAIN}=2 --preflight", OWN, "cuda", 256, 3072, None, 1, 2),
        (0, "--preflight", {**OWN, "VERL_PLATFORM": "nvidia"}, "cuda", 256, 8192, None, 8, 8),
    ],
)
def test_a_run_fits_its_machine(tmp_path, gpus, command, variables, device, batch, response, reward, processes, train):
    config = start_on(tmp_path, gpus, command, **variables).config
    found = config.trainer.device, config.data.train_batch_size, config.data.max_response_length
    assert found == (device, batch, response)
    assert config.reward.custom_reward_function.path == reward
    assert config.actor_rollout_ref.rollout.agent.num_workers == processes
    assert config.trainer.n_gpus_per_node == train
    if reward == LANGUAGE_MODEL:
        assert config.actor_rollout_ref.model.path == f"{tmp_path}/made/model"
    elif "MODEL_PATH" in variables:
        assert config.actor_rollout_ref.model.path == variables["MODEL_PATH"]
    else:
        assert config.actor_rollout_ref.model.path == f"{EXAMPLE}/model"
        assert config.data.train_files == f"{EXAMPLE}/train.parquet"


@pytest.mark.parametrize(
    "gpus, command, variables, train, sample",
    [
        (0, "", {}, 1, 1),
        (0, f"{TRAIN}=2", {}, 2, 1),  # logical slots
        (3, "", OWN, 2, 1),
        (8, "", {}, 4, 4),
        (5, "", {}, 2, 2),  # the language model on four
        (8, f"{TRAIN}=6", OWN, 6, 2),
        (8, f"{TRAIN}=4 {SAMPLE}=2", CLUSTER, 4, 2),
    ],
)
def test_half_of_the_gpus_train_where_trainer_and_rollout_are_separate(
    tmp_path, gpus, command, variables, train, sample
):
    config = start_on(tmp_path, gpus, f"experiment=separate_async {command}", **variables).config
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node) == (train, sample)


@pytest.mark.parametrize(
    "gpus, command, variables, message",
    [
        (0, "experiment=gsm8kk", {}, "Could not find 'experiment/gsm8kk' Available options in 'experiment': evaluate"),
        (0, "", {"VERL_PLATFORM": "huawei"}, "'platform/huawei' Available options in 'platform': cpu"),
        (0, "data.x=[1", {}, "data.x=[1: "),
        (0, "run_dir=", {}, "invalid run_dir (OUTPUT_DIR)=: name a folder"),
        (0, "", {"OUTPUT_DIR": "/tmp/${x}"}, "run_dir (OUTPUT_DIR)=/tmp/${x}: name a folder, without ${"),
        (0, "", {"TRAIN_FILE": "/train.parquet"}, "Environment variable 'TEST_FILE' not found"),
        # On a GPU the language model is the default only if no input is given, on one node, and not for these configs.
        (1, "", {"TEST_FILE": "/a"}, "actor_rollout_ref.model.path: \"Environment variable 'MODEL_PATH' not found\""),
        (8, "", {"NNODES": "2"}, "Environment variable 'MODEL_PATH' not found"),
        (8, "experiment=paper_7b", {}, "Environment variable 'MODEL_PATH' not found"),
        (8, "experiment=evaluate", {}, "Environment variable 'MODEL_PATH' not found"),
        (1, "experiment=language_model", {"TEST_FILE": "/a"}, "experiment=language_model makes its own model and"),
        (8, "experiment=language_model", {"NNODES": "2"}, "makes its own model and data, on this machine alone"),
        # The CPU path does not use other machines unless it is asked to.
        (0, "trainer.nnodes=2", {}, "trainer.nnodes=2 (NNODES), but this machine has no GPU"),
        (0, "", {"RAY_ADDRESS": "http://h:1"}, "RAY_ADDRESS=http://h:1, but this machine has no GPU"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path, gpus, command, variables, message):
    error = start_on(tmp_path, gpus, command, **variables).error
    assert message in error and "\n" not in error


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:8265"])
def test_nnodes_and_the_trainers_key_are_one_setting(tmp_path, address):
    one, other = (
        start_on(tmp_path, 1, command, **OWN, **variables, RAY_ADDRESS=address, OUTPUT_DIR="/out")
        for command, variables in (("", {"NNODES": "4"}), ("trainer.nnodes=4", {}))
    )
    assert one.config == other.config and one.config.trainer.nnodes == 4
    assert [LOOPBACK in run.environment for run in (one, other)] == [False, False]


def test_on_a_cpu_ray_hears_of_no_gpus_and_of_this_machine_alone(tmp_path):
    environment = start_on(tmp_path, 1, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="0", composes=False).environment
    assert environment["VERL_PLATFORM"] == "cpu" and "CUDA_VISIBLE_DEVICES" not in environment
    assert environment[LOOPBACK] == "0"


def test_on_gpus_the_platform_is_left_to_verl_and_a_cluster_may_listen(tmp_path):
    environment = start_on(tmp_path, 8, **ON_TWO_NODES, VERL_PLATFORM="nvidia", composes=False).environment
    assert "VERL_PLATFORM" not in environment and LOOPBACK not in environment and environment[SAMPLER] == "0"
    assert LOOPBACK not in start_on(tmp_path, 8, **OWN, RAY_ADDRESS="10.0.0.1:6379", composes=False).environment
    assert start_on(tmp_path, 8, **OWN, RAY_ADDRESS="local", composes=False).environment[LOOPBACK] == "0"


def test_a_run_on_a_ray_cluster_is_submitted(tmp_path):
    on_gpus = start_on(tmp_path, 8, **CLUSTER, NNODES="4")
    assert on_gpus.command[1:3] == ["scripts/cluster/job.py", "submit"] and "recipe.bapo.run" in on_gpus.command
    assert (on_gpus.config.trainer.nnodes, on_gpus.config.trainer.n_gpus_per_node) == (4, 8)
    on_cpus = start_on(tmp_path, 0, "size=cpu", RAY_ADDRESS="http://h:8265", NNODES="2", VERL_PLATFORM="cpu")
    assert (on_cpus.config.trainer.nnodes, on_cpus.config.trainer.n_gpus_per_node) == (2, 1)
    assert on_cpus.config.trainer.device == "cpu" and LOOPBACK not in on_cpus.environment
    joined = start_on(tmp_path, 8, **OWN, RAY_ADDRESS="10.0.0.1:6379", composes=False)
    assert joined.command[1:3] == ["-m", "recipe.bapo.run"]


def test_without_flash_attn_torchs_own_is_chosen(tmp_path):
    def attention(command="", **options):
        model = start_on(tmp_path, 1, command, **OWN, **options).config.actor_rollout_ref.model
        return model.override_config.get("attn_implementation")

    assert attention() == "torch_varlen" and attention("platform=gpu_without_flash_attn") == "sdpa"
    assert attention(flash_attn=True) is None


def test_threads_of_the_language_model_on_a_cpu_share_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))

    def variables(command):
        return start_on(tmp_path, 0, command).config.ray_kwargs.ray_init.runtime_env.env_vars

    shared = variables(f"experiment=language_model {TRAIN}=2")
    assert (shared.OMP_NUM_THREADS, shared.OMP_WAIT_POLICY) == ("3", "PASSIVE")
    assert variables("").OMP_NUM_THREADS == "1"


@pytest.mark.parametrize("name", ["evaluate", "[paper_7b,evaluate]"])
def test_an_evaluation_needs_no_training_file(tmp_path, name):
    run = start_on(tmp_path, 8, f"experiment={name}", MODEL_PATH="/model", TEST_FILE="/test.parquet")
    assert run.config.data.train_files == run.config.data.val_files == "/test.parquet"
    assert run.config.trainer.val_only and run.config.actor_rollout_ref.model.path == "/model"


@pytest.mark.parametrize(
    "command, variables, folder",
    [
        ("", {}, "runs/example-[0-9]{8}-[0-9]{6}"),
        ("experiment=[replay,evaluate]", {"TEST_FILE": ""}, "runs/evaluate-[0-9]{8}-[0-9]{6}"),
        ("run_dir=/mine", {"OUTPUT_DIR": "/out"}, "/mine"),
        ("run_dir=mine", {}, f"{Path.cwd()}/mine"),
        ("++run_dir=/mine", {}, "/mine"),
        ("run_dir=/mine run_dir='/my'", {}, "/my"),  # Hydra takes the last one, and takes the quotes away
    ],
)
def test_the_folder_of_a_run_is_decided_once(tmp_path, command, variables, folder):
    run = start_on(tmp_path, 0, command, **variables)
    chosen = run.environment["OUTPUT_DIR"]
    assert re.fullmatch(folder if folder.startswith("/") else f"{start.ROOT}/{folder}", chosen)
    assert str(output_folder(run.command, {"OUTPUT_DIR": chosen}, "bapo")) == chosen  # in the parent
    assert run.config.run_dir == chosen and not any("run_dir" in word for word in run.command)


def test_rays_folder_is_relative_to_where_the_command_was_given(tmp_path):
    run = start_on(tmp_path, 0, composes=False, RAY_TMPDIR="here")
    assert run.environment["RAY_TMPDIR"] == str(Path.cwd() / "here")


def test_gpus_outside_cuda_visible_devices_are_not_counted(monkeypatch):
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="GPU 0: H100\n" * 8))
    counts = {None: 8, "": 0, "2,GPU-5a": 2, "-1": 0}
    for visible, count in counts.items():
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert machine.visible_gpus(environment) == count


def test_the_language_model_need_not_be_warmed_up_to_be_checked(tmp_path):
    for command, module, made in (("--preflight", "preflight", "converted"), ("", "run", "made")):
        run = start_on(tmp_path, 1, command, composes=False)
        assert run.command[2] == f"recipe.bapo.{module}" and run.environment["MODEL_PATH"] == f"{tmp_path}/{made}/model"


def test_vllm_finds_pinned_memory_on_wsl2(monkeypatch):
    monkeypatch.setattr(machine.os, "uname", lambda: SimpleNamespace(release="6.1.0-amd64"))
    assert machine.system_variables({}) == {SAMPLER: "0"}
    monkeypatch.setattr(machine.os, "uname", lambda: SimpleNamespace(release="5.15.167.4-microsoft-standard-WSL2"))
    memory = "VLLM_WSL2_ENABLE_PIN_MEMORY"
    assert machine.system_variables({}) == {SAMPLER: "0", memory: "1"}
    assert machine.system_variables({memory: "0"}) == {SAMPLER: "0", memory: "0"}


def test_help_is_the_head_of_the_run_script():
    command = ["bash", "recipe/bapo/run_bapo_example.sh", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert not run.stderr  # it sets nothing up
    assert run.stdout.startswith("Train with BAPO.") and "BAPO_VENV" in run.stdout.splitlines()[-1]
