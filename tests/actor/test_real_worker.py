# SPDX-License-Identifier: Apache-2.0
"""One update of the real actor worker has the same bounds and gradient however its mini-batch is split or sharded."""

import json
import logging
import tempfile
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from support.actor import free_port, make_actor, make_mini_batch, run_update
from support.batches import values_of_dump
from support.updates import COMMON, CUTS, LOSS, MICRO_BATCH, RANKS, ROWS, CollectiveCounter, cut_of, read_record

from bapo import BAPOConfig
from recipe.bapo.records.tokens import read_dump


def updates_of_rank(rank, size, port, task, folder, engine):
    """Collect all results of a rank, in one process group."""
    COMMON.extend(engine)  # of this process, which the test has started
    model, ranks, results = f"actor_rollout_ref.model.path={task}/model", (rank, size, port), {}
    for name in CUTS:
        record = f"{folder}/{name}"
        files = [f"{LOSS}.bounds_record_dir='{record}'", f"{LOSS}.token_dump_dir='{record}/dump'"]
        actor = make_actor([model, *COMMON, *files, *cut_of(name, size)], *ranks)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        counter = CollectiveCounter(actor)
        metrics, gradient = run_update(actor, data)
        counter.stop()
        results[name] = {
            "gradient": gradient,
            "loss": metrics["loss"],
            "collectives": counter.collectives,
            "passes": counter.passes,
            "logged": [metrics[f"actor/bapo/clip_{side}"][rank].values for side in ("low", "high")],
        }
    results["marked"] = marked_updates(rank, size, port, task, folder)
    results["versions"] = dump_of_versions(rank, size, port, task)
    results["tools"] = updates_with_tool_tokens(rank, size, port, task)
    results["stock"] = stock_updates(rank, size, port, task, folder)
    torch.save(results, f"{folder}/rank{rank}.pt")


def stock_updates(rank, size, port, task, folder):
    """Make updates from verl's own config plus the two lines. Returns recorded bounds and gradients."""
    found = {}
    for name in ("halves", "single", "dynamic", "whole", "micro_batch scope"):
        record = f"{folder}/stock/{name}"
        overrides = [
            f"actor_rollout_ref.model.path={task}/model",
            f"{LOSS}.loss_mode=bapo",
            f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
            f"+{LOSS}.bounds_record_dir='{record}'",
            *(f"++{option}" if "policy_loss" in option else option for option in (*COMMON, *cut_of(name, size))),
        ]
        actor = make_actor(overrides, rank, size, port, stock=True)
        _, gradient = run_update(actor, make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size))
        found[name] = {"record": read_record(record, rank), "gradient": gradient}
    return found


def marked_updates(rank, size, port, task, folder):
    """Make four updates on a batch whose first ratios are 1: marked by the trainer as such or not, split or not."""
    from verl.utils import tensordict_utils as tu

    found = {}
    for name in ("marked", "plain", "marked, one micro-batch"):
        record = f"{folder}/{name}"
        micro = ROWS // size // 2 if "one" in name else 2
        overrides = [
            f"actor_rollout_ref.model.path={task}/model",
            *COMMON,
            f"{MICRO_BATCH}={micro}",
            f"{LOSS}.bounds_record_dir='{record}'",
        ]
        actor = make_actor(overrides, rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size, staleness=0.0)
        mark = {"bapo_on_policy_first_update": True} if "marked" in name else {}
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, epochs=2, **mark)
        counter = CollectiveCounter(actor)
        actor.train_mini_batch(data)
        counter.stop()
        found[name] = {
            "record": read_record(record, rank),
            "passes": counter.passes,
            "collectives": counter.collectives,
        }
    return found


def updates_with_tool_tokens(rank, size, port, task):
    """Make updates on multi-turn responses. Two tokens of each come from a tool and differ between the updates."""
    from recipe.bapo.scopes import SEARCH_FIELDS

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
        metrics, gradient = run_update(actor, data)
        names = ("clip_low", "clip_high", "positive_contribution", "positive_token_fraction", "length_positive")
        values = [metrics[f"actor/bapo/{name}"][rank].values[0].hex() for name in names]
        model_tokens = [
            (int(mask.sum()), advantages[0].item()) for mask, _, advantages in zip(*rows.values(), strict=True)
        ]
        found.append({"values": values, "gradient": gradient, "model tokens": model_tokens})
    return found


