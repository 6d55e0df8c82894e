# SPDX-License-Identifier: Apache-2.0
"""Spoil one number in an update of a run of the real stack. Use it as ``actor_rollout_ref.model.external_lib``.

``SPOIL`` says what: ``old_log_prob``, an old log-prob becomes -inf; ``gradient``, the gradients of one micro-batch
become NaN in the backward, as they may with cuDNN's attention. It is done in the second update of each process.
"""

import os

import torch

from verl.workers.engine_workers import TrainingWorker

verl_train_batch = TrainingWorker.train_batch
updates = 0


def with_nan_gradient(loss_fn):
    """Wrap a loss so that in the first micro-batch the gradient of the log-probs is NaN, and the loss is not."""
    calls = []

    def compute(model_output, data, dp_group=None):
        if not calls:
            log_probs = model_output["log_probs"]
            values = log_probs.values() * 1
            values.register_hook(lambda gradient: gradient * torch.nan)
            model_output["log_probs"] = torch.nested.nested_tensor_from_jagged(values, log_probs.offsets())
        calls.append(1)
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    return compute


def train_batch(worker, data):
    global updates
    updates += 1
    if updates == 2 and os.environ["SPOIL"] == "old_log_prob":
        data["old_log_probs"].values()[0] = -torch.inf
    if updates != 2 or os.environ["SPOIL"] != "gradient":
        return verl_train_batch(worker, data)
    loss_fn, worker.loss_fn = worker.loss_fn, with_nan_gradient(worker.loss_fn)
    try:
        return verl_train_batch(worker, data)
    finally:
        worker.loss_fn = loss_fn


TrainingWorker.train_batch = train_batch
