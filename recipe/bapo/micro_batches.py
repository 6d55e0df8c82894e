# SPDX-License-Identifier: Apache-2.0
"""Dump the tokens of verl's micro-batches."""

import json
from dataclasses import fields

from tensordict import TensorDict

from bapo import BAPOConfig
from recipe.bapo.marks import ROLLOUT_VERSION
from recipe.bapo.records.tokens import write_dump
from recipe.bapo.scopes import tokens_of
from verl.workers.utils.padding import no_padding_2_padding

# Settings of ActorConfig that verl's losses read. The report needs them for its row on the run's own loss.
LOSS_SETTINGS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


def dump_micro_batch(model_output, data: TensorDict, actor_config, update: int, trainer_version: int | None) -> None:
    """Add the tokens of a micro-batch to the dump. This works with any policy loss.

    Args:
        model_output: verl's dict with ``log_probs`` and perhaps ``entropy`` in the jagged layout.
        data: the micro-batch that the loss is called with.
        actor_config: verl's ``ActorConfig``; its policy loss names the folder.
        update: number of the update on its rollout batch, from 0.
        trainer_version: version of the weights before the first update on that batch; None: not known.
    """
    tokens = tokens_of(data, no_padding_2_padding(model_output["log_probs"].detach(), data))
    optional = {}
    if model_output.get("entropy") is not None:
        optional["entropy"] = no_padding_2_padding(model_output["entropy"].detach(), data)
    if ROLLOUT_VERSION in data.keys():
        optional["version"] = data[ROLLOUT_VERSION].view(-1, 1).expand_as(tokens["log_prob"])
    if "rollout_is_weights" in data.keys():
        optional["rollout_is_weights"] = data.select("rollout_is_weights").to_padded_tensor()["rollout_is_weights"]
    policy_loss = actor_config.policy_loss
    about = {name: data[name] for name in ("dp_size", "global_batch_size")}
    about |= {name: getattr(actor_config, name) for name in LOSS_SETTINGS}
    about["loss_mode"] = policy_loss.loss_mode
    if isinstance(policy_loss, BAPOConfig):
        options = {field.name: getattr(policy_loss, field.name) for field in fields(BAPOConfig)}
        about |= {"bound_scope": policy_loss.bound_scope, "switches": json.dumps(options)}
    write_dump(
        policy_loss.token_dump_dir,
        **tokens,
        **optional,
        about=about,
        update=update,
        trainer_version=trainer_version,
    )
