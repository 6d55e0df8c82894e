# SPDX-License-Identifier: Apache-2.0
"""Spoil one number in an update of a run of the real stack. Use it as ``actor_rollout_ref.model.external_lib``.

``SPOIL`` says what: ``old_log_prob``, an old log-prob becomes -inf; ``gradient``, the gradients of one micro-batch
become NaN, as they may with cuDNN's attention. It is done in the second update of each process.
"""

import os

import torch

from verl.workers.engine_workers import TrainingWorker

verl_train_batch = TrainingWorker.train_batch
updates = 0


def train_batch(worker, data):
    global updates
    updates += 1
    if updates == 2 and os.environ["SPOIL"] == "old_log_prob":
        data["old_log_probs"].values()[0] = -torch.inf
    hook = None
    if updates == 2 and os.environ["SPOIL"] == "gradient":
        parameter = next(p for p in worker.engine.module.parameters() if p.requires_grad)
        calls = []

        def spoil(gradient):
            calls.append(1)
            return gradient * torch.nan if len(calls) == 1 else gradient

        hook = parameter.register_hook(spoil)
    try:
        return verl_train_batch(worker, data)
    finally:
        if hook is not None:
            hook.remove()


TrainingWorker.train_batch = train_batch
