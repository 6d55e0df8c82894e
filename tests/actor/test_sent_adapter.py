# SPDX-License-Identifier: Apache-2.0
"""What verl's engines send of a LoRA adapter after an update, and what the worker says of it.

The sends are those of verl's ``update_weights``: in ``sync`` the adapter, in ``separate_async`` whatever the engine
gives without arguments. The rollout servers that would get the weights are not here.
"""

import json

import pytest
import torch
import torch.multiprocessing as mp
from support.actor import FSDP1, TWO_LINES, free_port, make_actor, make_mini_batch
from support.families import ACTOR, LORA, MODEL

MERGED = f"{MODEL}.lora.merge=true"
CASES = {  # the overrides, how verl asks the engine for weights, and whether the servers learn
    "FSDP1, sync": ([FSDP1], dict(base_sync_done=True), True),
    "FSDP2, sync": ([], dict(base_sync_done=True), True),
    "FSDP2, separate_async": ([], {}, False),
    "FSDP2, separate_async, merged": ([MERGED], {}, True),
}


def make_updates(_, name, task, folder):
    """Make an update, send the weights, and make another. Writes how many tensors were sent, and how many changed."""
    from verl.utils import tensordict_utils as tu

    overrides, how, _ = CASES[name]
    rows = f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8"
    options = [f"{MODEL}.path={task}/model", f"{ACTOR}.optim.lr=0.05", *TWO_LINES, *rows, *LORA, *overrides]
    actor = make_actor(options, port=free_port())
    sent = []
    for seed in (1, 2):
        data = make_mini_batch(actor, seed=seed, rows=8)
        tu.assign_non_tensor(data, mini_batch_size=8, epochs=1)
        weights, _ = actor.engine.get_per_tensor_param(**how)
        sent.append({name: tensor.clone() for name, tensor in weights})
        actor.train_mini_batch(data)
    changed = sum(not torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
    (folder / "sent.json").write_text(json.dumps({"tensors": len(sent[1]), "changed": changed}))


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_is_sent_or_the_worker_says_so(task, tmp_path, capfd, name):
    mp.spawn(make_updates, args=(name, str(task), tmp_path), nprocs=1)
    sent, learns = json.loads((tmp_path / "sent.json").read_text()), CASES[name][2]
    assert sent["tensors"] > 20 and (sent["changed"] > 0) == learns
    told = capfd.readouterr().err.count("BAPO: this run trains a LoRA adapter, but none of its weights were among")
    assert told == (not learns)
