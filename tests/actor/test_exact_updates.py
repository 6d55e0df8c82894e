# SPDX-License-Identifier: Apache-2.0
"""The real actor worker has the bounds and weights of a forward before every update, bit for bit.

Conditions of a user's run that these tests have: verl's engine and worker with one and two ranks, FSDP1 and FSDP2,
dropout, dynamic batches, LoRA, fused kernels, KL and entropy terms, several updates and epochs on a batch. They lack:
vLLM in the process and verl's trainer (tests/stack/test_regimes.py), a GPU, NCCL and bfloat16 (tests/gpu).
"""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch
from support.updates import ACTOR, COMMON, DYNAMIC, RANKS, ROWS

CALLS, EPOCHS = 12, 2
UPDATES_PER_CALL = 2 * EPOCHS  # of half a batch each
MODEL = "actor_rollout_ref.model"
DROPOUT = [f"+{MODEL}.override_config.attention_dropout=0.2"]
LORA = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear"]
TERMS = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01"]
CASES = {
    "plain": [],
    "dropout": DROPOUT,
    "dynamic batches": [*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=64"],
    "KL and entropy": TERMS,
    "all of these": [*DROPOUT, *DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=64", *TERMS],
    "LoRA": LORA,
    # The last, because verl patches the model's class for them.
    "fused kernels": [f"{MODEL}.use_fused_kernels=true", f"{MODEL}.use_remove_padding=true"],
}
QUICK = ("all of these",)


def train(actor, batches):
    """Train on wild and calm batches. Returns bounds and kind of each update, and the weights after each call."""
    from verl.utils import tensordict_utils as tu

    torch.manual_seed(5)
    found = {"bounds": [], "kinds": [], "weights": [], "grad_norm": []}
    for number in range(CALLS):
        data = batches[number // 3].copy()  # most calls are like the one before, and every third is quite another
        tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=EPOCHS)
        metrics = tu.get(actor.train_mini_batch(data), "metrics")
        names = ("clip_low", "clip_high", "extra_forward", "redone")
        low, high, forward, redone = (metrics[f"actor/bapo/{name}"] for name in names)  # of each update and rank
        found["bounds"] += zip(low, high, strict=True)
        found["kinds"] += [
            "forward" if f else "redone" if r else "forecast" for f, r in zip(forward, redone, strict=True)
        ]
        weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in actor.engine.module.parameters()]
        found["weights"].append([weight.double().sum().item() for weight in weights])
        found["grad_norm"] += metrics["grad_norm"]
    return found


def updates_of_rank(rank, size, port, task, folder, engine, cases):
    from bapo import BoundsForecaster, Forecast

    forecast = BoundsForecaster.forecast
    results = {}
    for name in cases:
        overrides = [f"{MODEL}.path={task}/model", *COMMON, *engine, *CASES[name]]
        results[name] = []
        for trusted in (None, False, True):  # as in a run; a forward before every update; every forecast followed
            actor = make_actor(overrides, rank, size, port)
            batches = []
            for seed in range(CALLS // 3):
                batch = make_mini_batch(actor, seed, ROWS, rank, size, staleness=0.3 + 0.3 * (seed % 2))
                batch["ref_log_prob"] = batch["old_log_probs"].clone()
                batches.append(batch)
            with pytest.MonkeyPatch.context() as patch:
                if trusted is not None:
                    patch.setattr(
                        BoundsForecaster,
                        "forecast",
                        lambda *args, trusted=trusted: Forecast(forecast(*args).bounds, trusted),
                    )
                results[name].append(train(actor, batches))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))


def run_cases(task, folder, ranks, cases):
    size, engine = ranks
    mp.spawn(updates_of_rank, args=(size, free_port(), str(task), str(folder), engine, cases), nprocs=size)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def assert_updates_are_exact(results, name):
    for rank in results:
        found, with_forwards, with_forecasts = rank[name]
        for part in ("bounds", "weights", "grad_norm"):
            assert found[part] == with_forwards[part] == with_forecasts[part], part
        assert set(with_forwards["kinds"]) == {"forward"} and set(with_forecasts["kinds"]) == {"forecast", "redone"}
        assert {"forecast", "forward"} <= set(found["kinds"])
        assert len(found["kinds"]) == CALLS * UPDATES_PER_CALL * len(results)
        assert len(set(map(tuple, found["bounds"]))) > 3
        for part in ("bounds", "kinds", "grad_norm"):  # the weights of FSDP1 are those of the rank's shard
            assert found[part] == results[0][name][0][part]


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_end_with_the_weights_of_a_forward_before_every_update(name, task, tmp_path):
    assert_updates_are_exact(run_cases(task, tmp_path, (2, []), [name]), name)


@pytest.fixture(scope="module", params=RANKS)
def results(request, task, tmp_path_factory):
    return run_cases(task, tmp_path_factory.mktemp("exact"), request.param, list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_and_bounds_are_those_of_a_forward_before_every_update(results, name):
    assert_updates_are_exact(results, name)
