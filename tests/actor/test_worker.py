# SPDX-License-Identifier: Apache-2.0
"""One update of the real actor worker: the same bounds and gradient however its mini-batch is cut or sharded."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from support.actor import free_port, make_actor, make_mini_batch, run_update
from tensordict import NonTensorData, TensorDict

from bapo import BAPOConfig, read_values
from recipe.bapo.records.tokens import read_dump
from recipe.bapo.report.measure import measure, search

ROWS = 16
CUTS = {
    "whole": ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={whole}"],
    "halves": ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={half}"],
    "single": ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
    "dynamic": [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    ],
    "dynamic, whole": [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    ],
    "gradient, whole": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={whole}",
        "actor_rollout_ref.actor.policy_loss.contribution=gradient",
    ],
    "gradient, quarters": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.policy_loss.contribution=gradient",
    ],
    "micro_batch scope": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.policy_loss.bound_scope=micro_batch",
    ],
}


COMMON = [
    "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.45",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
]


class CollectiveCounter:
    """Counts our all-reduces and the engine's forward passes without gradient.

    Ours are all that ``_find_bounds`` makes outside the engine, and the float64 ones in it, which the loss makes.
    """

    def __init__(self, actor):
        self.collectives = self.passes = 0
        self.outside_engine = False
        self.all_reduce, self.infer, self.find = (
            torch.distributed.all_reduce,
            actor.engine.infer_batch,
            actor._bounds_before_training,
        )
        torch.distributed.all_reduce = self.count_collective
        actor.engine.infer_batch = self.count_pass
        actor._bounds_before_training = self.find_bounds

    def find_bounds(self, data):
        self.outside_engine = True
        try:
            return self.find(data)
        finally:
            self.outside_engine = False

    def count_collective(self, tensor, *args, **kwargs):
        self.collectives += self.outside_engine or tensor.dtype == torch.float64
        return self.all_reduce(tensor, *args, **kwargs)

    def count_pass(self, *args, **kwargs):
        self.passes += 1
        self.outside_engine = False
        try:
            return self.infer(*args, **kwargs)
        finally:
            self.outside_engine = True

    def stop(self):
        torch.distributed.all_reduce = self.all_reduce


@pytest.mark.parametrize(
    "lengths, sp_size, one", [([1, 2, 6, 4], 1, True), ([1, 2, 6, 5], 1, False), ([1, 2, 6, 5], 2, True)]
)
def test_a_dynamic_mini_batch_is_one_micro_batch_where_it_is_on_every_rank(lengths, sp_size, one):
    from recipe.bapo.worker import BAPOTrainingWorker
    from verl.utils import tensordict_utils as tu

    worker = object.__new__(BAPOTrainingWorker)
    worker.engine = SimpleNamespace(ulysses_sequence_parallel_size=sp_size)
    data = TensorDict({"advantages": torch.zeros(2, 1)}, batch_size=[2])
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=10, global_token_num=NonTensorData(lengths))
    assert worker._is_one_micro_batch(data) is one


def updates_of_rank(rank, size, port, task, folder):
    results = {}
    for name, cut in CUTS.items():
        record = f"{folder}/{name}"
        actor = make_actor(
            [
                f"actor_rollout_ref.model.path={task}/model",
                *COMMON,
                f"actor_rollout_ref.actor.policy_loss.bounds_record_dir='{record}'",
                f"actor_rollout_ref.actor.policy_loss.token_dump_dir='{record}/dump'",
                *(part.format(whole=ROWS // size, half=ROWS // size // 2) for part in cut),
            ],
            rank,
            size,
            port,
        )
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        counter = CollectiveCounter(actor)
        metrics, gradient = run_update(actor, data)
        counter.stop()
        results[name] = {
            "gradient": gradient,
            "loss": metrics["loss"],
            "collectives": counter.collectives,
            "passes": counter.passes,
            "keys": sorted(key for key in metrics if key.startswith("actor/bapo/")),
        }
    results["marked"] = marked_updates(rank, size, port, task)
    results["versions"] = dump_of_versions(rank, size, port, task)
    results["tools"] = updates_with_tool_tokens(rank, size, port, task)
    results["stock"] = stock_updates(rank, size, port, task, folder)
    torch.save(results, f"{folder}/rank{rank}.pt")


def stock_updates(rank, size, port, task, folder):
    """Updates by verl's own config plus the two lines: bounds as recorded, and the gradient."""
    found = {}
    for name in ("halves", "single", "dynamic", "whole", "micro_batch scope"):
        cut = [part.format(whole=ROWS // size, half=ROWS // size // 2) for part in CUTS[name]]
        record = f"{folder}/stock/{name}"
        overrides = [
            f"actor_rollout_ref.model.path={task}/model",
            "actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
            "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
            f"+actor_rollout_ref.actor.policy_loss.bounds_record_dir='{record}'",
            *(f"++{switch}" if "policy_loss" in switch else switch for switch in (*COMMON, *cut)),
        ]
        actor = make_actor(overrides, rank, size, port, stock=True)
        _, gradient = run_update(actor, make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size))
        lines = Path(record, f"rank{rank}.jsonl").read_text().splitlines()
        found[name] = {"record": [json.loads(line) for line in lines], "gradient": gradient}
    return found


class BeforeUpdate(Exception):
    """Raised where verl's engine would begin its update."""


def bounds_before_the_update(actor, data):
    """What the worker has found when verl's engine would begin its update, which it does not."""

    def stop(*_):
        raise BeforeUpdate

    verl_update, actor.verl_update = actor.verl_update, stop
    with pytest.raises(BeforeUpdate):
        actor.train_batch(data)
    actor.verl_update = verl_update
    return actor.update_bounds


def marked_updates(rank, size, port, task):
    """Bounds and passes of first updates whose ratios are 1, marked or not, and of all updates on one marked batch."""
    from recipe.bapo.worker import RATIOS_START_AT_1
    from verl.utils import tensordict_utils as tu

    found = {}
    for marked in (True, False):
        actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *COMMON], rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size, staleness=0.0)
        counter = CollectiveCounter(actor)
        actor.ratios_are_1 = marked
        whole = data.copy()
        values = read_values(*bounds_before_the_update(actor, data))
        counter.stop()
        found[marked] = {"values": values, "passes": counter.passes, "collectives": counter.collectives}
        tu.assign_non_tensor(whole, micro_batch_size_per_gpu=len(whole))
        of_worker = bounds_before_the_update(actor, whole)  # None: the training forward finds them
        found[marked]["as one micro-batch"] = None if of_worker is None else read_values(*of_worker)

        mark = {RATIOS_START_AT_1: True} if marked else {}
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, epochs=2, **mark)
        counter = CollectiveCounter(actor)
        actor.train_mini_batch(data)
        counter.stop()
        found[marked]["passes of 4 updates"] = counter.passes
    return found


