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
from support.updates import COMMON, CUTS, RANKS, ROWS, CollectiveCounter, cut_of

from bapo import BAPOConfig


def updates_of_rank(rank, size, port, task, folder, engine):
    """Collect all results of a rank, in one process group."""
    COMMON.extend(engine)  # of this process, which the test has started
    model, ranks = f"actor_rollout_ref.model.path={task}/model", (rank, size, port)
    results = {}
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
    torch.save(results, f"{folder}/rank{rank}.pt")


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
