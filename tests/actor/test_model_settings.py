# SPDX-License-Identifier: Apache-2.0
"""With each setting for larger models (docs/larger_models.md), the bounds are the same in every scope."""

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import TWO_LINES, free_port, make_actor, make_mini_batch, run_update
from support.capture import bounds_of, bounds_used, capture_to, read_updates

ROWS = 16
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
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


def scopes_of(name):
    """Return the scopes of a setting. Other micro-batches have other bounds in the scope of one."""
    return ("mini_batch", "micro_batch") if name in PADDED else ("mini_batch",)


def update_with_settings(_, names, task, folder):
    for name, setting in ((name, SETTINGS[name]) for name in names):
        for scope in scopes_of(name):
            actor = make_actor(
                [
                    f"{MODEL}.path={task}/model",
                    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
                    *TWO_LINES,
                    f"++{ACTOR}.policy_loss.contribution=gradient",
                    f"++{ACTOR}.policy_loss.positive_contribution_target=0.56",
                    f"++{ACTOR}.policy_loss.bound_scope={scope}",
                    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
                    *setting,
                ],
                port=free_port(),
            )
            data = make_mini_batch(actor, seed=3, rows=ROWS)
            capture_to(f"{folder}/{name}/{scope}")
            run_update(actor, data)
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def updates(task, tmp_path_factory):
    """Return the updates by setting and scope, one each."""
    folder = tmp_path_factory.mktemp("settings")
    # A process for each kind, because verl patches the model's class for remove-padding and fused kernels.
    patched = {name: [word for word in ("remove-padding", "fused") if word in name] for name in SETTINGS}
    for kind in ([], ["remove-padding"], ["fused"], ["remove-padding", "fused"]):
        names = [name for name in SETTINGS if patched[name] == kind]
        mp.spawn(update_with_settings, args=(names, str(task), str(folder)), nprocs=1)
    return {(name, scope): read_updates(folder / name / scope) for name in SETTINGS for scope in scopes_of(name)}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_mini_batchs_bounds_are_the_same_with_every_setting(updates, name):
    ((plain,), (found,)) = updates["none", "mini_batch"], updates[name, "mini_batch"]
    assert 0 < plain["logged"]["search_steps"] < 51  # the search stopped between start and end
    assert set(bounds_used(found)) == {bounds_of(found)}
    for field in ("clip_low", "clip_high", "search_steps"):
        assert found["logged"][field] == plain["logged"][field]
    for field in ("positive_contribution_start", "positive_contribution"):
        assert found["logged"][field] == pytest.approx(plain["logged"][field], abs=1e-6)


@pytest.mark.parametrize("name", PADDED)
def test_each_micro_batchs_bounds_are_the_same_with_every_setting(updates, name):
    (plain,), (found,) = (updates[setting, "micro_batch"] for setting in ("none", name))
    assert len(bounds_used(plain)) == ROWS // 4 and len(set(bounds_used(plain))) > 1
    assert bounds_used(found) == bounds_used(plain)
