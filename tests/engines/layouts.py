# SPDX-License-Identifier: Apache-2.0
"""Updates with ``bound_scope=previous_batch`` in layouts of verl's Megatron engine, beside FSDP's, as a table.

    .venv/bin/python tests/engines/layouts.py [--only WORD] [--folder FOLDER]

Every layout makes the same three updates from the same weights and tokens, and then one with a bad advantage in its
last data-parallel share. The first run installs two packages into ``.megatron/``. ``tests/support/megatron.py`` says
what this shows and what not. Each rank leaves ``<layout>/rank<N>.json`` and its output in the folder.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":  # the tests import the names alone, and no other test may find Megatron
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / ".megatron")]
    os.environ.update(VERL_PLATFORM="cpu", OMP_NUM_THREADS="1")  # before anything imports verl

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from support.actor import free_port, make_actor, make_mini_batch  # noqa: E402
from support.megatron import ACTOR, MEGATRON, install_packages, make_megatron_actor  # noqa: E402
from support.updates import read_record  # noqa: E402

ROWS, BATCHES, LIMIT_S = 16, 3, 1800
LOSS = f"{ACTOR}.policy_loss"
LOSS_OPTIONS = {"positive_contribution_target": 0.42}
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true"]
PADDED = ["actor_rollout_ref.model.use_remove_padding=false"]


def parallel(**sizes):
    """Overrides for parallel sizes: ``pipeline=2`` is ``pipeline_model_parallel_size=2``."""
    names = {"context": "context_parallel_size"}  # the others have "model" in them
    return [f"{MEGATRON}.{names.get(name, f'{name}_model_parallel_size')}={size}" for name, size in sizes.items()]


# Ranks and overrides.
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
EXACT_SCOPE = "2 stages, exact scope"


def loss_options(folder, scope="previous_batch"):
    """The three lines of a run with verl's own config, a target, and a record of the bounds."""
    values = {
        "loss_mode": "bapo",
        "_target_": "recipe.bapo.policy_loss.BAPOPolicyLossConfig",
        "bound_scope": scope,
        **LOSS_OPTIONS,
        "bounds_record_dir": f"'{folder}/record'",
        "token_dump_dir": f"'{folder}/dump'",
    }
    return [f"++{LOSS}.{name}={value}" for name, value in values.items()]


def reference_of(name):
    """The reference with a layout's model: Qwen2, or Qwen3 with a mixture of experts."""
    return "FSDP, experts" if "expert" in name else "FSDP"


