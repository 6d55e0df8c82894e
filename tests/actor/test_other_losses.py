# SPDX-License-Identifier: Apache-2.0
"""With another loss our worker makes verl's updates bit for bit. With BAPO it skips an unused backward."""

import json
from pathlib import Path

import torch
import torch.multiprocessing as mp
from support.actor import free_port, make_actor, make_mini_batch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 8
LOSS = "actor_rollout_ref.actor.policy_loss"
CUT = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]
OURS = [f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"]


def train(overrides, task, **settings):
    """Make two updates on one batch with ``train_mini_batch``. Returns the actor, its metrics and its weights."""
    from verl.utils import tensordict_utils as tu

    actor = make_actor([f"actor_rollout_ref.model.path={task}/model", *CUT, *overrides], port=free_port())
    data = make_mini_batch(actor, seed=7, rows=ROWS)
    tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=1, **settings)
    metrics = tu.get(actor.train_mini_batch(data), "metrics")
    weights = {name: value.full_tensor().clone() for name, value in actor.engine.module.state_dict().items()}
    torch.distributed.destroy_process_group()
    return actor, metrics, weights


def runs_of_vanilla(rank, task, folder):
    from recipe.bapo.hook.install import install_worker
    from recipe.bapo.hook.worker import BAPOTrainingWorker

    runs = {"verl": train([], task)}  # whose loss is vanilla by default
    install_worker()
    runs["our worker"] = train([], task)
    workers = {name: isinstance(actor, BAPOTrainingWorker) for name, (actor, _, _) in runs.items()}
    assert workers == {"verl": False, "our worker": True}
    torch.save({name: weights for name, (_, _, weights) in runs.items()}, f"{folder}/weights.pt")
    metrics = {name: sorted(metrics) for name, (_, metrics, _) in runs.items()}
    Path(folder, "metrics.json").write_text(json.dumps(metrics))


def test_another_loss_ends_with_the_weights_of_verls_worker_bit_for_bit(task, tmp_path):
    mp.spawn(runs_of_vanilla, args=(str(task), str(tmp_path)))
    of_verl, of_ours = torch.load(tmp_path / "weights.pt").values()
    assert all(torch.equal(of_ours[name], value) for name, value in of_verl.items())
    of_verl, of_ours = json.loads((tmp_path / "metrics.json").read_text()).values()
    assert of_ours == of_verl


class SoftmaxBackwards(TorchDispatchMode):
    """Counts backward calls of softmaxes over ``width`` classes."""

    def __init__(self, width):
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._softmax_backward_data.default and args[0].shape[-1] == self.width:
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_softmax_backwards(rank, task, folder):
    found = {}
    for name, overrides in {"verl": [], "ours": OURS, "ours, coefficient": OURS}.items():
        coefficient = 0.01 if "coefficient" in name else 0
        settings = [
            "actor_rollout_ref.actor.calculate_entropy=true",
            f"actor_rollout_ref.actor.entropy_coeff={coefficient}",
        ]
        vocabulary = json.loads(Path(task, "model", "config.json").read_text())["vocab_size"]
        with SoftmaxBackwards(vocabulary) as counter:
            _, metrics, _ = train([*overrides, *settings], task, calculate_entropy=True)
        found[name] = [counter.count, bool(metrics["actor/entropy_loss"][0] > 0)]
    Path(folder, "counts.json").write_text(json.dumps(found))


def test_an_entropy_that_nobody_asked_a_gradient_for_gets_none(task, tmp_path):
    mp.spawn(count_softmax_backwards, args=(str(task), str(tmp_path)))
    counts = json.loads((tmp_path / "counts.json").read_text())
    micro_batches = ROWS // 2
    assert counts == {"verl": [micro_batches, True], "ours": [0, True], "ours, coefficient": [micro_batches, True]}
