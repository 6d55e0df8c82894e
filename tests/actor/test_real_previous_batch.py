# SPDX-License-Identifier: Apache-2.0
"""``bound_scope=previous_batch`` on the real actor worker: no extra forward, and bad input changes nothing."""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch, run_update
from support.capture import bounds_of, bounds_used, capture_to, read_updates, values_of_updates
from support.updates import COMMON, CUTS, LOSS, RANKS, ROWS, CollectiveCounter, cut_of

from bapo import BAPOConfig

SCOPE = f"{LOSS}.bound_scope=previous_batch"
WHOLE_MINI_BATCH = [name for name in CUTS if name != "micro_batch scope"]
BATCHES, UPDATES = 3, 4  # rollout batches, and updates on each: two mini-batches in two epochs
BAD = ("old_log_prob", "log_prob", "advantages", "advantages of a clipped token")


def updates_of_rank(rank, size, port, task, folder, engine):
    COMMON.extend(engine)  # of this process, which the test has started
    results = {
        "again": {name: bounds_of_the_same_update_again(name, rank, size, port, task) for name in WHOLE_MINI_BATCH},
        "bad": {name: bad_update(name, rank, size, port, task) for name in BAD},
        "batches": three_batches(rank, size, port, task, folder),  # the last, because it captures from then on
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))


def bounds_of_the_same_update_again(name, rank, size, port, task):
    """Return the bounds of two updates on the same mini-batch.

    The first has ``bound_scope=mini_batch``. The second has ``previous_batch``, and the mini-batch is also that of the
    rollout batch before.
    """
    model, found = f"actor_rollout_ref.model.path={task}/model", []
    for scope, count in (("mini_batch", 1), ("previous_batch", 2)):
        actor = make_actor([model, *COMMON, *cut_of(name, size), f"{LOSS}.bound_scope={scope}"], rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        for _ in range(count):
            actor.updates_on_batch = 0
            run_update(actor, data.copy())
            if scope == "previous_batch":
                actor.scope.next_batch()
        found.append([actor.logged[f"actor/bapo/clip_{side}"] for side in ("low", "high")])
    return found


def three_batches(rank, size, port, task, folder):
    """Make updates with ``train_mini_batch`` from verl's config plus our options; count forwards and collectives.

    They are captured to ``folder``.
    """
    from verl.utils import tensordict_utils as tu

    options = {
        "loss_mode": "bapo",
        "_target_": "recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        "bound_scope": "previous_batch",
        "positive_contribution_target": 0.45,
    }
    actor = make_actor(
        [
            f"actor_rollout_ref.model.path={task}/model",
            *(f"++{LOSS}.{name}={value}" for name, value in options.items()),
            *(line for line in COMMON if LOSS not in line),
        ],
        rank,
        size,
        port,
        stock=True,
    )
    data = [make_mini_batch(actor, seed, ROWS, rank, size, staleness=0.3) for seed in range(BATCHES)]
    capture_to(folder)
    counter = CollectiveCounter(actor)
    for batch in data:
        tu.assign_non_tensor(batch, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=2)
        output = actor.train_mini_batch(batch)
    counter.stop()
    logged = tu.get(output, "metrics")
    return {
        "passes": counter.passes,
        "collectives": counter.collectives,
        "logged": {side: logged[f"actor/bapo/clip_{side}"] for side in ("low", "high")},
    }


def bad_update(name, rank, size, port, task):
    """Return the error of an update with one bad value on the last rank, and whether weights or optimizer changed."""
    actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *COMMON, SCOPE], rank, size, port)
    data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
    run_update(actor, data.copy())  # so that the optimizer has a state
    before = state_of(actor)
    if rank == size - 1:
        spoil(name, actor, data)
    actor.updates_on_batch = 0
    try:
        actor.train_batch(data)
        error = "none"
    except ValueError as raised:
        error = str(raised)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, state_of(actor), strict=True))
    return {"error": error, "unchanged": unchanged}


