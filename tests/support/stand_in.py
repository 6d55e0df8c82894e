# SPDX-License-Identifier: Apache-2.0
"""Run our worker without Ray, model and process group: a stand-in for verl's engine calls the real loss on log-probs.

An update takes milliseconds here, so tests can look at what it does with its bounds. tests/actor has the real engine.
"""

from functools import partial

import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss


def jagged(rows):
    """Make a nested tensor from rows of different lengths."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_micro_batch(old_log_prob, log_prob, advantages, mask):
    """Make a micro-batch as verl's engine passes it to the loss, from padded tensors ``(B, T)``: data and model output.

    Prompts have two tokens. Each response has T tokens; ``mask`` says which of them count.
    """
    rows, length = log_prob.shape
    data = TensorDict(
        {
            "prompts": jagged(torch.ones(rows, 2).long()),
            "responses": jagged(torch.ones(rows, length).long()),
            "response_mask": jagged(mask.long()),
            "old_log_probs": jagged(old_log_prob),
            "advantages": jagged(advantages),
        },
        batch_size=[rows],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
    # The log-prob of a token is one position before it.
    log_probs = torch.nn.functional.pad(log_prob, (1, 1)).requires_grad_()
    return data, {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs.flatten(), _offsets(rows, length + 2))}


def _offsets(rows, length):
    return torch.arange(rows + 1) * length


class StandInEngine:
    """Has the methods of verl's engine that our worker calls. ``train_batch`` takes pairs of ``make_micro_batch``.

    Attributes:
        steps: number of optimizer steps made.
        source: whether the outputs of this rank count. In each parallel group those of one rank do.
        data_parallel_rank: number of this rank among the data-parallel ranks.
    """

    def __init__(self):
        self.steps = 0
        self.source, self.data_parallel_rank = True, 0

    def train_batch(self, data, loss_function):
        metrics = {}
        for micro_batch, model_output in data:
            loss, of_micro_batch = loss_function(model_output=dict(model_output), data=micro_batch)
            loss.backward()
            for name, value in of_micro_batch.items():
                metrics.setdefault(name, []).extend(getattr(value, "values", [value]))
        self.optimizer_step()
        return {"metrics": metrics}

    def optimizer_step(self):
        self.steps += 1

    def is_mp_src_rank_with_outputs(self):
        return self.source

    def get_data_parallel_rank(self):
        return self.data_parallel_rank

    def get_data_parallel_group(self):
        return "data-parallel group"


def make_worker(config, monkeypatch, model_config=None):
    """Make a ``BAPOTrainingWorker`` on a stand-in engine, and set verl's loss with an ``ActorConfig``."""
    from recipe.bapo.worker import BAPOTrainingWorker
    from verl.workers.engine_workers import TrainingWorker

    def init(worker, _):
        worker.engine, worker.model_config, worker.device_name = StandInEngine(), model_config, "cpu"

    monkeypatch.setattr(TrainingWorker, "__init__", init)
    monkeypatch.setattr("recipe.bapo.worker.get_device_id", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: None)  # the only rank
    # verl's loop over the updates on a rollout batch does nothing here, because tests make the updates one by one.
    nothing = tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda worker, data: nothing)
    worker = BAPOTrainingWorker(None)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker
