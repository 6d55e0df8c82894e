# SPDX-License-Identifier: Apache-2.0
"""The loop with the example's model, the study's larger model, makes the right updates on the right samples."""

import pytest
import torch

from scripts.study import loop
from scripts.study.loop import MODEL, Settings, train


def train_a_little(method, seed=1, **changed):
    # At first three of ten responses are right, so on every machine some of eight prompts have right and wrong ones.
    settings = dict(mini_batches=4, updates=8, prompts=8, samples=8, learning_rate=5e-3) | changed
    return train(MODEL, method, seed, Settings(**settings))


def test_at_staleness_1_all_methods_make_the_same_updates():
    methods = ("grpo", "widest", "bapo@0.4", "bapo_gradient@0.4", "authors_code")
    runs = {method: train_a_little(method, mini_batches=1) for method in methods}
    assert any(update["grad_norm"] > 0 for update in runs["grpo"].updates)
    assert len({run.weights for run in runs.values()}) == len({run.final_reward for run in runs.values()}) == 1
    assert train_a_little("grpo", mini_batches=1, seed=2).weights != runs["grpo"].weights


def test_at_a_higher_staleness_they_differ():
    for source in ({"mini_batches": 8}, {"mini_batches": 2, "epochs": 4}):
        runs = {method: train_a_little(method, **source) for method in ("grpo", "bapo@0.4", "widest")}
        assert len({run.weights for run in runs.values()}) > 1
        for run in runs.values():
            first = run.updates[0]
            assert 0 < first["rho"] < 1  # there are tokens of both signs
            assert first["no_gradient_negative"] == 0  # every ratio is 1 in the first update
        assert all(update["high"] == pytest.approx(1.2) for update in runs["grpo"].updates)
        for update in runs["bapo@0.4"].updates:  # the search's rho equals the common measure
            assert update["rho"] == pytest.approx(update["positive_contribution"], abs=1e-9)


def test_an_epoch_uses_the_same_samples_again(monkeypatch):
    used, update = [], loop.update

    def recorded(model, optimizer, batch, *rest):
        used.append(batch[0].ids)
        return update(model, optimizer, batch, *rest)

    monkeypatch.setattr(loop, "update", recorded)
    train_a_little("grpo", mini_batches=2, epochs=4)
    assert len(used) == 8 and all(torch.equal(ids, used[index % 2]) for index, ids in enumerate(used))
    assert not torch.equal(used[0], used[1])