def state_of(actor):
    tensors = [*actor.engine.module.state_dict().values()]
    states = actor.engine.optimizer.state_dict()["state"].values()
    tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach().clone() for tensor in tensors]


def spoil(name, actor, data):
    """Make one old log-prob NaN or one advantage infinite in the batch, or one log-prob of each micro-batch NaN."""
    if name == "log_prob":
        loss_fn = actor.loss_fn

        def with_nan(model_output, data, dp_group=None):
            log_probs = model_output["log_probs"]
            poison = torch.zeros_like(log_probs.values())
            poison[int(data["prompts"].offsets()[1]) + 1] = torch.nan  # a token of the first response
            model_output["log_probs"] = torch.nested.nested_tensor_from_jagged(
                log_probs.values() + poison, log_probs.offsets()
            )
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        actor.loss_fn = with_nan
        return
    rows = {field: [row.clone() for row in data[field].unbind()] for field in ("old_log_probs", "advantages")}
    if name == "old_log_prob":
        rows["old_log_probs"][1][1] = torch.nan
    else:
        rows["advantages"][1][1] = torch.inf
    if "clipped" in name:
        rows["old_log_probs"][1][1] -= 5  # a ratio of about 150, far above the upper bound
    for field, parts in rows.items():
        data[field] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, task, tmp_path_factory):
    size, engine = request.param
    folder = tmp_path_factory.mktemp(f"previous{size}")
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder), engine), nprocs=size)
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    for rank, result in enumerate(results):
        result["folder"], result["updates"] = folder, read_updates(folder, rank)
    return results


@pytest.mark.parametrize("name", WHOLE_MINI_BATCH)
def test_the_bounds_are_those_that_an_exact_search_found_on_the_same_tokens(ranks, name):
    (exact, later), *others = [rank["again"][name] for rank in ranks]
    assert later == exact and all(other == [exact, exact] for other in others)


def test_no_forward_and_one_collective_an_update(ranks):
    for rank in ranks:
        assert (rank["batches"]["passes"], rank["batches"]["collectives"]) == (0, BATCHES * UPDATES)


def test_all_ranks_use_what_a_search_found_on_the_batch_before(ranks):
    updates = ranks[0]["updates"]
    used = [bounds_of(update) for update in updates]
    for rank in ranks:
        assert [update["logged"] for update in rank["updates"]] == [update["logged"] for update in updates]
        assert [set(bounds_used(update)) for update in rank["updates"]] == [{bounds} for bounds in used]
    found = values_of_updates(ranks[0]["folder"], BAPOConfig(positive_contribution_target=0.45))
    assert len(found) == BATCHES * UPDATES
    searched = [(values["clip_low"], values["clip_high"]) for values in found]
    assert used[:UPDATES] == [(0.6, 1.2), *searched[: UPDATES - 1]]  # first batch: the latest search
    assert used[UPDATES:] == searched[:-UPDATES]
    assert len(set(used)) > 2  # the searches differ
    for update, values in zip(updates, found, strict=True):  # these are measured on this update's tokens
        for name in ("positive_contribution_start", "positive_contribution_highest", "length_positive"):
            assert update["logged"][name] == pytest.approx(values[name], abs=1e-9), name


def test_what_verl_gathers_of_the_bounds_is_one_number_for_each_update_and_rank(ranks):
    for rank in ranks:
        for side, bounds in rank["batches"]["logged"].items():
            last = [update["logged"][f"clip_{side}"] for update in rank["updates"][-UPDATES:]]
            assert bounds == [bound for bound in last for _ in ranks]


@pytest.mark.parametrize("name", BAD)
def test_one_bad_value_on_one_rank_raises_on_all_and_changes_nothing(ranks, name):
    count = ROWS // len(ranks) // 2 if name == "log_prob" else 1  # one log-prob in each micro-batch of that rank
    for rank in ranks:
        found = rank["bad"][name]
        assert f"on response tokens: {count} in {name.split()[0]}. No optimizer step" in found["error"]
        assert found["unchanged"]