def make_model(folder, experts):
    """A random model with its tokenizer."""
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
    """The model, the batches, and FSDP's updates on them."""
    make_model(folder / name / "model", experts="expert" in name)
    options = [
        f"actor_rollout_ref.model.path='{folder / name}/model'",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    actor = make_actor([*options, *loss_options(folder / name)], rank, size, port, stock=True)
    for number in range(BATCHES):
        torch.save(make_mini_batch(actor, seed=number + 1, rows=ROWS), folder / name / f"batch{number}.pt")
    return {"updates": make_updates(actor, folder / name)}


def make_layout(rank, size, port, folder, name):
    """The updates of a rank in a layout, and what it raises for a bad advantage."""
    inputs = folder / reference_of(name)
    overrides = [f"actor_rollout_ref.model.path='{inputs}/model'", *LAYOUTS[name][1], *loss_options(folder / name)]
    config_name = "bapo_trainer" if "our config" in name else "ppo_megatron_trainer"
    actor = make_megatron_actor(overrides, rank, size, port, config_name)
    return {"updates": make_updates(actor, inputs), "bad": bad_update(actor, inputs)}


def refuse_exact_scope(rank, size, port, folder, name):
    """What a rank raises when it makes an actor with the default scope."""
    overrides = [f"actor_rollout_ref.model.path={folder}/FSDP/model", *parallel(pipeline=2)]
    try:
        make_megatron_actor([*overrides, *loss_options(folder / name, "mini_batch")], rank, size, port)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


def batch_of_rank(actor, folder, number):
    """This rank's share of a batch, as verl's trainer hands it to ``train_mini_batch``."""
    from verl.utils import tensordict_utils as tu

    share, shares = actor.engine.get_data_parallel_rank(), actor.engine.get_data_parallel_size()
    data = torch.load(folder / f"batch{number}.pt", weights_only=False)
    data = tu.index_select_tensor_dict(data, torch.arange(ROWS).chunk(shares)[share])
    tu.assign_non_tensor(data, mini_batch_size=ROWS, global_batch_size=ROWS, epochs=1)
    return data


def make_updates(actor, folder):
    """Loss and gradient norm of one update on each batch; None on ranks that have no outputs."""
    from verl.utils import tensordict_utils as tu

    updates = []
    for number in range(BATCHES):
        output = actor.train_mini_batch(batch_of_rank(actor, folder, number))
        metrics = None if output is None else tu.get(output, "metrics")
        updates.append(metrics and {name: metrics[name][0] for name in ("loss", "grad_norm")})
    return updates


def bad_update(actor, folder):
    """The error of an update with an infinite advantage in the last share, and whether it changed this rank's state."""
    data, before, actor.token_dump_dir = batch_of_rank(actor, folder, 0), state_of(actor), None
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
    """Copies of the weights and the optimizer's tensors."""
    optimizer = actor.engine.optimizer
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    tensors = [parameter for chunk in actor.engine.module for parameter in chunk.parameters()]
    tensors += [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def run_rank(rank, size, port, function, folder, name):
    """Call a function on a rank and leave its result in ``<name>/rank<N>.json``, its output beside it."""
    log = os.open(folder / name / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        result = function(rank, size, port, folder, name)
    except BaseException:
        traceback.print_exc()
        raise
    (folder / name / f"rank{rank}.json").write_text(json.dumps(result))


def run_ranks(function, folder, name, size) -> list[dict]:
    """The results of all ranks; each is a fork of this process, which has imported everything.

    Raises:
        RuntimeError: a rank failed, or they take more than ``LIMIT_S`` seconds.
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
    """Bounds, rho, loss and gradient norm of each update, and whether all ranks have the same of them, bit for bit."""
    records = [read_record(folder / name / "record", rank)[:BATCHES] for rank in range(len(ranks))]
    sources = [rank["updates"] for rank in ranks if rank["updates"][0] is not None]
    return {
        "ranks": len(ranks),
        "updates": [
            {value: float.fromhex(line[value]) for value in ("low", "high", "positive_contribution")} | source
            for line, source in zip(records[0], sources[0], strict=True)
        ],
        "equal": all(record == records[0] for record in records) and all(source == sources[0] for source in sources),
        "bad": [rank["bad"] for rank in ranks if "bad" in rank],
    }


def run_layouts(folder: Path, word: str = "") -> dict:
    """Results by name of all layouts whose name contains ``word``, and of FSDP; prints a table."""
    results = {}
    print("| layout | ranks | update | bounds | rho | loss | gradient norm | all ranks equal |\n|" + "---|" * 8)

    def run(function, name, size):
        results[name] = results_of(folder, name, run_ranks(function, folder, name, size))
        print_rows(name, results[name])

    for name, (size, _) in LAYOUTS.items():
        if word in name:
            if reference_of(name) not in results:
                run(make_reference, reference_of(name), 1)
            run(make_layout, name, size)
    if word in EXACT_SCOPE:
        results[EXACT_SCOPE] = run_ranks(refuse_exact_scope, folder, EXACT_SCOPE, 2)
    (folder / "results.json").write_text(json.dumps(results))
    return results


def print_rows(name, result):
    for number, row in enumerate(result["updates"]):
        bounds = f"({row['low']:g}, {row['high']:g})"
        values = f"{row['positive_contribution']:.9f} | {row['loss']:.7f} | {row['grad_norm']:.6f}"
        print(f"| {name} | {result['ranks']} | {number} | {bounds} | {values} | {result['equal']} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="layouts whose name contains this")
    parser.add_argument("--folder", type=Path, help="for what the ranks write (default: a temporary one)")
    arguments = parser.parse_args()
    install_packages()
    # Once for all ranks, and before the rig replaces torch.cuda.Stream, which vLLM reads when it is imported.
    import verl.workers.engine_workers  # noqa: F401

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="layouts-"))
    print(f"Everything the ranks write: {folder}")
    run_layouts(folder, arguments.only)


if __name__ == "__main__":
    main()
