# SPDX-License-Identifier: Apache-2.0
"""Compare BAPO's updates in layouts of verl's Megatron engine with FSDP's, in a table.

    .venv/bin/python tests/engines/layouts.py [--only WORD] [--folder FOLDER]

A layout is a way to divide the work among ranks. Every layout makes the same three updates from the same weights and
tokens, once with a forward before each and once with wrong forecasts, so that each is redone. Then it makes one with an
infinite advantage in the share of its last data-parallel rank. The first run installs two packages into ``.megatron/``.
``tests/support/megatron.py`` says what this shows and what not. Each rank writes its results to
``<layout>/rank<N>.json`` and what it prints to ``<layout>/rank<N>.log``.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":  # not when the tests import the names: no other test may find Megatron
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / ".megatron")]
    os.environ.update(VERL_PLATFORM="cpu", OMP_NUM_THREADS="1")  # before anything imports verl

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from support.actor import free_port, make_actor, make_mini_batch  # noqa: E402
from support.capture import bounds_of, bounds_used, capture_to, read_updates  # noqa: E402
from support.megatron import ACTOR, MEGATRON, install_packages, make_megatron_actor  # noqa: E402

ROWS, BATCHES, LIMIT_S = 16, 3, 1800
LOSS = f"{ACTOR}.policy_loss"
LOSS_OPTIONS = {"positive_contribution_target": 0.42}
KINDS = {"forward": False, "redone": True}  # of updates, by whether every forecast is trusted
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true"]
PADDED = ["actor_rollout_ref.model.use_remove_padding=false"]


def parallel(**sizes):
    """Return the overrides for parallel sizes: ``pipeline=2`` sets ``pipeline_model_parallel_size=2``."""
    names = {"context": "context_parallel_size"}  # the others have "model" in them
    return [f"{MEGATRON}.{names.get(name, f'{name}_model_parallel_size')}={size}" for name, size in sizes.items()]


# By name: the number of ranks, and the overrides.
LAYOUTS = {
    "1 rank": (1, []),
    "2 stages": (2, parallel(pipeline=2)),
    "2 stages, padded": (2, [*parallel(pipeline=2), *PADDED]),
    "2 stages, dynamic": (2, [*parallel(pipeline=2), *DYNAMIC]),
    "2 stages, our config": (2, parallel(pipeline=2)),
    "2 x 2 virtual stages": (2, parallel(pipeline=2, virtual_pipeline=2)),
    "2 x 2 virtual stages, dynamic": (2, [*parallel(pipeline=2, virtual_pipeline=2), *DYNAMIC]),
    "2 tensor ranks": (2, parallel(tensor=2)),
    "2 context ranks": (2, parallel(context=2)),
    "2 data-parallel": (2, []),
    "2 data-parallel x 2 stages": (4, parallel(pipeline=2)),
    "2 tensor ranks x 2 stages": (4, parallel(tensor=2, pipeline=2)),
    "2 expert ranks": (2, parallel(expert=2)),
}
# Without a counterpart on FSDP. In the first each pass changes the bias of the router, in the second random generators.
ALONE = {
    "2 expert ranks, bias": (
        2,
        [
            *parallel(expert=2),
            f"+{TRANSFORMER}.moe_router_enable_expert_bias=true",
            f"+{TRANSFORMER}.moe_router_score_function=sigmoid",
            f"+{TRANSFORMER}.moe_router_bias_update_rate=0.5",
        ],
    ),
    "2 tensor ranks, dropout": (2, [*parallel(tensor=2), f"+{TRANSFORMER}.hidden_dropout=0.2"]),
}
MONITOR = {
    "2 stages, verl's loss": [],
    "2 stages, monitored": [f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"],
}
SPOILED = "spoiled gradient"


def loss_options(**options):
    """Return the overrides that add BAPO to verl's own config, with a target."""
    values = {
        "loss_mode": "bapo",
        "_target_": "recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        **LOSS_OPTIONS,
        **options,
    }
    return [f"++{LOSS}.{name}={value}" for name, value in values.items()]


