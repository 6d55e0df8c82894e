"""An interrupted run of the real stack goes on from its last checkpoint, which vLLM and transformers load."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from hydra import compose, initialize_config_dir
from stack_runs import ROOT, Started, explain, run_example

from recipe.bapo import cpu_settings
from recipe.bapo.console import read_metrics

pytestmark = pytest.mark.stack
STEPS = 4


def overrides(folder):
    """Of the run and of the one that resumes it."""
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


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run interrupted after its second step, and then resumed: exit code of the first, the second, their folder."""
    folder = tmp_path_factory.mktemp("resume")
    first = Started(folder / "run", *overrides(folder))
    try:
        first.wait_for_step(2)
        first.process.send_signal(signal.SIGTERM)
        code, _ = first.end(timeout=60)
        left = [*first.processes().values(), *first.left_behind()]
    finally:
        first.clean_up()
    run = run_example(folder / "run", *overrides(folder))
    assert run.returncode == 0, explain(run, folder / "run")
    return (code, first.text(), left), run, folder


def test_the_interruption_is_clean(resumed):
    (code, text, left), _, _ = resumed
    assert code == 128 + signal.SIGTERM
    assert "Error: interrupted by SIGTERM. The last checkpoint is" in text
    assert not left, left


def test_the_run_goes_on_where_it_stopped(resumed):
    (_, text, _), run, folder = resumed
    before, after = (
        [int(line.split()[1].split("/")[0]) for line in console.splitlines() if line.startswith("step ")]
        for console in (text, run.stdout)
    )
    # A third step may have been trained, but was not saved, before the signal came.
    saved = after[0] - 1
    assert before[:2] == [1, 2] and saved in (2, 3) and after == list(range(saved + 1, STEPS + 1))
    assert [step for step, data in read_metrics(folder / "run") if "training/global_step" in data] == [1, 2, 3, 4]
    tracker = folder / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(STEPS)


def test_every_step_has_the_prompts_of_an_uninterrupted_run(resumed):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import AutoTokenizer

    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    folder = resumed[2]
    task = ROOT / "runs" / "example_task"
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        files = (f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet")
        data = compose("example", ["size=cpu", *cpu_settings.OVERRIDES, *files]).data
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
        lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        inputs = Counter(json.loads(line)["input"].strip() for line in lines)
        assert inputs == Counter({prompt: 8 * count for prompt, count in asked.items()})
        seen.append(inputs)
    assert seen[1] != seen[2]  # or the test would hold whatever the order


def test_vllm_and_transformers_load_the_export(resumed):
    exported = resumed[2] / "run" / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
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
    environment = {**os.environ, **cpu_settings.ENVIRONMENT}
    run = subprocess.run(
        [sys.executable, "-c", code, str(exported)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr[-3000:]
