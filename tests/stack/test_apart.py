# SPDX-License-Identifier: Apache-2.0
"""Two runs at once on one machine, each with a /tmp of its own."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.stack_runs import ROOT, SHORT_STEPS
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.bapo.records.metrics import read_metrics

APART = ["bash", "scripts/apart.sh"]


def apart(*command, **options):
    return subprocess.run([*APART, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    """A machine on which it can work."""
    if apart("true").returncode:
        pytest.skip("this machine lets nobody make namespaces")


def test_the_commands_folder_and_exit_code_are_its_own():
    mine = Path(tempfile.mkdtemp(dir="/tmp"))
    run = apart("bash", "-c", f"ls -d {mine}; ls -A /tmp /dev/shm; touch /tmp/there; exit 7")
    mine.rmdir()
    assert run.returncode == 7 and run.stdout.split() == ["/dev/shm:", "/tmp:"], run.stdout + run.stderr
    assert not Path("/tmp/there").exists()


def test_a_signal_reaches_the_command():
    script = "trap 'echo ended; exit 3' TERM; echo started; while true; do sleep 0.1; done"
    process = subprocess.Popen([*APART, "bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.terminate()
    assert process.wait(timeout=20) == 3 and process.stdout.read() == "ended\n"


@pytest.mark.slow
def test_two_runs_at_once_keep_weights_records_and_samples_apart():
    folder = Path(tempfile.mkdtemp(prefix="apart-test", dir="/var/tmp"))  # seen by both
    try:
        _run_two(folder)
    finally:
        shutil.rmtree(folder)


def _run_two(folder):
    files = ROOT / "recipe" / "bapo" / "example" / "files"
    other = folder / "other"
    shutil.copytree(files / "model", other)
    weights = load_file(other / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    noisy = {name: w + w.std() * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    save_file(noisy, other / "model.safetensors", metadata={"format": "pt"})
    length = ("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1")
    runs = {}
    for name, model in (("a", files / "model"), ("b", other)):
        data = {"MODEL_PATH": model, "TRAIN_FILE": files / "train.parquet", "TEST_FILE": files / "test.parquet"}
        samples = f"trainer.rollout_data_dir={folder}/{name}/samples"
        runs[name] = subprocess.Popen(
            [*APART, "bash", "recipe/bapo/run_bapo_example.sh", *length, samples],
            cwd=ROOT,
            env={**os.environ, "VERL_PLATFORM": "cpu", **SHORT_STEPS, "OUTPUT_DIR": f"{folder}/{name}"}
            | {key: str(value) for key, value in data.items()},
            stdin=subprocess.DEVNULL,
            stdout=open(folder / f"{name}.out", "w"),
            stderr=subprocess.STDOUT,
        )
    for name, run in runs.items():
        assert run.wait(timeout=900) == 0, (folder / f"{name}.out").read_text()
    metrics = {name: [data for _, data in read_metrics(folder / name)] for name in runs}
    for of_run in metrics.values():
        assert len(of_run) == 2
        # What a server samples with its weights has the probability that its own trainer gives it.
        assert all(data["training/rollout_probs_diff_mean"] < 0.01 for data in of_run)
    records = [(folder / name / "bounds" / "rank0.jsonl").read_text().splitlines() for name in runs]
    samples = [[path.read_text() for path in sorted((folder / name / "samples").glob("*.jsonl"))] for name in runs]
    assert len(records[0]) == len(records[1]) == 2 * 8 and not set(records[0]) & set(records[1])
    assert [len(of_run) for of_run in samples] == [2, 2] and samples[0] != samples[1]
    assert _difference(files / "model", other, json.loads(samples[0][0].splitlines()[0])) > 0.03  # they are far apart


def _difference(one, other, sample):
    """Mean difference of two models' probabilities of a sample's tokens."""
    tokens = AutoTokenizer.from_pretrained(one)(sample["input"] + sample["output"], return_tensors="pt").input_ids
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(model).float()(tokens).logits[:, :-1] for model in (one, other)]
    p, q = (x.softmax(-1).gather(2, tokens[:, 1:, None]) for x in logits)
    return (p - q).abs().mean().item()
