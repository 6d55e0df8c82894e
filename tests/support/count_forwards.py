# SPDX-License-Identifier: Apache-2.0
"""Write a line for each pass of verl's FSDP engine over a batch. Use it as ``actor_rollout_ref.model.external_lib``.

A line is ``train`` if the pass has a backward, otherwise ``infer``. ``FORWARDS_FILE`` names the file.
"""

import os

from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

forward_backward_batch = FSDPEngine.forward_backward_batch


def count(engine, data, loss_function, forward_only=False):
    with open(os.environ["FORWARDS_FILE"], "a") as file:
        file.write("infer\n" if forward_only else "train\n")
    return forward_backward_batch(engine, data, loss_function, forward_only=forward_only)


FSDPEngine.forward_backward_batch = count
