# SPDX-License-Identifier: Apache-2.0
"""verl's PPO trainers with the parts of BAPO that only a trainer can add, and the task runner that runs them.

Our trainers do four things: they build mini-batches of whole groups; they mark batches, with the step for the record
and with whether the first update is on-policy, which saves the search a forward; they log the entropy in bypass mode;
and they end a run whose responses do not arrive. They do not set up the worker that finds the bounds; the loss's config
does that.
"""

from typing import Any

from recipe.bapo.hook.marks import ON_POLICY_FIRST_UPDATE, STEP
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY


class _BAPOTrainer:
    """Mixin that adds BAPO's parts to one of verl's trainers."""

    config: Any  # verl's trainer sets these four
    trainer_mode: str
    local_trigger_step: int
    global_steps: int

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        self.prompts = sample_batch_size
        return super()._step_once(metrics, timing_raw, sample_batch_size)

    def _balance_batch(self, batch, metrics, *args, **kwargs):
        self._measure_arrived(batch, metrics)
        # verl lists responses in the order in which they ended, short ones first. Sort them by key (a random id of the
        # prompt with a number) instead: mini-batches are then whole groups, whose advantages sum to zero. On one rank
        # this holds for all groups if every response has arrived; on several for nearly all, because verl then balances
        # lengths over the ranks.
        batch.reorder(sorted(range(len(batch)), key=batch.keys.__getitem__))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _measure_arrived(self, batch, metrics):
        """Log the share of the responses that arrived, and end the run if it is too small.

        verl drops a response whose reward, tool or agent loop fails, and fills the batch with empty rows. In the
        asynchronous modes it drops all responses to that prompt, and samples another prompt in its place.
        """
        arrived = len({key.rpartition("_")[0] for key in batch.keys})  # a key is the prompt's id, response, turn
        sampled = self.prompts + metrics.get("training/rollout_failure/evicted_samples", 0)  # prompts
        expected, least = sampled * self.config.actor_rollout_ref.rollout.n, self.config.watchdog.min_arrived
        metrics["training/responses_arrived"] = arrived / expected
        if arrived < least * expected:
            raise RuntimeError(
                f"only {arrived} of {expected} responses arrived, fewer than watchdog.min_arrived={least:g}: verl "
                "drops those whose reward, tool or agent loop fails"
            )

    def _first_update_is_on_policy(self) -> bool:
        """Whether the old log-probs of this batch come from the weights that the first update starts from.

        Not in bypass mode, where they come from the rollout engine. Not in the later calls of ``separate_async`` on a
        rollout batch, because verl restores older weights to compute them. With dropout this returns True although the
        ratios are only near 1, because verl computes old log-probs without dropout.
        """
        correction = self.config.algorithm.rollout_correction  # null means none
        bypass = correction is not None and correction.bypass_mode
        return not bypass and (self.trainer_mode != "separate_async" or self.local_trigger_step == 0)

    def _update_actor(self, batch, metrics):
        batch.extra_info[ON_POLICY_FIRST_UPDATE] = self._first_update_is_on_policy()
        batch.extra_info[STEP] = self.global_steps
        batch = super()._update_actor(batch, metrics)
        # In bypass mode verl skips the pass that logs the entropy, but the update may have computed it.
        if "actor/entropy" not in metrics and "actor/entropy_loss" in metrics:
            metrics["actor/entropy"] = metrics["actor/entropy_loss"]
        return batch


class BAPOTrainerSync(_BAPOTrainer, PPOTrainerSync):
    """Alternates rollout and updates."""


class BAPOTrainerColocateAsync(_BAPOTrainer, PPOTrainerColocateAsync):
    """Samples partial rollouts on the devices that train."""


class BAPOTrainerSeparateAsync(_BAPOTrainer, PPOTrainerSeparateAsync):
    """Samples on other devices than those that train."""


# verl's ``TaskRunnerV1`` is a Ray actor class, and Ray lets nobody inherit from one. This is the plain class that it
# wraps.
_ray_actor: Any = TaskRunnerV1
_TaskRunner: Any = _ray_actor.__ray_metadata__.modified_class


class BAPOTaskRunner(_TaskRunner):
    """verl's task runner with our trainers in place of verl's."""

    def run(self, config):
        """Train. ``config`` is the composed config."""
        # This affects this process only. The names of the modes stay, because verl compares them in many places.
        TRAINER_REGISTRY["sync"] = BAPOTrainerSync
        TRAINER_REGISTRY["colocate_async"] = BAPOTrainerColocateAsync
        TRAINER_REGISTRY["separate_async"] = BAPOTrainerSeparateAsync
        super().run(config)
