# SPDX-License-Identifier: Apache-2.0
"""With each setting for larger models (docs/larger_models.md), the bounds are the same in every scope."""

import json

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch, run_update

ROWS = 16
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
SCOPES = ("mini_batch", "previous_batch", "micro_batch")
PADDED = {  # split into the same micro-batches as without a setting
    "none": [],
    "offload": [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"],
    "no gradient checkpointing": [f"{MODEL}.enable_gradient_checkpointing=false"],
    "remove-padding": [f"{MODEL}.use_remove_padding=true"],
    "fused kernels": [f"{MODEL}.use_fused_kernels=true"],
    "fused kernels, remove-padding": [f"{MODEL}.use_fused_kernels=true", f"{MODEL}.use_remove_padding=true"],
    "LoRA": [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear"],
}
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=64"]
SETTINGS = {**PADDED, "dynamic batch size": DYNAMIC, "dynamic, remove-padding": [*DYNAMIC, *PADDED["remove-padding"]]}


def update_with_settings(_, names, task, folder):
    for name, setting in ((name, SETTINGS[name]) for name in names):
        for scope in SCOPES:
            actor = make_actor(
                [
                    f"{MODEL}.path={task}/model",
                    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
                    f"{ACTOR}.policy_loss.contribution=gradient",
                    f"{ACTOR}.policy_loss.positive_contribution_target=0.56",
                    f"{ACTOR}.policy_loss.bound_scope={scope}",
                    f"{ACTOR}.policy_loss.bounds_record_dir='{folder}/{name}/{scope}'",
                    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
                    *setting,
                ],
                port=free_port(),
            )
            data = make_mini_batch(actor, seed=3, rows=ROWS)
            run_update(actor, data.copy())
            if scope == "previous_batch":  # repeat the mini-batch, so that it gets the bounds of its own tokens
                actor.updates_on_batch = 0
                actor.scope.next_batch()
                run_update(actor, data)
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def records(task, tmp_path_factory):
    """Return the bounds record by setting and scope, of one update, or of two with ``previous_batch``."""
    folder = tmp_path_factory.mktemp("settings")
    # A process for each kind, because verl patches the model's class for remove-padding and fused kernels.
    patched = {name: [word for word in ("remove-padding", "fused") if word in name] for name in SETTINGS}
    for kind in ([], ["remove-padding"], ["fused"], ["remove-padding", "fused"]):
        names = [name for name in SETTINGS if patched[name] == kind]
        mp.spawn(update_with_settings, args=(names, str(task), str(folder)), nprocs=1)
    return {
        (name, scope): [json.loads(line) for line in (folder / name / scope / "rank0.jsonl").read_text().splitlines()]
        for name in SETTINGS
        for scope in SCOPES
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_the_mini_batchs_bounds_are_the_same_with_every_setting(records, name):
    ((plain,), (found,)) = records["none", "mini_batch"], records[name, "mini_batch"]
    assert 0 < float.fromhex(plain["search_steps"]) < 51  # the search stopped between start and end
    for field in ("low", "high", "search_steps"):
        assert found[field] == plain[field]
    for field in ("positive_contribution_start", "positive_contribution"):
        assert float.fromhex(found[field]) == pytest.approx(float.fromhex(plain[field]), abs=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_next_batch_gets_the_same_bounds_with_every_setting(records, name):
    (plain,), (first, second) = records["none", "mini_batch"], records[name, "previous_batch"]
    assert [float.fromhex(first[side]) for side in ("low", "high")] == [0.6, 1.2]
    for field in ("low", "high", "search_steps"):
        assert second[field] == plain[field]


@pytest.mark.parametrize("name", PADDED)
def test_each_micro_batchs_bounds_are_the_same_with_every_setting(records, name):
    plain, found = records["none", "micro_batch"], records[name, "micro_batch"]
    assert len(plain) == len(found) == ROWS // 4 and len({line["high"] for line in plain}) > 1
    for one, other in zip(plain, found, strict=True):
        assert (one["low"], one["high"]) == (other["low"], other["high"])