def dump_of_versions(rank, size, port, task):
    """Return what a dump of this rank says of versions: two checks by name, and the updates and trainer's versions."""
    from recipe.bapo.marks import ROLLOUT_VERSION, TRAINER_VERSION, UPDATES_MADE
    from verl.utils import tensordict_utils as tu

    with tempfile.TemporaryDirectory() as folder:
        dump = f"{LOSS}.token_dump_dir={folder}"
        actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *COMMON, dump], rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        data[ROLLOUT_VERSION] = torch.arange(len(data)) % 3
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, epochs=1, **{TRAINER_VERSION: 4, UPDATES_MADE: 6})
        expected = torch.cat([torch.full((len(row),), k % 3.0) for k, row in enumerate(data["response_mask"].unbind())])
        actor.train_mini_batch(data)
        files = [load_file(path) for path in sorted(Path(folder).glob(f"rank{rank}-*"))]
    found = torch.cat([tokens["version"] for tokens in files])
    return {
        "versions are the responses'": torch.equal(found.sort().values, expected.sort().values),
        "of a response all the same": all(
            part.unique().numel() == 1 for t in files for part in t["version"].split(t["lengths"].tolist())
        ),
        "updates": sorted({int(tokens["update"]) for tokens in files}),
        "trained from": sorted({int(tokens["trainer_version"]) for tokens in files}),
    }


def dropout_update(rank, port, task, folder):
    """Make one update with dropout. Writes its bounds record to ``folder``, and a dump of the tokens in training."""
    actor = make_actor(
        [
            f"actor_rollout_ref.model.path={task}/model",
            *COMMON,
            "+actor_rollout_ref.model.override_config.attention_dropout=0.3",
            f"{LOSS}.bounds_record_dir={folder}",
            f"{LOSS}.token_dump_dir={folder}/dump",
        ],
        port=port,
    )
    data = make_mini_batch(actor, seed=7, rows=ROWS)
    before = torch.get_rng_state()
    run_update(actor, data)
    assert not torch.equal(before, torch.get_rng_state())  # dropout has drawn random numbers


def test_the_search_sees_the_dropout_masks_of_training(task, tmp_path):
    mp.spawn(dropout_update, args=(free_port(), str(task), str(tmp_path)))
    config = BAPOConfig(positive_contribution_target=0.45)
    (recorded,) = read_record(tmp_path)
    assert recorded["source"] == "pass"
    for key, (value,) in without_lengths(values_of_dump(tmp_path / "dump", config)).items():
        assert value == pytest.approx(float.fromhex(recorded[key]), abs=1e-9), key


def warnings_of_rollout_batches(rank, port, task, folder):
    """Return the worker's warnings in 20 rollout batches with rho far above the target."""
    from verl.utils import tensordict_utils as tu

    overrides = [f"actor_rollout_ref.model.path={task}/model", *COMMON]
    overrides += [f"{LOSS}.positive_contribution_target=0.05"]
    actor = make_actor(overrides, port=port)
    data = make_mini_batch(actor, seed=7, rows=4)
    tu.assign_non_tensor(data, mini_batch_size=4, epochs=1)
    messages = BufferingHandler(capacity=1000)
    logging.getLogger("recipe.bapo").addHandler(messages)
    warned = []
    for number in range(20):
        actor.train_mini_batch(data.copy())
        warned += [number for said in messages.buffer if "the target was met at the start" in said.getMessage()]
        messages.flush()
    (Path(folder) / "warned.json").write_text(json.dumps(warned))


def test_a_target_that_does_nothing_is_logged_once_in_ten_rollout_batches(task, tmp_path):
    mp.spawn(warnings_of_rollout_batches, args=(free_port(), str(task), str(tmp_path)))
    assert json.loads((tmp_path / "warned.json").read_text()) == [9, 19]


def without_lengths(found):
    """Leave out the mean lengths, which are wrong here: ``values_of_dump`` makes one row of all responses."""
    return {key: value for key, value in found.items() if not key.startswith("length_")}


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, task, tmp_path_factory):
    size, engine = request.param
    folder = tmp_path_factory.mktemp(f"updates{size}")
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder), engine), nprocs=size)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
    for rank, result in enumerate(results):
        for name in CUTS:
            result[name]["record"] = read_record(folder / name, rank)
            result[name]["dump"] = folder / name / "dump"
    return results


def test_every_cut_has_the_same_bounds_loss_and_gradient(ranks):
    for kind, cuts in {
        "whole": ["halves", "single", "dynamic", "dynamic, whole"],
        "gradient, whole": ["gradient, quarters"],
    }.items():
        whole = ranks[0][kind]
        assert 0 < float.fromhex(whole["record"][0]["search_steps"])  # the search moved a bound
        for name in cuts:
            cut = ranks[0][name]
            for field in ("low", "high", "search_steps", "saturated"):
                assert cut["record"][0][field] == whole["record"][0][field], (name, field)
            assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6, abs=1e-6)
            torch.testing.assert_close(cut["gradient"], whole["gradient"], rtol=1e-5, atol=1e-5)


