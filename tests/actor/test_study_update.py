# SPDX-License-Identifier: Apache-2.0
"""The language model study's loop and the real worker make the same update from the same rollouts."""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch, run_update
from support.updates import LOG_PROBS, LOSS, MICRO_BATCH
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from scripts.study import updates as study

GROUPS = 2
PROMPT = 4  # tokens, of make_mini_batch
METHODS = {
    "bapo": [],
    "grpo": [
        f"{LOSS}.ratio_{side}_{end}={value}"
        for side, value in (("lower", 0.8), ("upper", 1.2))
        for end in ("start", "max")
    ],
}


def updates_of(method, model, port):
    """Make one update of a method with the worker and with the study's loop.

    Returns the results of both, and the relative difference of their gradients before clipping.
    """
    sizes = [f"{MICRO_BATCH}=4", f"{LOG_PROBS}_micro_batch_size_per_gpu=4"]
    actor = make_actor([f"actor_rollout_ref.model.path={model}", *sizes, *METHODS[method]], port=port)
    data = make_mini_batch(actor, seed=11, rows=GROUPS * study.SAMPLES, samples=study.SAMPLES)
    rollouts, old = rollouts_of(data)
    lengths = rollouts.mask.sum(1).tolist()
    rows = [row[:length] for row, length in zip(study.advantages_of(rollouts), lengths, strict=True)]
    data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    metrics, gradient = run_update(actor, data)
    names = {"low": "clip_low", "high": "clip_high", "clipfrac_positive": "clipfrac_positive"}
    of_worker = {name: actor.logged[f"actor/bapo/{logged}"] for name, logged in names.items()}
    of_worker["grad_norm"] = metrics["grad_norm"]

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    found = study.make_update(network, optimizer, rollouts, old, method)
    of_loop = {name: found[name] for name in of_worker if name != "clipfrac_positive" or method == "grpo"}
    clipped = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    mine = clipped * max(1.0, found["grad_norm"])
    difference = (mine - gradient).norm() / gradient.norm()
    return {"worker": of_worker, "loop": of_loop, "difference": difference.item()}


def rollouts_of(data):
    """Convert a mini-batch of the worker to the form of the study's loop. Returns it with its old log-probs."""
    ids = pad_sequence(list(data["input_ids"].unbind()), batch_first=True)
    mask = pad_sequence([torch.ones(len(part)) for part in data["responses"].unbind()], batch_first=True).bool()
    old = pad_sequence(list(data["old_log_probs"].unbind()), batch_first=True)
    lengths = mask.sum(1)
    rewards = (lengths <= lengths.median()).float()  # the right answers are the short ones, so rho is below the target
    return study.Rollouts(ids, mask, rewards, PROMPT), old


def compare(rank, model, port, out):
    torch.set_num_threads(1)
    study.PROMPTS_AT_ONCE = 1
    Path(out).write_text(json.dumps({method: updates_of(method, model, port) for method in METHODS}))


@pytest.fixture(scope="module")
def updates(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("updates") / "updates.json"
    mp.spawn(compare, (f"{task}/model", free_port(), str(out)))
    return json.loads(out.read_text())


@pytest.mark.parametrize("method", METHODS)
def test_the_loop_and_the_worker_make_the_same_update(updates, method):
    found = updates[method]
    for name, value in found["loop"].items():
        assert value == pytest.approx(found["worker"][name], rel=1e-4), name
    assert found["difference"] < 1e-3 and found["loop"]["grad_norm"] > 0
    if method == "bapo":
        assert (found["loop"]["low"], found["loop"]["high"]) != (0.6, 1.2)  # the search has moved a bound
