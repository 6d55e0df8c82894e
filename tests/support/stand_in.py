# SPDX-License-Identifier: Apache-2.0
"""Run our worker without Ray, transformer and process group: a stand-in for verl's engine calls the real loss.

An update takes milliseconds here, so tests can look at what it does with its bounds. tests/actor has the real engine.
"""

from functools import partial
from types import SimpleNamespace

import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.py_functional import append_to_dict
from verl.workers.engine.base import BaseEngine
from verl.workers.utils.losses import ppo_loss

MODEL = SimpleNamespace(override_config={}, enable_activation_offload=False)


def jagged(rows):
    """Make a nested tensor from rows of different lengths."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_mini_batch(old_log_prob, log_prob, advantages, mask):
    """Make a mini-batch in verl's jagged layout from padded tensors ``(B, T)``.

    Prompts have two tokens. Each response has T tokens; ``mask`` says which of them count. ``log_prob`` is what the
    model of ``StandInEngine`` starts from; it is not a field of verl's.
    """
    rows, length = log_prob.shape
    data = TensorDict(
        {
            "prompts": jagged(torch.ones(rows, 2).long()),
            "responses": jagged(torch.ones(rows, length).long()),
            "response_mask": jagged(mask.long()),
            "old_log_probs": jagged(old_log_prob),
            "advantages": jagged(advantages),
            "log_prob": jagged(log_prob),
        },
        batch_size=[rows],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=None)
    return data


class Model(torch.nn.Module):
    """A model with one weight: a log-prob moves by it, up in even rows and down in odd ones.

    Attributes:
        noise: standard deviation of what a forward adds to each log-prob, as dropout would.
        forwards: a buffer, the number of forwards. It moves the log-probs a little, as a router's bias would. It is an
            integer and no part of a checkpoint, as counts of tokens are.
    """

    def __init__(self, noise):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.noise = noise
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, log_prob):
        signs = torch.where(torch.arange(len(log_prob)) % 2 == 0, 1.0, -1.0)[:, None]
        moved = log_prob + self.weight * signs
        if self.noise:
            moved = moved + self.noise * torch.randn(log_prob.shape) + 1e-3 * self.forwards
            self.forwards += 1
        return moved


class StandInEngine(BaseEngine):
    """An engine with the model above and plain gradient descent; ``train_batch`` and ``infer_batch`` are verl's own.

    Attributes:
        rows: number of rows in a micro-batch.
        steps: number of optimizer steps made.
        passes: what was made so far, ``forward`` or ``train`` for each pass over a mini-batch.
        batches: the padded batches of the updates in the trainer's next call.
        found: the metrics of the updates in its latest call.
        source: whether the outputs of this rank count. In each parallel group those of one rank do.
        data_parallel_rank: number of this rank among the data-parallel ranks.
        calls_the_loss: false on an earlier stage of a pipeline.
    """

    def __init__(self, rows=4, learning_rate=0.0, noise=0.0):
        self.rows, self.learning_rate = rows, learning_rate
        self.module = Model(noise)
        self.steps, self.passes = 0, []
        self.batches, self.found = [], []
        self.source, self.data_parallel_rank, self.calls_the_loss = True, 0, True

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        self.passes.append("forward" if forward_only else "train")
        metrics = {}
        for rows in torch.arange(len(data)).split(self.rows) if self.calls_the_loss else ():
            micro_batch = tu.index_select_tensor_dict(data, rows)
            log_prob = self.module(micro_batch["log_prob"].to_padded_tensor(0.0))
            # The log-prob of a token is one position before it.
            shifted = torch.nn.functional.pad(log_prob, (1, 1))
            offsets = torch.arange(len(rows) + 1) * shifted.shape[1]
            model_output = {"log_probs": torch.nested.nested_tensor_from_jagged(shifted.flatten(), offsets)}
            if tu.get_non_tensor_data(data, "calculate_entropy", default=False):
                # Minus the log-prob is one sample's estimate of the entropy.
                model_output["entropy"] = torch.nested.nested_tensor_from_jagged(-shifted.flatten(), offsets)
            loss, of_micro_batch = loss_function(model_output=model_output, data=micro_batch)
            if not forward_only:
                loss.backward()
            append_to_dict(metrics, of_micro_batch)
        return {"metrics": metrics}

    def get_per_tensor_param(self, base_sync_done=False):
        """Yield the weights; none of the model's own where verl asks for an adapter's alone."""
        return iter([] if base_sync_done else self.module.named_parameters()), None

    def get_per_tensor_param_delta_shard(self):
        return iter([]), None

    def optimizer_zero_grad(self):
        self.module.zero_grad()

    def optimizer_step(self):
        self.steps += 1
        gradient = self.module.weight.grad
        if gradient is None:  # an earlier stage of a pipeline
            return 0.0
        if gradient.isfinite():  # verl skips the step otherwise
            with torch.no_grad():
                self.module.weight -= self.learning_rate * gradient
        return gradient.abs().item()

    def is_mp_src_rank_with_outputs(self):
        return self.source

    def get_data_parallel_rank(self):
        return self.data_parallel_rank


def make_worker(config, monkeypatch, model_config=MODEL, **engine):
    """Make a ``BAPOTrainingWorker`` on a stand-in engine, and set verl's loss with an ``ActorConfig``."""
    from recipe.bapo.hook.worker import BAPOTrainingWorker
    from verl.workers.engine_workers import TrainingWorker

    def init(worker, _):
        worker.engine, worker.model_config = StandInEngine(**engine), model_config

    def train_batch(worker, data):
        output = worker.engine.train_batch(data, loss_function=worker.loss_fn)
        metrics = {name: getattr(value, "values", value) for name, value in output["metrics"].items()}
        return tu.get_tensordict({}, {"metrics": metrics}) if worker.engine.source else None

    def train_mini_batch(worker, data):
        worker.engine.found = [update(worker, batch) for batch in worker.engine.batches]
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})

    monkeypatch.setattr(TrainingWorker, "__init__", init)
    monkeypatch.setattr(TrainingWorker, "train_batch", train_batch)
    monkeypatch.setattr("recipe.bapo.hook.worker.get_device_id", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, group: None)  # the only rank
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", train_mini_batch)
    worker = BAPOTrainingWorker(None)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


WHOLE, DELTA = "get_per_tensor_param", "get_per_tensor_param_delta_shard"  # by which verl takes weights to send


def train_call(worker, *batches, send=WHOLE, **marks):
    """Make a call of verl's trainer with updates on padded batches. Returns the metrics of each.

    Without batches the updates that a test makes next stand for those of the call. ``send``: the engine's method by
    which weights are sent to the rollout servers before it, or None.
    """
    if send is not None:
        getattr(worker.engine, send)()
    worker.engine.batches = batches
    worker.train_mini_batch(tu.get_tensordict(tensor_dict={}, non_tensor_dict=marks))
    return worker.engine.found


def update(worker, batch, **settings):
    """Make one update on a padded batch. Returns the metrics; None on a rank without outputs."""
    data = make_mini_batch(*batch)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=worker.engine.rows, **settings)
    output = worker.train_batch(data)
    return None if output is None else tu.get(output, "metrics")
