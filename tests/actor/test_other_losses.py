# SPDX-License-Identifier: Apache-2.0
"""With another loss our worker makes verl's updates bit for bit."""

import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch

ROWS = 8
CUT = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]


def train(task):
    """Make two updates on one batch with ``train_mini_batch``. Returns the actor, its metrics and its weights."""
    from verl.utils import tensordict_utils as tu

    actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *CUT], port=free_port())
    data = make_mini_batch(actor, seed=7, rows=ROWS)
    tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=1)
    metrics = tu.get(actor.train_mini_batch(data), "metrics")
    weights = {name: value.full_tensor().clone() for name, value in actor.engine.module.state_dict().items()}
    torch.distributed.destroy_process_group()
    return actor, sorted(metrics), weights


def runs_of_vanilla(rank, task, folder):
    from recipe.bapo.hook.install import install_worker
    from recipe.bapo.hook.worker import BAPOTrainingWorker

    of_verl = train(task)  # whose loss is vanilla by default
    install_worker()
    of_ours = train(task)
    assert [isinstance(actor, BAPOTrainingWorker) for actor, *_ in (of_verl, of_ours)] == [False, True]
    torch.save([found for _, *found in (of_verl, of_ours)], f"{folder}/runs.pt")


def test_another_loss_ends_with_the_weights_of_verls_worker_bit_for_bit(task, tmp_path):
    mp.spawn(runs_of_vanilla, args=(str(task), str(tmp_path)))
    (names, weights), (our_names, our_weights) = torch.load(tmp_path / "runs.pt")
    assert all(torch.equal(our_weights[name], weight) for name, weight in weights.items())
    assert our_names == names
