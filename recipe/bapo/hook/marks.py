# SPDX-License-Identifier: Apache-2.0
"""What our trainer tells the worker about a batch. All marks are optional; other trainers set none."""

from typing import Any

from tensordict import TensorDict

from verl.utils import tensordict_utils as tu

ON_POLICY_FIRST_UPDATE = "bapo_on_policy_first_update"  # every ratio of the first update is taken as 1
STEP = "bapo_step"  # number of the trainer's step, for the record


def pop_mark(data: Any, name: str, default: Any) -> Any:
    """Take a mark off a batch. A batch of another kind than verl 0.9.1's, as on verl's branch neo, has none."""
    return tu.pop(data, key=name, default=default) if isinstance(data, TensorDict) else default
