# SPDX-License-Identifier: Apache-2.0
"""One update of the real actor worker has the same bounds and gradient however its mini-batch is split or sharded."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch, run_update
from support.capture import (
    assert_rounding_changes_no_bounds,
    bounds_of,
    bounds_used,
    capture_to,
    read_updates,
    tokens_of_updates,
    values_of_updates,
)
from support.oracle import entropy_covariance, sequential_search
from support.updates import COMMON, CUTS, MICRO_BATCH, RANKS, ROWS, CollectiveCounter, cut_of
from support.versions import ONLY_OUR_TRAINERS, is_our_trainers

from bapo import BAPOConfig


def updates_of_rank(rank, size, port, task, folder, engine):
    """Collect all results of a rank, in one process group."""
    COMMON.extend(engine)  # of this process, which the test has started
    model, ranks = f"actor_rollout_ref.model.path={task}/model", (rank, size, port)
    results = {"tools": updates_with_tool_tokens(rank, size, port, task)}  # before anything is captured
    for name in CUTS:
        capture_to(f"{folder}/{name}")
        actor = make_actor([model, *COMMON, *cut_of(name, size)], *ranks)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        counter = CollectiveCounter(actor)
        metrics, gradient = run_update(actor, data)
        counter.stop()
        results[name] = {
            "gradient": gradient,
            "loss": metrics["loss"],
            "collectives": counter.collectives,
            "passes": counter.passes,
            "gathered": [metrics[f"actor/bapo/clip_{side}"] for side in ("low", "high")],
        }
    results["marked"] = marked_updates(rank, size, port, task, folder)
    results["our trainer"] = updates_of_our_trainer(rank, size, port, task, folder)
    torch.save(results, f"{folder}/rank{rank}.pt")


def updates_of_our_trainer(rank, size, port, task, folder):
    """Make updates from the config of our trainer, with the verl that it is written for. Returns the gradients."""
    found = {}
    for name in ("dynamic", "micro_batch scope") if is_our_trainers() else ():
        capture_to(f"{folder}/our trainer/{name}")
        overrides = [f"actor_rollout_ref.model.path={task}/model", *COMMON, *cut_of(name, size)]
        actor = make_actor(overrides, rank, size, port, ours=True)
        _, found[name] = run_update(actor, make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size))
    return found


def marked_updates(rank, size, port, task, folder):
    """Make four updates on a batch whose first ratios are 1: marked by the trainer as such or not, split or not."""
    from verl.utils import tensordict_utils as tu

    found = {}
    for name in ("marked", "plain", "marked, one micro-batch"):
        capture_to(f"{folder}/{name}")
        micro = ROWS // size // 2 if "one" in name else 2
        overrides = [f"actor_rollout_ref.model.path={task}/model", *COMMON, f"{MICRO_BATCH}={micro}"]
        actor = make_actor(overrides, rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size, staleness=0.0)
        mark = {"bapo_on_policy_first_update": True} if "marked" in name else {}
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, epochs=2, **mark)
        counter = CollectiveCounter(actor)
        actor.train_mini_batch(data)
        counter.stop()
        found[name] = {
            "logged": [update["logged"] for update in read_updates(f"{folder}/{name}", rank)],
            "passes": counter.passes,
            "collectives": counter.collectives,
        }
    return found


def updates_with_tool_tokens(rank, size, port, task):
    """Make updates on multi-turn responses. Two tokens of each come from a tool and differ between the updates."""
    from recipe.bapo.hook.scopes import SEARCH_FIELDS

    found = []
    for log_prob, advantage in ((0.0, 0.0), (-50.0, 100.0)):
        overrides = [f"actor_rollout_ref.model.path={task}/model", *COMMON, *cut_of("halves", size)]
        actor = make_actor(overrides, rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        rows = {name: [row.clone() for row in data[name].unbind()] for name in SEARCH_FIELDS}
        for mask, old, advantages in zip(*rows.values(), strict=True):
            mask[1:3], old[1:3], advantages[1:3] = 0, log_prob, advantage
        for name, parts in rows.items():
            data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        prompts = [torch.zeros(len(prompt), dtype=torch.long) for prompt in data["prompts"].unbind()]
        masks = [torch.cat(parts) for parts in zip(prompts, rows["response_mask"], strict=True)]
        data["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        _, gradient = run_update(actor, data)
        model_tokens = [
            (int(mask.sum()), advantages[0].item()) for mask, _, advantages in zip(*rows.values(), strict=True)
        ]
        found.append({"logged": actor.logged, "gradient": gradient, "model tokens": model_tokens})
    return found


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, task, tmp_path_factory):
    size, engine = request.param
    folder = tmp_path_factory.mktemp(f"updates{size}")
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder), engine), nprocs=size)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
    for rank, result in enumerate(results):
        result["folder"] = folder
        for name in CUTS:
            (result[name]["update"],) = read_updates(folder / name, rank)
    return results


def test_every_cut_has_the_same_bounds_loss_and_gradient(ranks):
    for kind, cuts in {
        "whole": ["halves", "single", "dynamic", "dynamic, whole"],
        "gradient, whole": ["gradient, quarters"],
    }.items():
        whole = ranks[0][kind]
        assert whole["update"]["logged"]["search_steps"] > 0  # the search moved a bound
        for name in cuts:
            cut = ranks[0][name]
            for field in ("clip_low", "clip_high", "search_steps", "saturated"):
                assert cut["update"]["logged"][field] == whole["update"]["logged"][field], (name, field)
            assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6, abs=1e-6)
            torch.testing.assert_close(cut["gradient"], whole["gradient"], rtol=1e-5, atol=1e-5)


def test_all_ranks_use_and_log_bit_identical_bounds(ranks):
    for name in CUTS:
        update = ranks[0][name]["update"]
        assert all(rank[name]["update"]["logged"] == update["logged"] for rank in ranks), name
        assert all(rank[name]["gathered"] == [[[bound]] * len(ranks) for bound in bounds_of(update)] for rank in ranks)
        if name == "micro_batch scope":
            assert all(bounds_used(rank[name]["update"]) == bounds_used(update) for rank in ranks)
            assert bounds_of(update) == tuple(map(fmean, zip(*bounds_used(update), strict=True)))
        else:
            assert all(set(bounds_used(rank[name]["update"])) == {bounds_of(update)} for rank in ranks), name


def test_bounds_are_those_of_a_literal_search_over_the_tokens_of_all_ranks(ranks):
    """Some end between the first pair and the last."""
    config, steps = BAPOConfig(positive_contribution_target=0.45), set()
    for name in CUTS.keys() - {"micro_batch scope"}:
        definition = replace(config, contribution="gradient" if "gradient" in name else "value")
        logged = ranks[0][name]["update"]["logged"]
        (tokens,) = tokens_of_updates(ranks[0]["folder"] / name)
        low, high, *_, number, _ = sequential_search(*tokens, definition, 3.0)
        assert (logged["clip_low"], logged["clip_high"], logged["search_steps"]) == (low, high, number), name
        steps.add(number)
        (found,) = values_of_updates(ranks[0]["folder"] / name, definition)
        assert_rounding_changes_no_bounds(ranks[0]["folder"] / name, definition)
        assert (found["clip_low"], found["clip_high"]) == (logged["clip_low"], logged["clip_high"]), name
        assert {value: logged[value] for value in found} == pytest.approx(found, abs=1e-9), name
    assert any(0 < number < 51 for number in steps)


def test_the_entropy_covariance_is_that_of_all_ranks(ranks):
    for name in CUTS.keys() - {"micro_batch scope"}:
        (tokens,) = tokens_of_updates(ranks[0]["folder"] / name)
        expected = entropy_covariance(*tokens, *bounds_of(ranks[0][name]["update"]), 3.0)
        found = [rank[name]["update"]["logged"]["entropy_covariance"] for rank in ranks]
        assert found == pytest.approx([expected] * len(ranks), rel=1e-4)


def test_a_first_update_makes_two_collectives_and_a_forward(ranks):
    for rank in ranks:
        for name in ("halves", "single", "dynamic", "dynamic, whole", "gradient, quarters"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (2, 1), name
        for name in ("whole", "gradient, whole"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (1, 0), name
        micro_batches = 4 // len(ranks)
        scope = rank["micro_batch scope"]
        assert (scope["collectives"], scope["passes"]) == (micro_batches, 0)
        assert len(scope["update"]["micro_batches"]) == micro_batches


@pytest.mark.skipif(not is_our_trainers(), reason=ONLY_OUR_TRAINERS)
def test_our_trainers_config_brings_the_same_bounds_and_gradients(ranks):
    for number, rank in enumerate(ranks):
        assert rank["our trainer"]
        for name, gradient in rank["our trainer"].items():
            (update,) = read_updates(rank["folder"] / "our trainer" / name, number)
            assert update["logged"] == rank[name]["update"]["logged"], name
            assert bounds_used(update) == bounds_used(rank[name]["update"]), name
            torch.testing.assert_close(gradient, rank[name]["gradient"], rtol=1e-5, atol=1e-7)


def test_a_first_update_that_the_trainer_marked_needs_no_pass(ranks):
    for rank in ranks:
        marked, plain, whole = (rank["marked"][name] for name in ("marked", "plain", "marked, one micro-batch"))
        for found in (marked, plain):
            assert found["passes"] == sum(update["extra_forward"] for update in found["logged"])
        assert marked["logged"][0]["extra_forward"] == 0 < plain["logged"][0]["extra_forward"] and whole["passes"] == 0
        assert (marked["collectives"], plain["collectives"], whole["collectives"]) == (8, 8, 5)
        starts = [update["positive_contribution_start"] for update in plain["logged"]]
        assert len(set(starts)) == len(starts) == 4  # each update has its own search
        # Known ratios do not depend on how the mini-batch is split. A forward finds the same except for rounding.
        of_search = ("clip_low", "clip_high", "search_steps", "positive_contribution_start", "positive_contribution")
        for name in of_search:
            assert whole["logged"][0][name] == marked["logged"][0][name]
        for name in ("clip_low", "clip_high", "search_steps"):
            assert marked["logged"][0][name] == plain["logged"][0][name]
        assert marked["logged"][0]["positive_contribution_start"] == pytest.approx(starts[0], rel=1e-5)


def test_tool_tokens_of_a_multi_turn_response_enter_neither_bounds_nor_gradient(ranks):
    for rank in ranks:
        first, second = rank["tools"]
        assert first["logged"] == second["logged"] and torch.equal(first["gradient"], second["gradient"])
    of_all = [row for rank in ranks for row in rank["tools"][0]["model tokens"]]
    positive = [tokens for tokens, advantage in of_all if advantage > 0]
    logged = ranks[0]["tools"][0]["logged"]
    fraction = sum(positive) / sum(tokens for tokens, _ in of_all)
    assert logged["actor/bapo/positive_token_fraction"] == pytest.approx(fraction)
    assert logged["actor/bapo/length_positive"] == pytest.approx(sum(positive) / len(positive))
