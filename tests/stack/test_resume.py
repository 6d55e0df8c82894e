# SPDX-License-Identifier: Apache-2.0
"""An interrupted run continues from its last checkpoint without a network. vLLM and transformers load it, too."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from support.configs import composed
from support.stack_runs import ROOT, Started, log_of, removing_what_others_leave

from recipe.bapo.config import cpu_environment
from recipe.bapo.host.metrics import read_metrics
from recipe.bapo.report.findings import read_runs

STEPS = 4


def overrides(folder):
    """Return the overrides of the run and of the one that resumes it."""
    return (
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.resume_mode=auto",
        f"trainer.rollout_data_dir={folder}/rollouts",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )


def without_network():
    """Return a command that runs another one with only the loopback interface; None if that is not permitted."""
    up = "import fcntl, socket, struct; s = socket.socket(); fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x49))"
    inside = ["unshare", "--net", "bash", "-c", f'python3 -c "{up}" && exec "$@"', "bash"]
    return None if subprocess.run([*inside, "true"], capture_output=True).returncode else inside


class Resumed(NamedTuple):
    """A run that is interrupted after its second step, and the run that resumes it; each list has an item for each.

    Attributes:
        codes: exit codes.
        texts: what they printed.
        left: what they left behind.
        without_network: whether the second run had no network; some machines do not permit that.
        folder: the folder of both.
    """

    codes: list[int]
    texts: list[str]
    left: list[list]
    without_network: bool
    folder: Path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    isolated = without_network()
    found = Resumed([], [], [], isolated is not None, folder)
    for number, inside in enumerate(((), isolated or ())):
        run = Started(folder / "run", *overrides(folder), inside=inside, console=folder / f"{number}.console")
        try:
            if number == 0:
                run.wait_for_step(2)
                run.process.send_signal(signal.SIGTERM)
            code, _ = run.end(timeout=60 if number == 0 else 600)
            found.codes.append(code)
            found.texts.append(run.text())
            found.left.append(run.left())
        finally:
            run.clean_up()
    assert found.codes[1] == 0, f"{found.texts}\n{log_of(folder / 'run')}"
    return found


def test_the_interruption_is_clean(resumed):
    assert resumed.codes[0] == 128 + signal.SIGTERM
    assert "Error: interrupted by SIGTERM. The last checkpoint is" in resumed.texts[0]
    assert not resumed.left[0]


def test_no_network_is_needed(resumed):
    if not resumed.without_network:
        pytest.skip("network namespaces are refused here")
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    outside = subprocess.run([*without_network(), sys.executable, "-c", connect], capture_output=True, text=True)
    assert "Network is unreachable" in outside.stderr  # the network was off
    assert resumed.codes[1] == 0


def test_a_run_that_ends_well_leaves_nothing(resumed):
    assert not resumed.left[1]


def test_the_run_goes_on_where_it_stopped(resumed):
    before, after = (
        [int(line.split()[1].split("/")[0]) for line in text.splitlines() if line.startswith("step ")]
        for text in resumed.texts
    )
    # A third step may have ended before the signal came.
    saved = after[0] - 1
    assert before[:2] == [1, 2] and saved >= 2 and after == list(range(saved + 1, STEPS + 1))
    run = resumed.folder / "run"
    assert [step for step, data in read_metrics(run) if "training/global_step" in data] == [1, 2, 3, 4]
    (recorded,) = read_runs(run)  # the report joins the records of both starts
    updates = Counter(recorded.recorded["step"].tolist())
    assert list(updates) == [1, 2, 3, 4] and len(set(updates.values())) == 1
    assert len(list(run.glob("record-*.jsonl"))) == 2
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(STEPS)


def test_every_step_has_the_prompts_of_an_uninterrupted_run(resumed):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import AutoTokenizer

    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    task = ROOT / "recipe" / "bapo" / "example" / "files"
    data = composed(task).data
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    dataset = create_rl_dataset(data.train_files, data, tokenizer, None, is_train=True)
    loader = StatefulDataLoader(
        dataset,
        batch_size=data.train_batch_size,
        sampler=create_rl_sampler(data, dataset),
        collate_fn=collate_fn,
        drop_last=True,
    )
    batches = iter(loader)
    seen = []
    for step in range(1, STEPS + 1):
        asked = Counter(messages[0]["content"] for messages in next(batches)["raw_prompt"])
        lines = (resumed.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        inputs = Counter(json.loads(line)["input"].strip() for line in lines)
        assert inputs == Counter({prompt: 8 * count for prompt, count in asked.items()})
        seen.append(inputs)
    assert seen[1] != seen[2]  # otherwise this test would pass with any order


def test_vllm_and_transformers_load_the_export(resumed):
    exported = resumed.folder / "run" / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
    code = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path)
prompt = tokenizer.encode("1 2\\n")
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
output = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt):].tolist()
llm = LLM(path, dtype="float32", max_model_len=64, enforce_eager=True)
served = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
assert list(served) == output, (list(served), output)
"""
    environment = {**os.environ, **cpu_environment()}
    command = [sys.executable, "-c", code, str(exported)]
    with removing_what_others_leave() as folders:
        run = subprocess.run(command, env=environment | folders, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
