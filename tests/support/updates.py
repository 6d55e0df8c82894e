# SPDX-License-Identifier: Apache-2.0
"""Help with updates of the real actor worker: ways to split a mini-batch, and a count of forwards."""

import pytest
import torch
from support.actor import FSDP1, TWO_LINES

ROWS = 16
# The number of ranks, and the overrides that choose the engine. FSDP1 is verl's default.
RANKS = [
    pytest.param((1, []), id="FSDP2, one rank"),
    pytest.param((2, []), id="FSDP2, two ranks"),
    pytest.param((1, [FSDP1]), id="FSDP1, one rank", marks=pytest.mark.slow),
    pytest.param((2, [FSDP1]), id="FSDP1, two ranks"),
]
ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
MICRO_BATCH, LOG_PROBS = f"{ACTOR}.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.log_prob"
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{LOG_PROBS}_use_dynamic_bsz=true"]
CUTS = {
    "whole": [f"{MICRO_BATCH}={{whole}}"],
    "halves": [f"{MICRO_BATCH}={{half}}"],
    "single": [f"{MICRO_BATCH}=1"],
    "dynamic": [*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=64"],
    "dynamic, whole": [*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=4096"],
    "gradient, whole": [f"{MICRO_BATCH}={{whole}}", f"++{LOSS}.contribution=gradient"],
    "gradient, quarters": [f"{MICRO_BATCH}=4", f"++{LOSS}.contribution=gradient"],
    "micro_batch scope": [f"{MICRO_BATCH}=4", f"++{LOSS}.bound_scope=micro_batch"],
}
SIZES = [f"{LOG_PROBS}_micro_batch_size_per_gpu=4", f"{MICRO_BATCH}=2"]
COMMON = [*TWO_LINES, f"++{LOSS}.positive_contribution_target=0.45", *SIZES]


def cut_of(name, size):
    """Return the overrides for a way to split, on each of ``size`` ranks."""
    return [part.format(whole=ROWS // size, half=ROWS // size // 2) for part in CUTS[name]]


class CollectiveCounter:
    """Counts our all-reduces (the float64 ones) and the engine's forward passes without gradient."""

    def __init__(self, actor):
        self.collectives = self.passes = 0
        self.all_reduce, self.infer = torch.distributed.all_reduce, actor.engine.infer_batch
        torch.distributed.all_reduce = self.count_collective
        actor.engine.infer_batch = self.count_pass

    def count_collective(self, tensor, *args, **kwargs):
        self.collectives += tensor.dtype == torch.float64
        return self.all_reduce(tensor, *args, **kwargs)

    def count_pass(self, *args, **kwargs):
        self.passes += 1
        return self.infer(*args, **kwargs)

    def stop(self):
        torch.distributed.all_reduce = self.all_reduce