def updates_with_tool_tokens(rank, size, port, task):
    """Updates on multi-turn responses: two tokens of each are a tool's, with values that differ between the updates."""
    from recipe.bapo.worker import SEARCH_FIELDS

    found = []
    for log_prob, advantage in ((0.0, 0.0), (-50.0, 100.0)):
        cut = [part.format(half=ROWS // size // 2) for part in CUTS["halves"]]
        actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *COMMON, *cut], rank, size, port)
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
    """What a dump of this rank says of the weights' versions, update by update."""
    from recipe.bapo.worker import ROLLOUT_VERSION, TRAINER_VERSION
    from verl.utils import tensordict_utils as tu

    with tempfile.TemporaryDirectory() as folder:
        dump = f"actor_rollout_ref.actor.policy_loss.token_dump_dir={folder}"
        actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *COMMON, dump], rank, size, port)
        data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
        data[ROLLOUT_VERSION] = torch.arange(len(data)) % 3
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, epochs=1, **{TRAINER_VERSION: 4})
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


def test_at_ratio_1_only_the_fields_of_the_search_go_to_the_device(monkeypatch):
    from recipe.bapo.worker import BAPOTrainingWorker

    def stop(tokens):
        assert sorted(tokens) == ["advantages", "log_prob", "old_log_prob", "response_mask"]
        raise BeforeUpdate

    worker, moved = object.__new__(BAPOTrainingWorker), []
    worker.bapo_config, worker.ratios_are_1 = BAPOConfig(), True
    monkeypatch.setattr(TensorDict, "to", lambda data, device: moved.append(set(data.keys())) or data)
    monkeypatch.setattr(worker, "_statistics_of", stop)
    names = ("input_ids", "position_ids", "response_mask", "old_log_probs", "advantages")
    with pytest.raises(BeforeUpdate):
        worker._bounds_before_training(TensorDict({name: torch.zeros(2, 1) for name in names}, [2]))
    assert moved == [{"response_mask", "old_log_probs", "advantages"}]


