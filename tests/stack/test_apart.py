# SPDX-License-Identifier: Apache-2.0
"""Two runs at once on one machine, each with its own /tmp."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.stack_runs import ROOT, SHORT_STEPS, updates_of

from recipe.bapo.host.metrics import read_metrics

APART = ["bash", ROOT / "scripts" / "apart.sh"]
FILES = ROOT / "recipe" / "bapo" / "example" / "files"


def apart(*command, **options):
    return subprocess.run([*APART, *command], cwd="/", capture_output=True, text=True, timeout=60, **options)


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    """Skip the test on a machine without namespaces."""
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    if subprocess.run(["unshare", *user, "--mount", "--pid", "--fork", "--mount-proc", "true"]).returncode:
        pytest.skip("this machine lets nobody make namespaces")


def test_the_commands_folder_and_exit_code_are_its_own():
    mine = Path(tempfile.mkdtemp(dir="/tmp"))
    run = apart("bash", "-c", f"ls -d {mine}; ls -A /tmp /dev/shm; touch {mine}; exit 7")
    mine.rmdir()
    assert run.returncode == 7 and run.stdout.split() == ["/dev/shm:", "/tmp:"], run.stdout + run.stderr
    assert not mine.exists()


def test_a_signal_reaches_the_command():
    script = "trap 'echo ended; exit 3' TERM; echo started; while true; do sleep 0.1; done"
    process = subprocess.Popen([*APART, "bash", "-c", script], cwd="/", stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.terminate()
    assert process.wait(timeout=20) == 3 and process.stdout.read() == "ended\n"


@pytest.mark.parametrize(
    "variables, arguments, named",
    [
        ({"OUTPUT_DIR": "/tmp/run"}, [], "OUTPUT_DIR=/tmp/run"),
        ({}, ["trainer.rollout_data_dir=/tmp/samples"], "trainer.rollout_data_dir=/tmp/samples"),
        ({}, ["data.train_files=[/data/a.parquet,/tmp]"], "data.train_files=[/data/a.parquet,/tmp]"),
    ],
)
def test_what_would_be_lost_is_named(variables, arguments, named):
    run = apart("echo", "started", *arguments, env={**os.environ, **variables})
    assert run.returncode == 1 and f"Error: {named} is in /tmp" in run.stderr and not run.stdout
    elsewhere = {**os.environ, "OUTPUT_DIR": "/data/tmp/run", "MODEL_PATH": "/tmpfs/model"}
    assert apart("true", env=elsewhere).returncode == 0


@pytest.fixture
def shared_folder():
    """Make a folder that both runs see."""
    with tempfile.TemporaryDirectory(prefix="apart-test", dir="/var/tmp") as folder:
        yield Path(folder)


def start(folder, name, model):
    """Start a run of two steps with its output in ``folder/name``."""
    files = {"MODEL_PATH": model, "TRAIN_FILE": FILES / "train.parquet", "TEST_FILE": FILES / "test.parquet"}
    length = ("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1")
    return subprocess.Popen(
        [
            *(*APART, "bash", "recipe/bapo/run_bapo_example.sh", SHORT_STEPS, *length),
            f"trainer.rollout_data_dir={folder}/{name}/samples",
        ],
        cwd=ROOT,
        env={**os.environ, "VERL_PLATFORM": "cpu", "OUTPUT_DIR": f"{folder}/{name}"}
        | {key: str(value) for key, value in files.items()},
        stdin=subprocess.DEVNULL,
        stdout=open(folder / f"{name}.out", "w"),
        stderr=subprocess.STDOUT,
    )


def write_another_model(folder):
    """Write the example's model with noise as large as its weights. Returns its folder."""
    other = folder / "other"
    shutil.copytree(FILES / "model", other)
    noise = torch.Generator().manual_seed(1)
    weights = load_file(other / "model.safetensors")
    noisy = {name: w + w.std() * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    save_file(noisy, other / "model.safetensors", metadata={"format": "pt"})
    return other


@pytest.mark.slow
@pytest.mark.skipif(ROOT.is_relative_to("/tmp"), reason="the runs would not see this clone")
def test_two_runs_at_once_keep_weights_records_and_samples_apart(shared_folder):
    models = {"a": FILES / "model", "b": write_another_model(shared_folder)}
    runs = {name: start(shared_folder, name, model) for name, model in models.items()}
    try:
        codes = {name: run.wait(timeout=900) for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.terminate()  # does nothing if it has ended
            run.wait(timeout=120)
    assert codes == {"a": 0, "b": 0}, [(shared_folder / f"{name}.out").read_text() for name in runs]

    samples, records = {}, {}
    for name in runs:
        folder = shared_folder / name
        steps = [data for _, data in read_metrics(folder)]
        assert len(steps) == 2
        # A server's samples have the probabilities that its own trainer computes, so both have the same weights.
        assert all(data["training/rollout_probs_diff_mean"] < 0.01 for data in steps)
        records[name] = [update.values["positive_contribution"] for update in updates_of(folder)]
        samples[name] = [path.read_text() for path in sorted((folder / "samples").glob("*.jsonl"))]
        assert len(records[name]) == 2 * 8 and len(samples[name]) == 2
    assert not set(records["a"]) & set(records["b"]) and not set(samples["a"]) & set(samples["b"])
