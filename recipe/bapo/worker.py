# SPDX-License-Identifier: Apache-2.0
"""The actor's worker. It finds the clip bounds of each optimizer update, the same for all micro-batches and ranks.

verl creates this worker instead of its own ``TrainingWorker`` wherever a config of ``recipe.bapo.policy_loss`` is used,
in any trainer and with any entry point. Change here how the bounds of an update are found; the loss that uses them is
in ``policy_loss.py``. With a policy loss that is not ours, the worker does what verl's worker does, bit for bit.
"""

from functools import partial

import torch

from bapo import (
    BAPOConfig,
    EarlierBounds,
    bounds_from_statistics,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    read_and_validate,
    remeasure,
    search_clip_bounds,
)
from recipe.bapo import fused_head  # noqa: F401  lets verl's fused kernels train models with untied embeddings
from recipe.bapo.compatibility import refuse_unusable_settings
from recipe.bapo.health import HealthLog
from recipe.bapo.micro_batches import SEARCH_FIELDS, dump_micro_batch, tokens_of
from recipe.bapo.records.bounds import BoundsRecord
from recipe.bapo.records.metrics import bounds_metrics
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

# Our trainer sets these on a batch; all three are optional. Without the first, the worker makes one more forward.
# Without the second, it counts updates from 0 in each call. Without the third, a dump lacks the version of the weights.
ON_POLICY_FIRST_UPDATE = "bapo_on_policy_first_update"  # whether every ratio of the first update is 1
UPDATES_MADE = "bapo_updates_made"  # earlier updates on this rollout batch; above 0 only in ``separate_async``
TRAINER_VERSION = "bapo_trained_from"  # version of the weights before the first update on this rollout batch


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker with a search for the clip bounds of each update.

    ``bound_scope`` says which tokens the search sees, and so when it runs:

    * ``mini_batch``: the tokens of the update itself. Their log-probs come from a forward without gradient before the
      first training forward. That forward is skipped if every ratio is known to be 1. It is also skipped if the
      mini-batch is a single micro-batch, because its training forward then gives the search all log-probs.
    * ``previous_batch``: the tokens of the same update on the previous rollout batch. Each update searches bounds for
      the next batch right before its optimizer step, when all its training forwards are done.
    * ``micro_batch``: the tokens of the micro-batch, from its training forward.
    """

    def __init__(self, config):
        super().__init__(config)
        self.verl_train_batch = self.engine.train_batch
        self.verl_optimizer_step = self.engine.optimizer_step
        self.actor_config = None  # verl's ActorConfig, if its policy loss is one of ours
        self.bapo_config: BAPOConfig | None = None
        self.token_dump_dir = None
        self.update_bounds = None  # bounds of the current update; None if its training forward finds them
        self.earlier_bounds: EarlierBounds | None = None  # set if bound_scope=previous_batch
        self.collected = None  # statistics of the current update, from the micro-batches so far
        self.logged: dict[str, list[float]] = {}  # metrics of the current update that the loss does not return
        self.updates = 0  # since the process started
        self.updates_on_batch = 0  # on the current rollout batch
        self.on_policy_update = False  # whether every ratio of the next update is known to be 1
        self.trainer_version = None
        self.record = None
        self.health = None

    def set_loss_fn(self, loss_fn):
        """Set verl's loss function. If its config is one of ours, wrap it and add the search to each update.

        Raises:
            ValueError: our config comes with a function other than verl's ``ppo_loss``, or with settings that would
                make the bounds or the loss wrong, or the search fail.
        """
        config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss = getattr(config, "policy_loss", None)
        self.bapo_config = policy_loss if isinstance(policy_loss, BAPOConfig) else None
        self.token_dump_dir = getattr(policy_loss, "token_dump_dir", None)
        self.engine.train_batch, self.engine.optimizer_step = self.verl_train_batch, self.verl_optimizer_step
        if self.bapo_config is None and self.token_dump_dir is None:
            super().set_loss_fn(loss_fn)
            return
        if loss_fn.func is not ppo_loss:
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss._target_={type(policy_loss).__qualname__} is not usable with the "
                f"loss function {loss_fn.func.__qualname__}: it needs verl's ppo_loss (distillation.enabled=false)."
            )
        self.actor_config = config
        if self.bapo_config is not None:
            refuse_unusable_settings(config, self.model_config)
            self.record = BoundsRecord(self.bapo_config.bounds_record_dir, self.rank)
            self.health = HealthLog(bounds_can_move=not self.bapo_config.fixed)
            if self.bapo_config.bound_scope == "previous_batch":
                self.earlier_bounds = EarlierBounds(self.bapo_config, get_device_id())
                self.engine.optimizer_step = self._search_for_next_batch_and_step
        # An update begins in the engine's ``train_batch``: before it calls that, ``TrainingWorker.train_batch`` has
        # loaded the weights and decided how to split the mini-batch.
        self.engine.train_batch = self._train_engine
        super().set_loss_fn(partial(self._compute_loss, loss_fn))

    def train_mini_batch(self, data):
        """Make all updates on one rollout batch or, in ``separate_async``, on a part of one."""
        self.updates_on_batch = tu.pop(data, key=UPDATES_MADE, default=0)
        self.on_policy_update = tu.pop(data, key=ON_POLICY_FIRST_UPDATE, default=False)
        self.trainer_version = tu.pop(data, key=TRAINER_VERSION, default=None)
        if self.earlier_bounds is not None and self.updates_on_batch == 0:
            self.earlier_bounds.start_batch()
        output = super().train_mini_batch(data)
        if self.bapo_config is not None and self._is_first_rank_with_outputs():
            self.health.add(tu.get(output, "metrics"))
        return output

    def _train_engine(self, data, loss_function):
        """Make one optimizer update with verl's engine, and find its bounds if that has to happen before training."""
        self.collected, self.logged = None, {}
        if self.bapo_config is not None:
            self.update_bounds = self._bounds_before_training(data)
        output = self.verl_train_batch(data, loss_function)
        if self.engine.is_mp_src_rank_with_outputs():
            output["metrics"] |= self.logged
        self.update_bounds, self.on_policy_update = None, False
        self.updates += 1
        self.updates_on_batch += 1
        return output

    def _compute_loss(self, loss_fn, model_output, data, dp_group=None):
        """Compute verl's loss of one micro-batch, after putting the bounds into its config, where it reads them."""
        entropy = model_output.get("entropy")
        if entropy is not None and self.actor_config.entropy_coeff == 0:
            # verl subtracts 0 times the entropy. Without detach its backward would hold a (tokens, vocabulary) tensor.
            model_output = {**model_output, "entropy": entropy.detach()}
        if self.token_dump_dir is not None and self.engine.is_mp_src_rank_with_outputs():
            dump_micro_batch(model_output, data, self.actor_config, self.updates_on_batch, self.trainer_version)
        if self.bapo_config is not None:
            log_probs = model_output["log_probs"].detach()
            self.bapo_config.current_bounds = self._bounds_of_micro_batch(log_probs, data)
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _bounds_before_training(self, data):
        """Return bounds and diagnostics of this update, or None if its training forward has to find them."""
        if self.earlier_bounds is not None:
            # They are validated and logged right before the optimizer step, when the tokens of this update are known.
            return self.earlier_bounds.of_update(self.updates_on_batch), None
        if self.bapo_config.bound_scope == "micro_batch":
            return None
        # If all ratios are known to be 1, use that instead of a real forward. On a tie the forward would round
        # differently, and the log would depend on how the mini-batch is split.
        if self.on_policy_update:
            tokens = tokens_of(data.select(*SEARCH_FIELDS).to(get_device_id()))
            stats, source = self._statistics_of(tokens), "on_policy"
        elif self._is_one_micro_batch(data):
            return None
        else:
            stats, source = self._collect_by_forward(data), "pass"
        found = bounds_from_statistics(stats, self.bapo_config, self.engine.get_data_parallel_group())
        # For invalid input this raises on all ranks together, before the first training forward.
        self.record.write(self.updates, source, read_and_validate(*found))
        return found

    def _bounds_of_micro_batch(self, log_probs, data):
        """Return bounds and diagnostics for the loss of one micro-batch."""
        if self.earlier_bounds is None and self.update_bounds is not None:
            return self.update_bounds
        if self.earlier_bounds is not None and not torch.is_grad_enabled():  # the loss is evaluated, not trained on
            return self.earlier_bounds.latest, None
        stats = self._statistics_of(tokens_of(data, no_padding_2_padding(log_probs, data)))
        if self.earlier_bounds is not None:
            self.collected = stats if self.collected is None else self.collected + stats
            return self.update_bounds
        found = bounds_from_statistics(stats, self.bapo_config, self.engine.get_data_parallel_group())
        # Read on the host only for the record. The loss reads bounds and metrics in one transfer of its own.
        if self.record.is_kept:
            self.record.write(self.updates, "loss", read_and_validate(*found))
        return found

    def _search_for_next_batch_and_step(self):
        """Validate and log this update, search bounds for the next rollout batch, then make the optimizer step.

        Of the ranks that work on the same data, only one contributes statistics, so that every token counts once. All
        ranks of the world take part in the collective, including those that never call the loss. So all of them hold
        the same bounds, and all of them raise for invalid input while weights and optimizer state are still unchanged.
        """
        stats = self.collected
        if stats is None or not self.engine.is_mp_src_rank_with_outputs():
            stats = empty_clip_statistics(self.bapo_config, get_device_id())
        stats = stats.all_reduce(torch.distributed.group.WORLD)
        used = remeasure(stats, self.update_bounds[0], self.bapo_config)
        values = read_and_validate(used, diagnose(stats, used))
        self.record.write(self.updates, "previous_batch", values)
        # Each value is a list of one element, because verl's worker gathers lists of metrics from the ranks.
        self.logged = {name: [value] for name, value in bounds_metrics(values).items()}
        self.earlier_bounds.keep(self.updates_on_batch, search_clip_bounds(stats, self.bapo_config))
        return self.verl_optimizer_step()

    def _statistics_of(self, tokens):
        return collect_clip_statistics(**tokens, config=self.bapo_config, clip_ratio_c=self.actor_config.clip_ratio_c)

    def _is_one_micro_batch(self, data):
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        return not dynamic and len(data) == tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)

    def _is_first_rank_with_outputs(self):
        return self.engine.get_data_parallel_rank() == 0 and self.engine.is_mp_src_rank_with_outputs()

    def _collect_by_forward(self, data):
        """Collect the statistics of a mini-batch by a forward without gradient over all its micro-batches."""
        collected = []

        def collect(model_output, data, dp_group=None):
            log_prob = no_padding_2_padding(model_output.pop("log_probs"), data)
            collected.append(self._statistics_of(tokens_of(data, log_prob)))
            return log_prob.new_zeros(()), {}

        view = data.copy()  # a shallow copy, so that the setting below does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        # Restore the random state afterwards, so that with dropout the training forward draws the same masks.
        devices = [] if self.device_name == "cpu" else [get_device_id()]
        with torch.random.fork_rng(devices, device_type=self.device_name):
            self.engine.infer_batch(view, loss_function=collect)
        return sum(collected[1:], start=collected[0])


def replace_actor_worker_class() -> None:
    """Replace verl's class attribute ``ActorRolloutRefWorker.actor_worker_cls`` by ``BAPOTrainingWorker``.

    This is a monkey patch, the only one that installs our worker. It is called from the ``__post_init__`` of the
    configs in ``policy_loss.py`` alone. verl builds the actor's config before it reads the attribute, so from then on
    every actor of this process gets our worker. Preflight builds the config too, in a process without a worker, so the
    attribute is also set there, where nobody reads it.

    Subclasses that verl itself defines (Tinker's) are not checked, because a process may import them without using
    them. If their worker calls the loss, the loss refuses.

    Raises:
        TypeError: a subclass of verl's worker, defined outside verl, sets another actor worker.
    """
    ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
    for subclass in ActorRolloutRefWorker.__subclasses__():
        own = subclass.actor_worker_cls
        if not issubclass(own, BAPOTrainingWorker) and not subclass.__module__.startswith("verl."):
            raise TypeError(
                f"{subclass.__qualname__} sets actor_worker_cls={own.__qualname__}, which does not find clip bounds: "
                "derive that class from recipe.bapo.worker.BAPOTrainingWorker."
            )
