# SPDX-License-Identifier: Apache-2.0
"""From a micro-batch of verl's to the dump of its tokens (``records/tokens.py``), whichever loss trains.

Our worker calls it where a config names a ``token_dump_dir``. What a dump says of its run may grow here; the names of
its tensors and metadata are read by the report, and by others.
"""

from __future__ import annotations

import json
from dataclasses import fields

from tensordict import TensorDict

from bapo import BAPOConfig
from recipe.bapo.records.tokens import write_dump
from verl.workers.utils.padding import no_padding_2_padding

# Set on a batch by our trainer where tokens are dumped: the version of the weights that sampled each response, and of
# those that the first update starts from.
SAMPLED_BY, TRAINED_FROM = "bapo_sampled_by", "bapo_trained_from"


def dump_micro_batch(
    folder: str,
    tokens: dict,
    model_output: dict,
    data: TensorDict,
    actor_config,
    update: int,
    trainer_version: int | None,
) -> None:
    """Add a micro-batch to a dump.

    Args:
        folder: of the dump.
        tokens: ``old_log_prob``, ``log_prob``, ``advantages`` and ``response_mask``, ``(B, T)`` each.
        model_output, data: what verl hands its loss function.
        actor_config: verl's ``ActorConfig``.
        update, trainer_version: as in ``write_dump``.
    """
    known = {}
    if model_output.get("entropy") is not None:
        known["entropy"] = no_padding_2_padding(model_output["entropy"].detach(), data)
    if SAMPLED_BY in data.keys():
        known["version"] = data[SAMPLED_BY].view(-1, 1).expand_as(tokens["log_prob"])
    if "rollout_is_weights" in data.keys():
        known["rollout_is_weights"] = data.select("rollout_is_weights").to_padded_tensor()["rollout_is_weights"]
    policy_loss = actor_config.policy_loss
    about = {
        "dp_size": data["dp_size"],
        "global_batch_size": data["global_batch_size"],
        "loss_mode": policy_loss.loss_mode,
        "clip_ratio_c": actor_config.clip_ratio_c,
    }
    switches = policy_loss if isinstance(policy_loss, BAPOConfig) else fixed_bounds_of_vanilla(actor_config)
    if switches is not None:
        about["bound_scope"] = switches.bound_scope
        about["switches"] = json.dumps({field.name: getattr(switches, field.name) for field in fields(BAPOConfig)})
    write_dump(folder, **tokens, **known, update=update, trainer_version=trainer_version, about=about)


def fixed_bounds_of_vanilla(actor_config) -> BAPOConfig | None:
    """The bounds of verl's ``vanilla`` loss as fixed ones; None with another loss, or where they are no such bounds."""
    if actor_config.policy_loss.loss_mode != "vanilla":
        return None
    low, high = actor_config.clip_ratio_low, actor_config.clip_ratio_high
    low, high = (actor_config.clip_ratio if epsilon is None else epsilon for epsilon in (low, high))
    if not (0 < low <= 1 and high > 0):
        return None
    return BAPOConfig(
        ratio_lower_start=1 - low, ratio_lower_max=1 - low, ratio_upper_start=1 + high, ratio_upper_max=1 + high
    )
