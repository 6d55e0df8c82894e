# SPDX-License-Identifier: Apache-2.0
"""verl's PPO trainers with what only a trainer can add to BAPO, and the Ray task that runs them.

They make mini-batches of whole groups, mark batches whose first update is on-policy (which saves the search a forward),
and tell a dump the versions of the weights. The worker that finds the bounds comes with the loss's config.
"""

import torch
import transfer_queue as tq
from tensordict import TensorDict

from recipe.bapo.micro_batches import ROLLOUT_VERSION
from recipe.bapo.worker import ON_POLICY_FIRST_UPDATE, TRAINER_VERSION, UPDATES_MADE
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY


class _BAPOTrainer:
    """What ours adds to each of verl's trainers."""

    def _balance_batch(self, batch, *args, **kwargs):
        # verl lists responses in the order in which they ended, short ones first. Sorted by key (a random id of the
        # prompt with a number), mini-batches are whole groups, whose advantages sum to zero: on one rank all of them,
        # on several nearly all, because verl then balances lengths over the ranks.
        batch.reorder(sorted(range(len(batch)), key=batch.keys.__getitem__))
        return super()._balance_batch(batch, *args, **kwargs)

    def _first_update_is_on_policy(self) -> bool:
        """Whether the old log-probs of this batch come from the weights that the first update starts from.

        They do not in bypass mode, where they are the rollout engine's, nor in ``separate_async`` after the first local
        update, where verl restores older weights to compute them. With dropout this is True although the ratios are
        only near 1: verl computes old log-probs without dropout.
        """
        correction = self.config.algorithm.rollout_correction  # verl takes null for "no correction", hence no bypass
        bypass = correction is not None and correction.bypass_mode
        return not bypass and (self.trainer_mode != "separate_async" or self.local_trigger_step == 0)

    def _update_actor(self, batch, metrics):
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        batch.extra_info[ON_POLICY_FIRST_UPDATE] = self._first_update_is_on_policy()
        # ``separate_async`` trains on a rollout batch in several calls, between which no weights are sent. verl has
        # padded the batch to whole mini-batches: a prompt may have more responses than ``rollout.n``.
        updates = len(batch.tags) // (actor.ppo_mini_batch_size * rollout.n) * actor.ppo_epochs
        batch.extra_info[UPDATES_MADE] = self.local_trigger_step * updates
        if actor.policy_loss.get("token_dump_dir") is not None:
            self._add_weight_versions(batch)
        batch = super()._update_actor(batch, metrics)
        # In bypass mode verl skips the pass that logs the entropy; the update then computes it.
        if "actor/entropy" not in metrics and "actor/entropy_loss" in metrics:
            metrics["actor/entropy"] = metrics["actor/entropy_loss"]
        return batch

    def _add_weight_versions(self, batch):
        """Add the versions of the weights that a dump records; an interrupted response has that of its first token."""
        sampled_by = torch.tensor([tag["min_global_steps"] for tag in batch.tags])
        fields = TensorDict({ROLLOUT_VERSION: sampled_by}, batch_size=len(sampled_by))
        # The worker gets what ``batch.fields`` names.
        batch.fields = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields).fields
        batch.extra_info[TRAINER_VERSION] = self.global_steps - 1


class BAPOTrainerSync(_BAPOTrainer, PPOTrainerSync):
    """Rollout and updates take turns."""


class BAPOTrainerColocateAsync(_BAPOTrainer, PPOTrainerColocateAsync):
    """Partial rollouts on the devices that train."""


class BAPOTrainerSeparateAsync(_BAPOTrainer, PPOTrainerSeparateAsync):
    """Rollout on devices of its own."""


class BAPOTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # the class behind the Ray actor class
    """verl's task runner with our trainers in the place of verl's."""

    def run(self, config):
        """Train. ``config`` is the composed config."""
        # In this process only. verl compares the modes' names in many places, so they stay.
        TRAINER_REGISTRY["sync"] = BAPOTrainerSync
        TRAINER_REGISTRY["colocate_async"] = BAPOTrainerColocateAsync
        TRAINER_REGISTRY["separate_async"] = BAPOTrainerSeparateAsync
        super().run(config)
