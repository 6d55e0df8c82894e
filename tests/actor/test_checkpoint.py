# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the real actor worker on two ranks: everything is restored, and training continues as before."""

import json
import random

import numpy as np
import torch
import torch.multiprocessing as mp
from support.actor import TWO_LINES, free_port, make_actor, make_mini_batch, run_update

ROWS = 8
STEPS = 2  # updates before the checkpoint, and after it
METRICS = ("actor/bapo/clip_low", "actor/bapo/clip_high", "loss", "grad_norm")


def state_of(actor):
    """Return everything that a checkpoint holds, on this rank."""
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
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1:3],
        "python": random.getstate()[1],
    }


def draw(times):
    """Move the random generators on."""
    for _ in range(times):
        torch.rand(1), np.random.rand(), random.random()


def same(a, b):
    """Compare bit for bit, also inside dicts and sequences."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)


def as_number(metric):
    """Convert verl's metric of one update to a number: it is a number, an aggregating object, or a list of such."""
    if isinstance(metric, list):
        return float(np.mean([as_number(one) for one in metric]))
    return float(metric.aggregate() if hasattr(metric, "aggregate") else metric)


def updates(actor, rank, first, folder):
    """Return the metrics of updates on recorded mini-batches. The first caller makes the file of a mini-batch."""
    found = []
    for number in range(first, first + STEPS):
        path = folder / f"mini_batch{number}-rank{rank}.pt"
        if not path.exists():
            torch.save(make_mini_batch(actor, seed=number, rows=ROWS, rank=rank, size=2), path)
        metrics, _ = run_update(actor, torch.load(path, weights_only=False))
        found.append([as_number(metrics[name]) for name in METRICS])
    return found


def save_and_resume(rank, port, task, folder):
    """Train, save and go on; then resume in a new actor and make the same updates. What was found goes to a file."""

    def make():
        return make_actor(
            [
                f"actor_rollout_ref.model.path={task}/model",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                *TWO_LINES,
                "++actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.45",
            ],
            rank,
            2,
            port,
        )

    actor = make()
    updates(actor, rank, 0, folder)
    actor.engine.lr_scheduler.step()
    draw(1)
    actor.save_checkpoint(f"{folder}/checkpoint", None, STEPS)
    saved = state_of(actor)
    straight = updates(actor, rank, STEPS, folder)

    resumed = make()
    draw(2)
    fresh = state_of(resumed)
    resumed.load_checkpoint(f"{folder}/checkpoint")
    restored = state_of(resumed)
    found = {
        "new": [part for part in saved if not same(fresh[part], saved[part])],
        "not restored": [part for part in saved if not same(restored[part], saved[part])],
        "straight": straight,
        "resumed": updates(resumed, rank, STEPS, folder),
    }
    (folder / f"found-rank{rank}.json").write_text(json.dumps(found))


def test_everything_is_restored_bit_for_bit_and_the_bounds_are_those_of_an_uninterrupted_run(task, tmp_path):
    mp.spawn(save_and_resume, args=(free_port(), str(task), tmp_path), nprocs=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"found-rank{rank}.json").read_text())
        parts = ["model", "optimizer", "scheduler", "torch", "numpy", "python"]
        assert found["new"] == parts and found["not restored"] == []
        straight, resumed = np.array(found["straight"]), np.array(found["resumed"])
        assert straight.shape == (STEPS, len(METRICS))
        assert np.array_equal(straight[:, :-1], resumed[:, :-1])  # bounds and loss
        np.testing.assert_allclose(resumed[:, -1], straight[:, -1], atol=1e-5, rtol=1e-5)  # the gradient's norm