def test_all_ranks_hold_bit_identical_bounds_and_log_them_with_every_micro_batch(ranks):
    for name in CUTS:
        record = ranks[0][name]["record"]
        assert all(rank[name]["record"] == record for rank in ranks), name
        used = [{float.fromhex(line[side]) for line in record} for side in ("low", "high")]
        assert all([set(values) for values in rank[name]["logged"]] == used for rank in ranks), name


def test_a_replay_of_the_dumped_tokens_finds_the_same_bounds(ranks):
    config = BAPOConfig(positive_contribution_target=0.45)
    for name in CUTS.keys() - {"micro_batch scope"}:
        definition = replace(config, contribution="gradient" if "gradient" in name else "value")
        (recorded,) = ranks[0][name]["record"]
        dumped = [tokens for micro_batches in read_dump(ranks[0][name]["dump"]) for tokens in micro_batches]
        assert all(tokens["entropy"].min() > 0 for tokens in dumped)
        found = values_of_dump(ranks[0][name]["dump"], definition)
        assert [value.hex() for side in ("low", "high") for value in found[side]] == [recorded["low"], recorded["high"]]
        for key, (value,) in without_lengths(found).items():
            assert value == pytest.approx(float.fromhex(recorded[key]), abs=1e-9), key


def test_one_collective_and_one_pass_an_update(ranks):
    for rank in ranks:
        for name in ("halves", "single", "dynamic", "dynamic, whole", "gradient, quarters"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (1, 1), name
        for name in ("whole", "gradient, whole"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (1, 0), name
        micro_batches = 4 // len(ranks)
        scope = rank["micro_batch scope"]
        assert (scope["collectives"], scope["passes"], len(scope["record"])) == (micro_batches, 0, micro_batches)


def test_two_lines_in_verls_own_config_bring_the_same_bounds_and_gradients(ranks):
    for rank in ranks:
        for name, found in rank["stock"].items():
            assert found["record"] == rank[name]["record"], name
            torch.testing.assert_close(found["gradient"], rank[name]["gradient"], rtol=1e-5, atol=1e-7)


def test_a_first_update_that_the_trainer_marked_needs_no_pass(ranks):
    for rank in ranks:
        marked, plain, whole = (rank["marked"][name] for name in ("marked", "plain", "marked, one micro-batch"))
        assert [line["source"] for line in marked["record"]] == ["on_policy", *3 * ["pass"]]
        assert [line["source"] for line in plain["record"]] == 4 * ["pass"]
        assert [line["source"] for line in whole["record"]] == ["on_policy", *3 * ["loss"]]
        assert (marked["passes"], plain["passes"], whole["passes"]) == (3, 4, 0)
        assert marked["collectives"] == plain["collectives"] == whole["collectives"] == 4
        assert (
            len({line["positive_contribution_start"] for line in plain["record"]}) == 4
        )  # each update has its own search
        # Known ratios do not depend on how the mini-batch is split. A forward finds the same except for rounding.
        assert whole["record"][0] == marked["record"][0]
        for name in ("low", "high", "search_steps"):
            assert marked["record"][0][name] == plain["record"][0][name]
        starts = [float.fromhex(found["record"][0]["positive_contribution_start"]) for found in (marked, plain)]
        assert starts[0] == pytest.approx(starts[1], rel=1e-5)


def test_tool_tokens_of_a_multi_turn_response_enter_neither_bounds_nor_gradient(ranks):
    for rank in ranks:
        first, second = rank["tools"]
        assert first["values"] == second["values"] and torch.equal(first["gradient"], second["gradient"])
    of_all = [row for rank in ranks for row in rank["tools"][0]["model tokens"]]
    positive = [tokens for tokens, advantage in of_all if advantage > 0]
    fraction, length = (float.fromhex(value) for value in ranks[0]["tools"][0]["values"][-2:])
    assert fraction == pytest.approx(sum(positive) / sum(tokens for tokens, _ in of_all))
    assert length == pytest.approx(sum(positive) / len(positive))


def test_a_dump_says_which_weights_sampled_a_response_and_which_are_trained(ranks):
    for rank in ranks:
        assert rank["versions"] == {
            "versions are the responses'": True,
            "of a response all the same": True,
            "updates": [6, 7],
            "trained from": [4],
        }
