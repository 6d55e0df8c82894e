# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the real actor worker: what is restored, how training goes on from it, and the export."""

import random

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch, run_update

ROWS = 8
STEPS = 2  # updates before the checkpoint, and after it


def state_of(actor):
    """Everything that a checkpoint holds, on this rank."""
    engine = actor.engine

    def local(value):
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return {
        "model": {name: local(value) for name, value in engine.module.state_dict().items()},
        "optimizer": {
            index: {key: local(value) for key, value in state.items()}
            for index, state in engine.optimizer.state_dict()["state"].items()
        },
        "scheduler": engine.lr_scheduler.state_dict(),
        "random": (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()[1]),
    }


def same(a, b):
    """Equal bit for bit, through dicts and sequences."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def as_number(metric):
    """verl's metric of one update as a number: it is one, an object that aggregates, or a list of such."""
    if isinstance(metric, list):
        return float(np.mean([as_number(one) for one in metric]))
    return float(metric.aggregate() if hasattr(metric, "aggregate") else metric)


def updates(actor, rank, size, first, folder):
    """Updates on recorded mini-batches; the file of a mini-batch is made by who comes first."""
    found = []
    for number in range(first, first + STEPS):
        path = folder / f"mini_batch{number}-rank{rank}.pt"
        if not path.exists():
            torch.save(make_mini_batch(actor, seed=number, rows=ROWS, rank=rank, size=size), path)
        metrics, _ = run_update(actor, torch.load(path, weights_only=False))
        names = ("actor/bapo/clip_low", "actor/bapo/clip_high", "loss", "grad_norm")
        found.append({name: as_number(metrics[name]) for name in names})
    return found


def save_resume_and_go_on(rank, size, port, task, folder):
    def make():
        return make_actor(
            [
                f"actor_rollout_ref.model.path={task}/model",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.45",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            ],
            rank,
            size,
            port,
        )

    actor = make()
    updates(actor, rank, size, 0, folder)
    actor.save_checkpoint(f"{folder}/checkpoint", None, STEPS)
    saved = state_of(actor)
    straight = updates(actor, rank, size, STEPS, folder)

    resumed = make()
    assert not same(state_of(resumed)["model"], saved["model"])
    resumed.load_checkpoint(f"{folder}/checkpoint")
    restored = state_of(resumed)
    result = {
        "restored": {part: same(restored[part], saved[part]) for part in saved},
        "straight": straight,
        "resumed": updates(resumed, rank, size, STEPS, folder),
        "weights": saved["model"] if size == 1 else None,
    }
    torch.save(result, folder / f"result{rank}.pt")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, task, tmp_path_factory):
    """The results of all ranks, and the folder with the checkpoints."""
    size, folder = request.param, tmp_path_factory.mktemp(f"checkpoints{request.param}")
    mp.spawn(save_resume_and_go_on, args=(size, free_port(), str(task), folder), nprocs=size)
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(size)], folder


def test_everything_is_restored_bit_for_bit(runs):
    for result in runs[0]:
        assert result["restored"] == dict.fromkeys(("model", "optimizer", "scheduler", "random"), True)


def test_training_goes_on_with_the_same_bounds_and_losses(runs):
    for result in runs[0]:
        for straight, resumed in zip(result["straight"], result["resumed"], strict=True):
            for side in ("clip_low", "clip_high"):
                assert straight[f"actor/bapo/{side}"] == resumed[f"actor/bapo/{side}"]
            for name in ("loss", "grad_norm"):
                assert resumed[name] == pytest.approx(straight[name], abs=1e-5, rel=1e-5)


def test_the_export_is_a_hugging_face_model(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results, folder = runs
    exported = folder / "checkpoint" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    AutoTokenizer.from_pretrained(exported)
    if results[0]["weights"] is not None:
        for name, value in model.state_dict().items():
            assert torch.equal(value, results[0]["weights"][name]), name