def fixed_options(low, high):
    """Return the overrides with which both bounds are fixed."""
    sides = {"lower": low, "upper": high}
    return loss_options(**{f"ratio_{side}_{end}": bound for side, bound in sides.items() for end in ("start", "max")})


def trust_forecasts(trusted):
    """Have every forecast of this process be trusted or not, and every trusted one be wrong."""
    from bapo import BoundsForecaster, Forecast, search_clip_bounds

    def forecast(forecaster, own, first):
        # With every ratio 1 and this target the search ends at the start or the end, where no exact search ends here.
        return Forecast(search_clip_bounds(own, forecaster.config), trusted)

    BoundsForecaster.forecast = forecast


def reference_of(name):
    """Return the name of the FSDP reference for a layout's model: Qwen2, or Qwen3 with a mixture of experts."""
    return "FSDP, experts" if "expert" in name else "FSDP"


def make_model(folder, experts):
    """Write a random model with its tokenizer: Qwen2, or with ``experts`` Qwen3 with a mixture of experts."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from scripts.example_task import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    settings = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    settings |= dict(num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=False)
    settings |= dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    if experts:
        routing = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, head_dim=8)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **routing))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_reference(rank, size, port, folder, name):
    """Write the model and the batches, and return the results of FSDP's updates on them."""
    make_model(folder / name / "model", experts="expert" in name)
    options = [
        f"actor_rollout_ref.model.path='{folder / name}/model'",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    trust_forecasts(False)
    actor = make_actor([*options, *loss_options()], rank, size, port)
    for number in range(BATCHES):
        torch.save(make_mini_batch(actor, seed=number + 1, rows=ROWS), folder / name / f"batch{number}.pt")
    return {"updates": make_updates(actor, folder / name, folder / name)}


def make_layout(rank, size, port, folder, name):
    """Make the updates of a rank in a layout. Returns their results, and those of ``bad_update``."""
    layout, _, kind = name.rpartition(": ")
    inputs = folder / reference_of(name)
    trust_forecasts(KINDS[kind])
    overrides = [f"actor_rollout_ref.model.path='{inputs}/model'", *{**LAYOUTS, **ALONE}[layout][1], *loss_options()]
    config_name = "bapo_trainer" if "our config" in name else "ppo_megatron_trainer"
    actor = make_megatron_actor(overrides, rank, size, port, config_name)
    return {"updates": make_updates(actor, inputs, folder / name), "bad": bad_update(actor, inputs)}


def make_fixed(rank, size, port, folder, name):
    """Make the first update of a layout with fixed bounds: those that its redone update found."""
    layout, _, _ = name.rpartition(": ")
    bounds = bounds_of(read_updates(folder / f"{layout}: redone" / "capture", rank)[0])
    inputs = folder / reference_of(name)
    overrides = [f"actor_rollout_ref.model.path='{inputs}/model'", *{**LAYOUTS, **ALONE}[layout][1]]
    actor = make_megatron_actor([*overrides, *fixed_options(*bounds)], rank, size, port)
    return {"updates": make_updates(actor, inputs, folder / name, batches=1)}


def make_with_verls_loss(rank, size, port, folder, name):
    """Make the updates of a rank with verl's ``vanilla`` loss, monitored or not. Returns a hash of its weights, too."""
    overrides = [f"actor_rollout_ref.model.path={folder}/FSDP/model", *parallel(pipeline=2), *MONITOR[name]]
    actor = make_megatron_actor(overrides, rank, size, port)
    return {"updates": make_updates(actor, folder / "FSDP", folder / name)}


def make_spoiled(rank, size, port, folder, name):
    """Make a monitored update whose gradient is NaN. Returns what is logged of it, and whether weights are finite."""
    from support.spoil import with_nan_gradient

    from verl.utils import tensordict_utils as tu

    monitor = MONITOR["2 stages, monitored"]
    actor = make_megatron_actor([f"actor_rollout_ref.model.path={folder}/FSDP/model", *monitor], rank, size, port)
    actor.loss_fn = with_nan_gradient(actor.loss_fn)
    metrics = tu.get(actor.train_mini_batch(batch_of_rank(actor, folder / "FSDP", 0)), "metrics")
    weights = [weight for chunk in actor.engine.module for weight in chunk.parameters()]
    finite = all(weight.isfinite().all().item() for weight in weights)
    logged = {"actor/grad_norm": metrics["grad_norm"][0], "actor/bapo/skipped": metrics["actor/bapo/skipped"][0]}
    return {"logged": logged, "weights are finite": finite}


def batch_of_rank(actor, folder, number):
    """Load this rank's share of a batch, as verl's trainer hands it to ``train_mini_batch``."""
    from verl.utils import tensordict_utils as tu

    share, shares = actor.engine.get_data_parallel_rank(), actor.engine.get_data_parallel_size()
    data = torch.load(folder / f"batch{number}.pt", weights_only=False)
    data = tu.index_select_tensor_dict(data, torch.arange(ROWS).chunk(shares)[share])
    tu.assign_non_tensor(data, mini_batch_size=ROWS, global_batch_size=ROWS, epochs=1)
    return data


def make_updates(actor, inputs, folder, batches=BATCHES):
    """Make one update on each batch, captured to a folder.

    Returns of each the loss and gradient norm, None on ranks without outputs, and a hash of this rank's state after it.
    """
    from verl.utils import tensordict_utils as tu

    capture_to(folder / "capture")
    updates = []
    for number in range(batches):
        output = actor.train_mini_batch(batch_of_rank(actor, inputs, number))
        metrics = {} if output is None else tu.get(output, "metrics")
        found = {name: metrics[name][0] for name in ("loss", "grad_norm") if name in metrics}
        updates.append(found | {"state": hash_of(state_of(actor))})
    return updates


def hash_of(tensors):
    bytes_of = [getattr(t, "to_local", lambda t=t: t)().flatten().view(torch.uint8).numpy().tobytes() for t in tensors]
    return hashlib.sha256(b"".join(bytes_of)).hexdigest()


def bad_update(actor, folder):
    """Make an update with an infinite advantage in the share of the last data-parallel rank.

    Returns the error that it raised, and whether weights and optimizer of this rank are unchanged.
    """
    data, before = batch_of_rank(actor, folder, 0), state_of(actor)
    if actor.engine.get_data_parallel_rank() == actor.engine.get_data_parallel_size() - 1:
        rows = [row.clone() for row in data["advantages"].unbind()]
        rows[1][1] = torch.inf
        data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    try:
        actor.train_mini_batch(data)
        error = "none"
    except ValueError as raised:
        error = str(raised)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, state_of(actor), strict=True))
    return {"error": error, "unchanged": unchanged}


