# SPDX-License-Identifier: Apache-2.0
"""The study's runs on the language model, with a tiny model and a similar tokenizer in its place."""

from dataclasses import replace
from functools import partial

import pandas as pd
import pyarrow.parquet
import pytest
import torch
from support.tiny_model import write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.bapo.language_model.task import draw_rows
from recipe.bapo.language_model.warm_up import Settings
from scripts.study import model as study_model
from scripts.study import plan, tables, training, updates

RUN = replace(plan.PLANNED[0], rollouts=2, learning_rate="1e-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder)
    return folder


@pytest.fixture(autouse=True)
def small_task(monkeypatch):
    """Make the task easy: few short responses, of which those with an even number of characters are right."""
    for name, value in {"SAMPLES": 4, "PROMPTS_AT_ONCE": 2, "MAX_RESPONSE": 6}.items():
        monkeypatch.setattr(updates, name, value)
    monkeypatch.setattr(updates, "compute_score", lambda _, text, answer: float(len(text) % 2 == 0))
    monkeypatch.setattr(training, "PROMPTS", 2)
    monkeypatch.setattr(training, "HELD_OUT_ITEMS", 8)
    monkeypatch.setattr(training, "SOURCES", {"epochs": (2, 2), "batches": (4, 1)})
    monkeypatch.setattr(plan, "PLANNED", [RUN])


def rows_of(folder):
    return pd.read_parquet(folder / f"{RUN.name}.parquet").drop(columns="seconds")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_stopped_run_ends_as_one_that_was_not(model, tmp_path, monkeypatch, precision):
    run = replace(RUN, precision=precision)
    training.make_run(run, model, tmp_path / "whole", tmp_path / "states")
    whole = rows_of(tmp_path / "whole")
    assert list(whole["update"]) == list(range(8)) and list(whole["epoch"]) == [0, 0, 1, 1] * 2
    assert whole["held_out_reward"].notna().sum() == 2 and (whole["grad_norm"] > 0).any()
    assert list(whole["held_out_before"].notna()) == [True] + [False] * 7
    # The old log-probs are those of the first forward, up to rounding. Later forwards have the updated weights.
    sizes = whole["effective_sample_size"]
    assert sizes[0] == pytest.approx(1, abs=1e-6) and (sizes[[2, 3, 6, 7]] < 1 - 1e-4).all()
    assert not list((tmp_path / "states").iterdir())

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "progress_line", stop)  # after the state is saved, before the rows are written
        with pytest.raises(KeyboardInterrupt):
            training.make_run(run, model, tmp_path / "parts", tmp_path / "states")
    state = tmp_path / "states" / f"{RUN.name}.pt"
    assert not (tmp_path / "parts").exists() and state.exists()
    with monkeypatch.context() as patch:
        patch.setattr(training, "hash_of_weights", lambda folder: "other")
        with pytest.raises(SystemExit, match="was begun from other weights than .*: remove it"):
            training.make_run(run, model, tmp_path / "parts", tmp_path / "states")
    training.make_run(run, model, tmp_path / "parts", tmp_path / "states")
    pd.testing.assert_frame_equal(rows_of(tmp_path / "parts"), whole)


def test_bfloat16_rounds_the_forward_but_not_the_weights(model, tmp_path, monkeypatch):
    trainings, sampled, sample = [], [], updates.sample

    def sample_once(*arguments):
        """Return to the second run what the first has sampled: rounded probabilities may draw other tokens."""
        if len(trainings) == 1:
            sampled.append(sample(*arguments))
            return sampled[-1]
        return sampled.pop(0)

    monkeypatch.setattr(updates, "sample", sample_once)
    for precision in ("float32", "bfloat16"):
        trainings.append(training.Training(replace(RUN, precision=precision), model, tmp_path / precision))
        trainings[-1].train_on_one_batch()
    norms = [training.rows[0]["grad_norm"] for training in trainings]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=0.1)
    weights = next(trainings[1].model.parameters())
    assert weights.dtype == torch.float32 and not torch.equal(weights, weights.bfloat16().float())


def test_two_processes_do_not_make_the_same_run(model, tmp_path, monkeypatch, capsys):
    make = training._train_to_the_end

    def start_again(*arguments):
        training.make_run(RUN, model, tmp_path, tmp_path / "states")  # as a second process would
        make(*arguments)

    monkeypatch.setattr(training, "_train_to_the_end", start_again)
    training.make_run(RUN, model, tmp_path, tmp_path / "states")
    assert f"{RUN.name} is already running in another process." in capsys.readouterr().out
    assert len(rows_of(tmp_path)) == 8 and not list((tmp_path / "states").iterdir())


