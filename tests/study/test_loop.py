# SPDX-License-Identifier: Apache-2.0
"""The loop with the example's model, the study's larger one, does what it claims to."""

import subprocess

import pytest
import torch

from scripts.study import loop
from scripts.study.loop import MODEL, Settings, train


def train_a_little(task, method, seed=1, **changed):
    # A sixth of the responses are right, so that one of eight prompts has right and wrong ones whatever the machine
    # samples: a first update without a gradient has a chance of 3e-5.
    settings = dict(mini_batches=4, updates=8, prompts=8, samples=8, learning_rate=5e-3) | changed
    return train(task / "model", method, seed, Settings(**settings))


@pytest.fixture(scope="module")
def warm_task(tmp_path_factory):
    """The example's task after a warm-up long enough that a few responses are right."""
    from recipe.bapo.example.task import make_task

    folder = tmp_path_factory.mktemp("warm") / "task"
    make_task(folder, steps=300, layers=2, hidden=64, seed=1, right=0.3)
    return folder


def test_at_staleness_1_all_methods_make_the_same_updates(warm_task):
    methods = ("grpo", "widest", "bapo@0.4", "bapo_gradient@0.4", "authors_code")
    runs = {method: train_a_little(warm_task, method, mini_batches=1) for method in methods}
    assert any(update["grad_norm"] > 0 for update in runs["grpo"].updates)
    assert len({run.weights for run in runs.values()}) == len({run.final_reward for run in runs.values()}) == 1
    assert train_a_little(warm_task, "grpo", mini_batches=1, seed=2).weights != runs["grpo"].weights


def test_at_a_higher_staleness_they_differ(warm_task):
    for source in ({"mini_batches": 8}, {"mini_batches": 2, "epochs": 4}):
        runs = {method: train_a_little(warm_task, method, **source) for method in ("grpo", "bapo@0.4", "widest")}
        assert len({run.weights for run in runs.values()}) > 1
        for run in runs.values():
            first = run.updates[0]
            assert 0 < first["rho"] < 1  # tokens of both signs
            assert first["no_gradient_negative"] == 0  # every ratio is 1 in the first update
        assert all(update["high"] == pytest.approx(1.2) for update in runs["grpo"].updates)
        for update in runs["bapo@0.4"].updates:  # its own measure is the common one
            assert update["rho"] == pytest.approx(update["positive_contribution"], abs=1e-9)


def test_the_clips_are_switches(warm_task):
    clipped = train_a_little(warm_task, "grpo", mini_batches=2, epochs=4, norm_clip=1e-3)
    free = train_a_little(warm_task, "grpo", mini_batches=2, epochs=4, norm_clip=None, dual_clip=None)
    assert clipped.updates[0]["grad_norm"] == free.updates[0]["grad_norm"] > 1e-3  # measured before it is clipped
    assert clipped.weights != free.weights


def test_an_epoch_uses_the_same_samples_again(warm_task, monkeypatch):
    used, update = [], loop.update

    def recorded(model, optimizer, batch, *rest):
        used.append(batch[0].ids)
        return update(model, optimizer, batch, *rest)

    monkeypatch.setattr(loop, "update", recorded)
    train_a_little(warm_task, "grpo", mini_batches=2, epochs=4)
    assert len(used) == 8 and all(torch.equal(ids, used[index % 2]) for index, ids in enumerate(used))
    assert not torch.equal(used[0], used[1])


def test_the_study_starts_from_the_stored_model():
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=MODEL, check=True)
