# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: it wraps verl's engine, so that each optimizer update gets its clip bounds.

verl creates this worker instead of its own ``TrainingWorker`` wherever a config of ``recipe.bapo.policy_loss`` is used,
in any trainer and with any entry point. How the bounds are found is in ``scopes.py``, the loss that uses them in
``policy_loss.py``. With a policy loss that is not ours, the worker does what verl's worker does, bit for bit.
"""

from functools import partial
from importlib.metadata import version

import torch

from bapo import BAPOConfig
from recipe.bapo.compatibility import refuse_unusable_settings
from recipe.bapo.health import HealthLog
from recipe.bapo.marks import ON_POLICY_FIRST_UPDATE, TRAINER_VERSION, UPDATES_MADE, pop_mark
from recipe.bapo.scopes import SCOPES, BoundScope
from recipe.bapo.verl_fixes import detach_unused_entropy
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker with a search for the clip bounds of each update."""

    def __init__(self, config):
        super().__init__(config)
        self.verl_train_batch = self.engine.train_batch
        self.verl_optimizer_step = self.engine.optimizer_step
        self.scope: BoundScope | None = None  # None: verl's own loss
        self.health: HealthLog | None = None
        self.updates = 0  # since the process started
        self.updates_on_batch = 0  # on the current rollout batch
        self.on_policy = False  # whether every ratio of the next update is known to be 1
        self.logged: dict[str, float] = {}  # metrics of the current update that the loss does not return
        self.trainer_version = None
        self.token_dump_dir: str | None = None

    def set_loss_fn(self, loss_fn):
        """Set verl's loss function. If its config is one of ours, wrap it and add the search to each update.

        Raises:
            ValueError: our config comes with a function other than verl's ``ppo_loss``, or with settings that would
                make the bounds or the loss wrong, or the search fail.
        """
        self.engine.train_batch, self.engine.optimizer_step = self.verl_train_batch, self.verl_optimizer_step
        self.scope = self.health = None
        config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss = getattr(config, "policy_loss", None)
        searches = isinstance(policy_loss, BAPOConfig)
        self.token_dump_dir = getattr(policy_loss, "token_dump_dir", None)
        if not searches and self.token_dump_dir is None:
            super().set_loss_fn(loss_fn)
            return
        if loss_fn.func is not ppo_loss:
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss._target_={type(policy_loss).__qualname__} is not usable with the "
                f"loss function {loss_fn.func.__qualname__}: it needs verl's ppo_loss (distillation.enabled=false)."
            )
        if searches:
            refuse_unusable_settings(config, self.model_config)
            scope = SCOPES[policy_loss.bound_scope]
            record = self._record_of(policy_loss)
            self.scope = scope(config, self.engine, get_device_id(), self.device_name, record)
            self.health = HealthLog(bounds_can_move=not policy_loss.fixed)
        # An update begins in the engine's ``train_batch``: before it calls that, ``TrainingWorker.train_batch`` has
        # loaded the weights and decided how to split the mini-batch.
        self.engine.train_batch, self.engine.optimizer_step = self._train_engine, self._optimizer_step
        super().set_loss_fn(partial(self._compute_loss, loss_fn, config))

    def train_mini_batch(self, data):
        """Make all updates on one rollout batch or, in ``separate_async``, on a part of one."""
        self.updates_on_batch = pop_mark(data, UPDATES_MADE, 0)
        self.on_policy = pop_mark(data, ON_POLICY_FIRST_UPDATE, False)
        self.trainer_version = pop_mark(data, TRAINER_VERSION, None)
        if self.scope is not None and self.updates_on_batch == 0:
            self.scope.next_batch()
        output = super().train_mini_batch(data)
        if self.health is not None and self._is_first_rank_with_outputs():
            self.health.add(tu.get(output, "metrics"))
        return output

    def _train_engine(self, data, loss_function):
        """Make one optimizer update with verl's engine."""
        self.logged = {}
        if self.scope is not None:
            self.scope.before_update(data, self.updates_on_batch, self.on_policy)
        output = self.verl_train_batch(data, loss_function)
        if self.engine.is_mp_src_rank_with_outputs():
            # Each value is a list of one element, because verl's worker gathers lists of metrics from the ranks.
            output["metrics"] |= {name: [value] for name, value in self.logged.items()}
        self.on_policy = False
        self.updates += 1
        self.updates_on_batch += 1
        return output

    def _optimizer_step(self):
        if self.scope is not None:
            self.logged = self.scope.before_step()
        return self.verl_optimizer_step()

    def _compute_loss(self, loss_fn, config, model_output, data, dp_group=None):
        """Compute verl's loss of one micro-batch, after putting the bounds into its config, where it reads them."""
        model_output = detach_unused_entropy(model_output, config)
        if self.token_dump_dir is not None and self.engine.is_mp_src_rank_with_outputs():
            from recipe.bapo.micro_batches import dump_micro_batch

            dump_micro_batch(model_output, data, config, self.updates_on_batch, self.trainer_version)
        if self.scope is not None:
            find = self.scope.for_micro_batch if torch.is_grad_enabled() else self.scope.for_evaluation
            config.policy_loss.current_bounds = find(data, model_output["log_probs"].detach())
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _record_of(self, policy_loss):
        """Return the function that records an update's bounds, or None if there is no folder for it."""
        if policy_loss.bounds_record_dir is None:
            return None
        from recipe.bapo.records.bounds import BoundsRecord

        record = BoundsRecord(policy_loss.bounds_record_dir, self.rank)
        return lambda source, values: record.write(self.updates, source, values)

    def _is_first_rank_with_outputs(self):
        return self.engine.get_data_parallel_rank() == 0 and self.engine.is_mp_src_rank_with_outputs()


def replace_actor_worker_class() -> None:
    """Replace verl's class attribute ``ActorRolloutRefWorker.actor_worker_cls`` by ``BAPOTrainingWorker``.

    This is a monkey patch, the only one that installs our worker. It is called from the ``__post_init__`` of the
    configs in ``policy_loss.py`` alone. verl builds the actor's config before it reads the attribute, so from then on
    every actor of this process gets our worker. Preflight builds the config too, in a process without a worker, so the
    attribute is also set there, where nobody reads it.

    Subclasses that verl itself defines (Tinker's) are not checked, because a process may import them without using
    them. If their worker calls the loss, the loss refuses.

    Raises:
        TypeError: verl has no such attribute, or a subclass of verl's worker, defined outside verl, sets another actor
            worker.
    """
    if not hasattr(ActorRolloutRefWorker, "actor_worker_cls"):
        raise TypeError(
            f"verl {version('verl')} has no ActorRolloutRefWorker.actor_worker_cls, by which BAPO's worker is "
            "installed: use verl 0.9.1."
        )
    ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
    for subclass in ActorRolloutRefWorker.__subclasses__():
        own = subclass.actor_worker_cls
        if not issubclass(own, BAPOTrainingWorker) and not subclass.__module__.startswith("verl."):
            raise TypeError(
                f"{subclass.__qualname__} sets actor_worker_cls={own.__qualname__}, which does not find clip bounds: "
                "derive that class from recipe.bapo.worker.BAPOTrainingWorker."
            )