def state_of(actor):
    """Copy the weights, the buffers (such as the router's bias and counts) and the optimizer's tensors."""
    engine = actor.engine
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    tensors = [tensor for chunk in chunks for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers())]
    optimizers = [getattr(part, "optimizer", part) for part in parts]
    tensors += [value for one in optimizers for state in one.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel()]


def run_rank(rank, size, port, function, folder, name):
    """Call a function on a rank. Its result goes to ``<name>/rank<N>.json``, its output to ``<name>/rank<N>.log``."""
    log = os.open(folder / name / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        result = function(rank, size, port, folder, name)
    except BaseException:
        traceback.print_exc()
        raise
    (folder / name / f"rank{rank}.json").write_text(json.dumps(result))


def run_ranks(function, folder, name, size) -> list[dict]:
    """Call a function on all ranks and return their results.

    Each rank is a fork of this process, which has imported everything.

    Raises:
        torch.multiprocessing.ProcessException: a rank failed.
        RuntimeError: the ranks take more than ``LIMIT_S`` seconds.
    """
    (folder / name).mkdir(parents=True)
    arguments = (size, free_port(), function, folder, name)
    ranks = mp.start_processes(run_rank, arguments, nprocs=size, join=False, start_method="fork")
    deadline = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=5):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name}: the ranks did not end in {LIMIT_S} s")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
    return [json.loads((folder / name / f"rank{rank}.json").read_text()) for rank in range(size)]