def dropout_update(rank, port, task, folder):
    """One update with dropout: the random state before and after the search, and a dump of the training's tokens."""
    actor = make_actor(
        [
            f"actor_rollout_ref.model.path={task}/model",
            *COMMON,
            "+actor_rollout_ref.model.override_config.attention_dropout=0.3",
            f"actor_rollout_ref.actor.policy_loss.bounds_record_dir={folder}",
            f"actor_rollout_ref.actor.policy_loss.token_dump_dir={folder}/dump",
        ],
        port=port,
    )
    data = make_mini_batch(actor, seed=7, rows=ROWS)
    before = torch.get_rng_state()
    find, states = actor._bounds_before_training, []

    def find_bounds(data):
        bounds = find(data)
        states.append(torch.get_rng_state())
        return bounds

    actor._bounds_before_training = find_bounds
    run_update(actor, data)
    after = torch.get_rng_state()
    torch.save({"before": before, "after the search": states[0], "after": after}, f"{folder}/states.pt")


def test_the_search_sees_the_dropout_masks_of_training_and_leaves_the_random_state(task, tmp_path):
    mp.spawn(dropout_update, args=(free_port(), str(task), str(tmp_path)))
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    assert not torch.equal(states["before"], states["after"])  # there is dropout
    assert torch.equal(states["before"], states["after the search"])

    config = BAPOConfig(positive_contribution_target=0.45)
    statistics = measure(tmp_path / "dump", config, 3.0).statistics[config.contribution, config.token_weight]
    recorded = json.loads((tmp_path / "rank0.jsonl").read_text())
    assert recorded["source"] == "pass"
    for key, (value,) in without_lengths(search(statistics, config)).items():
        assert value == pytest.approx(float.fromhex(recorded[key]), abs=1e-9), key


def two_updates(rank, port, task, folder):
    """Two updates on mini-batches that need different bounds; their metrics."""
    actor = make_actor(
        [
            f"actor_rollout_ref.model.path={task}/model",
            *COMMON,
            f"actor_rollout_ref.actor.policy_loss.bounds_record_dir={folder}",
            f"actor_rollout_ref.actor.policy_loss.token_dump_dir={folder}/dump",
        ],
        port=port,
    )
    batches = [
        make_mini_batch(actor, seed=seed, rows=ROWS, staleness=staleness) for seed, staleness in ((7, 0.2), (8, 1))
    ]
    metrics = [run_update(actor, batch)[0] for batch in batches]
    values = [[found[f"actor/bapo/clip_{side}"][0].values for side in ("low", "high")] for found in metrics]
    (Path(folder) / "logged.json").write_text(json.dumps(values))


def test_each_update_has_bounds_of_its_own(task, tmp_path):
    mp.spawn(two_updates, args=(free_port(), str(task), str(tmp_path)))
    recorded = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [line["update"] for line in recorded] == [0, 1]
    bounds = [[float.fromhex(line[side]) for side in ("low", "high")] for line in recorded]
    assert bounds[0] != bounds[1]
    config = BAPOConfig(positive_contribution_target=0.45)
    found = search(measure(tmp_path / "dump", config, 3.0).statistics[config.contribution, config.token_weight], config)
    assert bounds == [list(pair) for pair in zip(found["low"], found["high"], strict=True)]
    dumped = list(read_dump(tmp_path / "dump"))
    assert [{int(tokens["update"]) for tokens in micro_batches} for micro_batches in dumped] == [{0}, {1}]
    assert all(tokens["entropy"].min() > 0 for micro_batches in dumped for tokens in micro_batches)
    logged = json.loads((tmp_path / "logged.json").read_text())  # by every micro-batch
    assert [[set(values) for values in pair] for pair in logged] == [[{low}, {high}] for low, high in bounds]