def test_another_model_is_warmed_up_first(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BAPO_CACHE", str(tmp_path))
    monkeypatch.setattr(study_model, "Settings", partial(Settings, steps=2, rows=2, samples=2))
    with pytest.raises(ValueError, match="run python -m recipe.bapo.language_model"):
        study_model.warmed_up_model(None)
    folder = study_model.warmed_up_model(str(model))
    assert "0% of 2 sampled answers are right" in capsys.readouterr().err
    weights = [next(AutoModelForCausalLM.from_pretrained(at).parameters()) for at in (folder, model)]
    assert not torch.equal(*weights) and AutoTokenizer.from_pretrained(folder).pad_token
    assert study_model.warmed_up_model(str(model)) == folder == study_model.cache_of(str(model)) / "model"
    assert study_model.cache_of(f"{tmp_path}/{model.name}") != folder.parent  # another model of the same name
    assert "Warmed up" not in capsys.readouterr().err  # it was kept


def test_a_complete_run_is_not_made_again(model, tmp_path, monkeypatch, capsys):
    training.make_run(RUN, model, tmp_path, tmp_path / "states")
    about = pyarrow.parquet.read_schema(tmp_path / f"{RUN.name}.parquet").metadata
    assert about[b"command"].decode() == f"python -m scripts.study run {RUN.name}"
    assert about[b"commit"].decode() == training.commit_of_this_process()  # none in a copy without git
    monkeypatch.setattr(tables, "STAGE_A", [RUN])
    tables.print_tables(tmp_path)
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    shown = dict(line for line in lines if len(line) == 2)
    assert shown["run"] == f"`{RUN.name}`" and shown["updates"] == "8"
    shares = ("met at the start", "met by moving", "saturated")
    assert sum(float(shown[share]) for share in shares) == pytest.approx(1, abs=0.011)
    monkeypatch.setattr(training, "Training", None)
    left = tmp_path / "states" / f"{RUN.name}.pt"
    left.touch()  # of a process that was killed after the run's last rows were written
    training.make_run(RUN, model, tmp_path, tmp_path / "states")
    assert "is complete" in capsys.readouterr().out and not left.exists()
    with pytest.raises(SystemExit, match="no run other is planned: choose from grpo-epochs"):
        plan.runs_named([RUN.name, "other"])
    assert plan.runs_named([RUN.name]) == [RUN] and plan.runs_named([]) == plan.STAGE_A + plan.STAGE_B


def make_rollouts(model):
    """Return a network, and four responses to each of three prompts. The first four are shorter, the last all right."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    rows = [row for row in draw_rows("x", 3) for _ in range(4)]
    rollouts = updates.sample(network, tokenizer, rows, torch.Generator().manual_seed(1))
    rollouts.mask[:4, 3:] = False
    rollouts.rewards[8:] = 1.0
    assert 0 < rollouts.rewards[:4].sum() < 4 and 0 < rollouts.rewards[4:8].sum() < 4
    return network, rollouts


def log_probs_without_groups(network, rollouts):
    """Compute the log-probs by one forward of all prompts and responses."""
    logits = network(input_ids=rollouts.ids).logits[:, rollouts.prompt_length - 1 : -1]
    return updates.log_probs_from(logits, rollouts.ids[:, rollouts.prompt_length :])


def gradient_of(network):
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def test_log_probs_of_groups_and_whole_sequences_agree(model):
    network, rollouts = make_rollouts(model)
    expected, entropies = log_probs_without_groups(network, rollouts)
    torch.testing.assert_close(updates.log_probs(network, rollouts)[rollouts.mask], expected[rollouts.mask])
    found, entropy = updates.log_probs_of(network, rollouts.rows(torch.arange(4)))
    torch.testing.assert_close(entropy[:, :3], entropies[:4, :3])
    assert (found[:, :3] != 0).all() and (found[:, 3:] == 0).all() and (entropy[:, 3:] == 0).all()
    with pytest.raises(ValueError, match="the 4 responses to a prompt must be consecutive rows with the same prompt"):
        updates.log_probs_of(network, rollouts.rows(torch.arange(2, 6)))


@pytest.mark.parametrize("method", plan.METHODS)
def test_groups_have_the_gradient_of_the_mini_batch(model, method):
    network, rollouts = make_rollouts(model)
    noise = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(2))
    scale = 2e-3 if method == "gspo" else 1.0  # some ratios are within the bounds, others are not
    old, advantages = updates.log_probs(network, rollouts) + scale * noise, updates.advantages_of(rollouts)
    measured = updates.make_update(network, torch.optim.SGD(network.parameters(), lr=0.0), rollouts, old, method)
    found = gradient_of(network)
    network.zero_grad()
    log_prob, entropy = log_probs_without_groups(network, rollouts)
    bounds = measured["low"], measured["high"]
    updates.loss_of(method, old, log_prob, advantages, rollouts.mask, *bounds).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    assert gradient_of(network).norm() > 0 and not advantages[8:].any()
    torch.testing.assert_close(found, gradient_of(network), rtol=1e-4, atol=1e-6)
    assert measured["entropy"] == pytest.approx(entropy[rollouts.mask].mean().item(), rel=1e-5)
    assert 0 < measured["without_gradient_positive"] < 1


def test_without_advantages_momentum_moves_the_weights(model):
    network, rollouts = make_rollouts(model)
    optimizer, old = torch.optim.AdamW(network.parameters(), lr=0.1), updates.log_probs(network, rollouts)
    updates.make_update(network, optimizer, rollouts, old, "grpo")
    before = next(network.parameters()).clone()
    rollouts.rewards[:] = 1.0
    optimizer.zero_grad(set_to_none=True)  # as after a resume, when no gradient exists yet
    assert updates.make_update(network, optimizer, rollouts, old, "grpo")["grad_norm"] == 0
    assert not torch.equal(next(network.parameters()), before)


@pytest.mark.parametrize("method", plan.METHODS)
def test_an_update_measures_its_tokens(model, method):
    network, rollouts = make_rollouts(model)
    old, optimizer = updates.log_probs(network, rollouts), torch.optim.SGD(network.parameters(), lr=10.0)
    found = [updates.make_update(network, optimizer, rollouts, old, method) for _ in range(3)]
    first, _, last = found
    assert first["effective_sample_size"] == pytest.approx(1) and first["clipfrac_positive"] == 0  # every ratio is 1
    assert last["clipfrac_positive"] + last["clipfrac_negative"] > 0
    bounds = {(one["low"], one["high"]) for one in found}
    if method == "bapo":
        assert (last["low"], last["high"]) == (last["bapo_low"], last["bapo_high"]) != (0.6, 1.2)  # a bound has moved
    else:
        assert bounds == {{"grpo": (0.8, 1.2), "high_only": (0.8, 3.0), "gspo": (0.0, float("inf"))}[method]}
    if method == "grpo":  # a token has no gradient if a bound or the dual clip clips it
        shares = [last["without_gradient_positive"], last["without_gradient_negative"]]
        clipped = [last["clipfrac_positive"], last["clipfrac_negative"]]
        assert shares[0] == pytest.approx(clipped[0]) and shares[1] >= clipped[1] - 1e-6


def write_run(folder, run, held_out, weights="a"):
    """Write a run of three updates on each rollout batch. The last of the three has no advantages."""
    rows = [
        {"rollout": at, "place": place, "held_out_reward": reward if place == 1 else None, "entropy": 0.1}
        | {"held_out_before": None if at or place else 0.41}
        | {"without_gradient_positive": 0.5, "without_gradient_negative": 0.25}
        | {"bapo_search_steps": 0.0, "bapo_saturated": float(place == 1)}
        | {"bapo_positive_contribution_start": 0.3 if place < 2 else 0.0}
        for at, reward in enumerate(held_out)
        for place in (0, 1, 2)
    ]
    training.write_rows([vars(run) | row for row in rows], folder / f"{run.name}.parquet", {"weights": weights})


def test_only_seeds_with_all_methods_are_compared(tmp_path):
    runs = [replace(RUN, method=method, seed=seed) for seed in (1, 2, 3) for method in ("grpo", "bapo")]
    assert tables.comparison(tmp_path, runs).empty
    for run, held_out in zip(runs, [(0.5, 0.7), (0.6, 0.8), (0.5, 0.9), (0.4, 0.4), (0.9, 0.9)], strict=False):
        write_run(tmp_path, run, held_out)
    found = tables.comparison(tmp_path, runs)  # the last seed has no bapo
    assert list(found.index) == ["grpo", "bapo"] and set(found["seeds"]) == {2}
    assert found.loc["grpo", "reward"] == pytest.approx(0.65) and found.loc["bapo", "final_reward"] == pytest.approx(
        0.6
    )
    differences = torch.tensor([0.7 - 0.6, 0.4 - 0.7])
    assert found.loc["bapo", "difference"] == pytest.approx(differences.mean().item())
    assert found.loc["bapo", "half_width"] == pytest.approx(12.706 * differences.std().item() / 2**0.5, rel=1e-4)
    assert list(found["failed"]) == [0, 1]  # the second run of bapo ended below the warmed-up model
    # Of the three updates on a rollout batch the first does not count, nor one without advantages.
    assert list(found["met"]) == [0, 0] and list(found["saturated"]) == [1, 1]

    write_run(tmp_path, runs[-1], (0.5, 0.5), weights="b")
    with pytest.raises(ValueError, match="The runs of seed 3 started from different weights"):
        tables.comparison(tmp_path, runs)


def test_one_seed_has_no_interval(tmp_path):
    runs = [replace(RUN, method=method, seed=1) for method in ("grpo", "bapo")]
    for run, held_out in zip(runs, [(0.5, 0.7), (0.9, 0.44)], strict=True):
        write_run(tmp_path, run, held_out)
    found = tables.comparison(tmp_path, runs)
    rows = [tables.comparison_row(row) for row in found.reset_index().itertuples()]
    assert [row["minus GRPO's"] for row in rows] == ["", "+0.070"]
    assert [row["failed"] for row in rows] == ["0 of 1", "1 of 1"]  # 0.44 is below half of the run's best