def results_of(folder, name, ranks) -> dict:
    """Return bounds, rho, loss and gradient norm of each update, and whether these are bit-identical on all ranks.

    The bounds that each loss got in the last pass of an update have to be those that its rank logged.
    """
    captured = [read_updates(folder / name / "capture", rank)[:BATCHES] for rank in range(len(ranks))]
    logged = [[update["logged"] for update in of_rank] for of_rank in captured]
    used = all(set(bounds_used(update)) <= {bounds_of(update)} for of_rank in captured for update in of_rank)
    sources = [
        [update | {"state": None} for update in rank["updates"]] for rank in ranks if "loss" in rank["updates"][0]
    ]
    values = ("clip_low", "clip_high", "positive_contribution", "extra_forward", "redone")
    return {
        "ranks": len(ranks),
        "updates": [
            {value: line[value] for value in values} | source
            for line, source in zip(logged[0], sources[0], strict=True)
        ],
        "equal": used
        and all(of_rank == logged[0] for of_rank in logged)
        and all(source == sources[0] for source in sources),
        "bad": [rank["bad"] for rank in ranks if "bad" in rank],
        "states": [[update["state"] for update in rank["updates"]] for rank in ranks],
    }


def run_layouts(folder: Path, word: str = "") -> dict:
    """Run all layouts whose name contains ``word``, and FSDP. Prints a table and returns the results by name."""
    results = {}
    print("| layout | ranks | update | bounds | rho | loss | gradient norm | all ranks equal |\n|" + "---|" * 8)

    def run(function, name, size):
        results[name] = results_of(folder, name, run_ranks(function, folder, name, size))
        print_rows(name, results[name])

    def run_reference(name):
        if reference_of(name) not in results:
            run(make_reference, reference_of(name), 1)

    for name, (size, _) in {**LAYOUTS, **ALONE}.items():
        if word in name:
            run_reference(name)  # it writes the model and the batches
            for kind in KINDS:
                run(make_layout, f"{name}: {kind}", size)
            run(make_fixed, f"{name}: fixed", size)
    for name in MONITOR:
        if word in name:
            run_reference(name)
            ranks = run_ranks(make_with_verls_loss, folder, name, 2)
            results[name] = [rank["updates"] for rank in ranks]
            print(f"\n{name}: weights and optimizer {[rank[-1]['state'][:12] for rank in results[name]]}")
    if word in SPOILED:
        run_reference(SPOILED)
        (results[SPOILED],) = run_ranks(make_spoiled, folder, SPOILED, 1)
        print(f"\n{SPOILED}: {results[SPOILED]}")
    (folder / "results.json").write_text(json.dumps(results))
    return results


def print_rows(name, result):
    for number, row in enumerate(result["updates"]):
        bounds = f"({row['clip_low']:g}, {row['clip_high']:g})"
        values = f"{row['positive_contribution']:.9f} | {row['loss']:.7f} | {row['grad_norm']:.6f}"
        print(f"| {name} | {result['ranks']} | {number} | {bounds} | {values} | {result['equal']} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="run only layouts whose name contains WORD")
    parser.add_argument("--folder", type=Path, help="folder for all files of the ranks (default: a temporary one)")
    arguments = parser.parse_args()
    install_packages()
    # Import this once, before the ranks are forked. It also imports vLLM, which reads torch.cuda.Stream, and
    # tests/support/megatron.py replaces that.
    import verl.workers.engine_workers  # noqa: F401

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="layouts-"))
    print(f"Everything the ranks write: {folder}")
    run_layouts(folder, arguments.only)


if __name__ == "__main__":
    main()