def without_lengths(found):
    """A dump's reader takes its tokens in pieces, and counts responses by the lengths that the dump has."""
    return {key: value for key, value in found.items() if not key.startswith("length_")}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request, task, tmp_path_factory):
    size = request.param
    folder = tmp_path_factory.mktemp(f"updates{size}")
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder)), nprocs=size)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
    for rank, result in enumerate(results):
        for name in CUTS:
            lines = (folder / name / f"rank{rank}.jsonl").read_text().splitlines()
            result[name]["record"] = [json.loads(line) for line in lines]
            result[name]["dump"] = folder / name / "dump"
    return results


def test_every_cut_has_the_same_bounds_loss_and_gradient(ranks):
    for kind, cuts in {
        "whole": ["halves", "single", "dynamic", "dynamic, whole"],
        "gradient, whole": ["gradient, quarters"],
    }.items():
        whole = ranks[0][kind]
        assert 0 < float.fromhex(whole["record"][0]["search_steps"])  # the search had something to do
        for name in cuts:
            cut = ranks[0][name]
            for field in ("low", "high", "search_steps", "saturated"):
                assert cut["record"][0][field] == whole["record"][0][field], (name, field)
            assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6, abs=1e-6)
            torch.testing.assert_close(cut["gradient"], whole["gradient"], rtol=1e-5, atol=1e-5)


def test_all_ranks_hold_bit_identical_bounds(ranks):
    for name in CUTS:
        assert all(rank[name]["record"] == ranks[0][name]["record"] for rank in ranks), name


def test_a_replay_of_the_dumped_tokens_finds_the_same_bounds(ranks):
    config = BAPOConfig(positive_contribution_target=0.45)
    for name in CUTS.keys() - {"micro_batch scope"}:
        definition = replace(config, contribution="gradient" if "gradient" in name else "value")
        statistics = measure(ranks[0][name]["dump"], config, 3.0).statistics[definition.contribution, "rollout_prob"]
        (recorded,) = ranks[0][name]["record"]
        found = search(statistics, definition)
        assert [value.hex() for side in ("low", "high") for value in found[side]] == [recorded["low"], recorded["high"]]
        for key, (value,) in without_lengths(found).items():
            assert value == pytest.approx(float.fromhex(recorded[key]), abs=1e-9), key


def test_one_collective_and_one_pass_an_update(ranks):
    for rank in ranks:
        for name in ("halves", "single", "dynamic", "gradient, quarters"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (1, 1), name
        for name in ("whole", "dynamic, whole", "gradient, whole"):
            assert (rank[name]["collectives"], rank[name]["passes"]) == (1, 0), name
        micro_batches = 4 // len(ranks)
        scope = rank["micro_batch scope"]
        assert (scope["collectives"], scope["passes"], len(scope["record"])) == (micro_batches, 0, micro_batches)


def test_the_record_says_where_the_statistics_came_from(ranks):
    sources = {name: {line["source"] for line in ranks[0][name]["record"]} for name in CUTS}
    in_loss = {"whole", "dynamic, whole", "gradient, whole", "micro_batch scope"}
    assert sources == {name: {"loss"} if name in in_loss else {"pass"} for name in CUTS}


def test_every_path_logs_the_same_metrics(ranks):
    keys = [ranks[0][name]["keys"] for name in CUTS]
    assert len(keys[0]) == 15 and all(other == keys[0] for other in keys)


def test_two_lines_in_verls_own_config_bring_the_same_bounds_and_gradients(ranks):
    for rank in ranks:
        for name, found in rank["stock"].items():
            assert found["record"] == rank[name]["record"], name
            torch.testing.assert_close(found["gradient"], rank[name]["gradient"], rtol=1e-5, atol=1e-7)


def test_a_first_update_that_the_trainer_marked_needs_no_pass(ranks):
    for rank in ranks:
        marked, plain = rank["marked"][True], rank["marked"][False]
        assert (marked["passes"], plain["passes"]) == (0, 1) and marked["collectives"] == plain["collectives"] == 1
        assert marked["passes of 4 updates"] == 3 and plain["passes of 4 updates"] == 4
        assert marked["as one micro-batch"] == marked["values"] and plain["as one micro-batch"] is None
        for name in ("low", "high", "search_steps", "saturated"):
            assert marked["values"][name] == plain["values"][name]
        assert marked["values"]["positive_contribution_start"] == pytest.approx(
            plain["values"]["positive_contribution_start"], rel=1e-5
        )


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
            "updates": [0, 1],
            "trained from": [4],
        }
