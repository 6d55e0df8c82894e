# SPDX-License-Identifier: Apache-2.0
"""With untied embeddings, verl's fused kernels make the same update as the logits."""

import importlib

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import TWO_LINES, free_port, make_actor, make_mini_batch, run_update, untie_embeddings
from support.families import ACTOR, FUSED, LORA, MODEL, ROWS
from support.updates import SIZES
from torch.distributed.fsdp import CPUOffloadPolicy

# The default of verl's dataclass: gradients are reduced only after the last micro-batch.
DEFERRED = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"
UPDATES = {"logits": [], "fused": [FUSED], "fused, gradients reduced once": [FUSED, DEFERRED]}
KINDS = {
    "padded": [],
    "remove-padding": [f"{MODEL}.use_remove_padding=true"],
    "LoRA": LORA,
}
CASES = [("padded", 1), ("padded", 2), ("remove-padding", 1), ("remove-padding", 2), ("LoRA", 1)]


def make_updates(rank, size, ports, kind, model, folder):
    """Make one update for each of ``UPDATES``, the fused ones last, because verl patches the model's class for them."""
    for port, (name, setting) in zip(ports, UPDATES.items(), strict=True):
        options = [f"{MODEL}.path={model}", *TWO_LINES, *SIZES, *KINDS[kind], *setting]
        actor = make_actor(options, rank, size, port)
        metrics, gradient = run_update(actor, make_mini_batch(actor, seed=3, rows=ROWS, rank=rank, size=size))
        if rank == 0:
            torch.save({"grad_norm": metrics["grad_norm"], "gradient": gradient}, folder / f"{name}.pt")
        torch.distributed.destroy_process_group()


def compute_reference_log_probs(rank, ports, model, folder):
    """Compute a reference model's log-probs in a process that builds no actor."""
    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    engine.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)  # pinned memory needs a GPU
    libraries = [[], [FUSED, f"{MODEL}.external_lib=recipe.bapo.verl_patches.fused_heads"]]
    for port, name, setting in zip(ports, ("logits", "fused"), libraries, strict=True):
        rows = [f"{MODEL}.path={model}", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", *setting]
        reference = make_actor(rows, port=port, role="ref")
        data = make_mini_batch(reference, seed=3, rows=ROWS, staleness=0.0)
        torch.save(data["old_log_probs"].values(), folder / f"{name}.pt")
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def untied(task, tmp_path_factory):
    """Return the path of the example's model with an untied output layer."""
    return untie_embeddings(task / "model", tmp_path_factory.mktemp("untied") / "model")


@pytest.mark.parametrize("kind, ranks", CASES)
def test_the_gradient_is_that_of_an_update_from_the_logits(kind, ranks, untied, tmp_path):
    ports = [free_port() for _ in UPDATES]
    mp.spawn(make_updates, args=(ranks, ports, kind, str(untied), tmp_path), nprocs=ranks)
    logits, *others = (torch.load(tmp_path / f"{name}.pt") for name in UPDATES)
    assert logits["grad_norm"] > 0.1
    for fused in others:
        assert fused["grad_norm"] == pytest.approx(logits["grad_norm"], rel=1e-6)
        assert (fused["gradient"] - logits["gradient"]).norm() <= 1e-5 * logits["gradient"].norm()


def test_a_reference_model_needs_the_library_that_preflight_names(untied, tmp_path):
    mp.spawn(compute_reference_log_probs, args=([free_port(), free_port()], str(untied), tmp_path), nprocs=1)
    logits, fused = (torch.load(tmp_path / f"{name}.pt") for name in ("logits", "fused"))
    assert logits.std() > 0.1 and torch.allclose(fused, logits, atol=0.05)  # verl computes a reference in bfloat16
