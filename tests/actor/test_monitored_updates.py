# SPDX-License-Identifier: Apache-2.0
"""The monitor on the real actor worker: verl's updates bit for bit, and the bounds of a literal search."""

import pyarrow.parquet as pq
import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch
from support.capture import bounds_of, capture_to, read_updates, tokens_of_updates
from support.oracle import entropy_covariance, sequential_search
from support.updates import DYNAMIC, LOSS, MICRO_BATCH, RANKS, ROWS

from bapo import BAPOConfig

OURS = [f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig", f"++{LOSS}.positive_contribution_target=0.45"]
LOSSES = {
    "vanilla": [],
    "gspo": ["actor_rollout_ref.actor.clip_ratio_high=0.01", "actor_rollout_ref.actor.clip_ratio_low=0.01"],
    "cispo": [],
}
CUTS = {
    "halves": [f"{MICRO_BATCH}=4"],
    "single": [f"{MICRO_BATCH}=1"],
    "dynamic": [*DYNAMIC, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"],
}


BAD = {"old_log_probs": float("-inf"), "advantages": float("nan")}


def is_repeatable(metric):
    """Whether a metric does not depend on the time that an update takes, or on the memory of the machine."""
    return metric != "mfu" and "perf/" not in metric


def spoil(data, field):
    """Set a field of one token to a value that no loss can use."""
    rows = [row.clone() for row in data[field].unbind()]
    rows[1][1] = BAD[field]
    jagged = data[field].is_nested
    data[field] = torch.nested.as_nested_tensor(rows, layout=torch.jagged) if jagged else torch.stack(rows)


def train(overrides, task, rank, size, port, engine, bad=None):
    """Make two updates on one batch from verl's own config. Returns its metrics and weights, and the worker's class."""
    from verl.utils import tensordict_utils as tu

    common = [
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    actor = make_actor([*common, *engine, *overrides], rank, size, port)
    data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=size)
    if bad is not None:
        spoil(data, bad)
    tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=1)
    output = actor.train_mini_batch(data)
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in actor.engine.module.parameters()]
    return {
        "metrics": {name: values for name, values in tu.get(output, "metrics").items() if is_repeatable(name)},
        "weights": torch.cat([weight.flatten() for weight in weights]),
        "worker": type(actor).__name__,
    }


def updates_of_rank(rank, size, port, task, folder, engine):
    from verl.workers.engine_workers import ActorRolloutRefWorker

    of_verl = getattr(ActorRolloutRefWorker, "actor_worker_cls", None)  # 0.8.0 names the class in its code
    results = {}

    def train_stock(*arguments):
        if of_verl is not None:  # a config of ours has replaced it
            ActorRolloutRefWorker.actor_worker_cls = of_verl
        return train(*arguments)

    for loss, settings in LOSSES.items():
        mode = [f"{LOSS}.loss_mode={loss}", f"{MICRO_BATCH}=4", *settings]
        results[f"{loss}, verl"] = train_stock(mode, task, rank, size, port, engine)
        tokens = f"++{LOSS}.token_dir={folder}/tokens/{loss}"
        results[f"{loss}, monitored"] = train([*mode, *OURS, tokens], task, rank, size, port, engine)
    for bad in BAD:
        results[f"{bad} spoilt, verl"] = train_stock([f"{MICRO_BATCH}=4"], task, rank, size, port, engine, bad)
        results[f"{bad} spoilt, monitored"] = train([f"{MICRO_BATCH}=4", *OURS], task, rank, size, port, engine, bad)
    for name, cut in CUTS.items():
        capture_to(f"{folder}/{name}")
        results[name] = train([*cut, *OURS], task, rank, size, port, engine)
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, task, tmp_path_factory):
    size, engine = request.param
    folder = tmp_path_factory.mktemp(f"monitored{size}")
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder), engine), nprocs=size)
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_metrics_are_verls_bit_for_bit(ranks, loss):
    for rank in ranks[1]:
        of_verl, monitored = rank[f"{loss}, verl"], rank[f"{loss}, monitored"]
        assert (of_verl["worker"], monitored["worker"]) == ("TrainingWorker", "BAPOTrainingWorker")
        assert torch.equal(of_verl["weights"], monitored["weights"])
        own = {name: values for name, values in monitored["metrics"].items() if not name.startswith("actor/bapo/")}
        assert own == of_verl["metrics"]
        assert ("actor/bapo/own_clipfrac_positive" in monitored["metrics"]) == (loss in ("vanilla", "gspo"))
        assert ("actor/bapo/own_capfrac_positive" in monitored["metrics"]) == (loss == "cispo")


@pytest.mark.parametrize("loss", LOSSES)
def test_each_rank_writes_the_tokens_of_its_responses(ranks, loss):
    folder, results = ranks
    responses = set(range(ROWS // 2 // len(results)))
    for rank, of_rank in enumerate(results):
        paths = (folder / "tokens" / loss).glob(f"*-rank{rank:04d}.parquet")
        updates = [pq.read_table(path).to_pandas() for path in sorted(paths)]
        assert [set(rows["response"]) for rows in updates] == [responses] * 2
        if len(results) == 1:  # with two ranks the logged share is that of both
            logged = f"actor/bapo/own_{'cap' if loss == 'cispo' else 'clip'}frac"
            for sign, name in ((1, "positive"), (-1, "negative")):
                shares = [rows["cut"][rows["advantage"] * sign > 0].mean() for rows in updates]
                assert shares == pytest.approx(of_rank[f"{loss}, monitored"]["metrics"][f"{logged}_{name}"])


@pytest.mark.parametrize("bad", BAD)
def test_what_it_cannot_use_leaves_verls_run_as_it_is(ranks, bad):
    for rank in ranks[1]:
        of_verl, monitored = (rank[f"{bad} spoilt, {who}"]["weights"] for who in ("verl", "monitored"))
        torch.testing.assert_close(monitored, of_verl, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cut", CUTS)
def test_the_bounds_are_those_of_a_literal_search_over_all_ranks(ranks, cut):
    folder, results = ranks
    config = BAPOConfig(positive_contribution_target=0.45)
    literal = [sequential_search(*tokens, config, 3.0)[:2] for tokens in tokens_of_updates(folder / cut)]
    for rank in range(len(results)):
        updates = read_updates(folder / cut, rank)
        assert [bounds_of(update) for update in updates] == literal
        assert all(part["bounds"] is None for update in updates for part in update["micro_batches"])
    assert literal[0] != literal[1] and len(literal) == 2
    for tokens, update in zip(tokens_of_updates(folder / cut), read_updates(folder / cut), strict=True):
        covariance = entropy_covariance(*tokens, 0.8, 1.2, 3.0)
        assert update["logged"]["entropy_covariance"] == pytest.approx(covariance, rel=1e-5)
