# SPDX-License-Identifier: Apache-2.0
"""The loop with the example's model does what it claims to, and the anchors are planned from the maps."""

import json
import shutil
import subprocess

import pytest
import torch

from scripts.study import anchors, loop
from scripts.study.anchors import LOOP, LOOP_METHODS, STACK, STACK_METHODS, finished, keep, stack_command, windows
from scripts.study.loop import Settings, train
from scripts.study.methods import ROOT, config_of
from scripts.study.plan import METHODS, RATES


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
            assert 0 < first["rho_value"] < 1  # tokens of both signs
            assert first["clipfrac_negative"] == 0  # every ratio is 1 in the first update
        assert all(update["clip_high"] == 1.2 for update in runs["grpo"].updates)
        for update in runs["bapo@0.4"].updates:  # its own measure is the common one
            assert update["rho_value"] == pytest.approx(update["positive_contribution"], abs=1e-9)


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


def test_windows_leave_out_what_is_not_there():
    assert windows([1.0, 2.0, float("nan"), 4.0, float("nan"), float("nan")], 2) == [1.5, 4.0, None]


def test_the_stacks_methods_are_the_maps():
    assert set(LOOP_METHODS) | {"topr", "balance"} == set(METHODS)
    assert all(config_of(method) == config_of(file) for method, file in STACK_METHODS.items())
    assert LOOP["learning_rate"] == STACK["learning_rate"] < min(RATES["B", "adamw"])  # its model is ten times as large
    for key in ("mini_batches", "epochs", "prompts", "samples"):
        assert LOOP[key] == STACK[key]


def test_the_stacks_command_composes_to_what_it_says(monkeypatch, tmp_path):
    from omegaconf import OmegaConf
    from support.configs import compose_in_groups

    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")
    overrides = stack_command("bapo@0.4", 2, tmp_path)[2:]
    config = compose_in_groups("experiment=replay", "size=cpu", *overrides)
    OmegaConf.resolve(config)
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_epochs, actor.ppo_mini_batch_size, config.data.train_batch_size) == (8, 16, 64)
    assert actor.policy_loss.positive_contribution_target == 0.4 and actor.clip_ratio_c > 1e6
    assert (
        config.data.seed == 2
        and (ROOT / overrides[0].replace("method=", "configs/method/")).with_suffix(".yaml").exists()
    )


def test_finished_runs_are_known(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert finished(path) == set()
    keep(path, {"method": "grpo", "seed": 2})
    assert finished(path) == {("grpo", 2)} and json.loads(path.read_text()) == {"method": "grpo", "seed": 2}


def test_the_anchors_start_from_the_stored_model(tmp_path, monkeypatch):
    anchors.check_model()
    shutil.copytree(anchors.MODEL, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(anchors, "MODEL", tmp_path / "model")
    with pytest.raises(subprocess.CalledProcessError):
        anchors.check_model()
