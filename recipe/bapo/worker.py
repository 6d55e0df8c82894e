# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: it wraps verl's engine, so that each optimizer update gets its clip bounds.

verl creates this worker instead of its own ``TrainingWorker`` wherever a config of ``recipe.bapo.policy_loss`` is used,
in any trainer and with any entry point. How the bounds are found is in ``scopes.py``, the loss that uses them in
``policy_loss.py``. With a policy loss that is not ours, the worker does what verl's worker does, bit for bit.
(Importing this module also applies the fix of ``verl_fixes.py`` for fused kernels.)
"""

import logging
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

import torch

from bapo import BAPOConfig
from recipe.bapo.advice import EVERY, advise
from recipe.bapo.marks import ON_POLICY_FIRST_UPDATE, STEP, UPDATES_MADE, pop_mark
from recipe.bapo.record import Record
from recipe.bapo.scopes import BoundScope, bounds_metrics, scope_class_of
from recipe.bapo.verl_fixes import detach_unused_entropy
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

logger = logging.getLogger(__name__)


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker with a search for the clip bounds of each update."""

    def __init__(self, config):
        super().__init__(config)
        self.verl_train_batch = self.engine.train_batch
        self.verl_optimizer_step = self.engine.optimizer_step
        self.scope: BoundScope | None = None  # None: nothing is searched
        self.record: Record | None = None
        self.calls = 0  # of ``train_mini_batch``, since the loss was set
        self.step: int | None = None  # the trainer's
        self.updates_on_batch = 0  # on the current rollout batch
        self.on_policy = False  # whether every ratio of the next update is to be taken as 1
        self.logged: dict[str, float] = {}  # the bounds of the current update and their metrics
        self.since_advice: list[dict[str, float]] = []  # the values of the updates since the last advice

    def set_loss_fn(self, loss_fn):
        """Set verl's loss function. If its config is one of ours, wrap it and add the search to each update.

        Raises:
            ValueError: BAPO's config comes with a function other than verl's ``ppo_loss``, or with settings that would
                make the bounds or the loss wrong, or the search fail. With ``MonitorConfig`` nothing raises.
        """
        self.engine.train_batch, self.engine.optimizer_step = self.verl_train_batch, self.verl_optimizer_step
        self.scope = self.record = None
        self.calls, self.since_advice = 0, []
        config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss = getattr(config, "policy_loss", None)
        if isinstance(policy_loss, BAPOConfig):
            self.scope = self._make_scope(loss_fn.func, config)
        if self.scope is None:
            super().set_loss_fn(loss_fn)
            return
        if policy_loss.record_dir is not None:
            self.record = Record(policy_loss.record_dir, policy_loss, self.scope.about())
        # An update begins in the engine's ``train_batch``: before it calls that, ``TrainingWorker.train_batch`` has
        # loaded the weights and decided how to split the mini-batch.
        self.engine.train_batch, self.engine.optimizer_step = self._train_engine, self._optimizer_step
        super().set_loss_fn(partial(self._compute_loss, loss_fn, config))

    def train_mini_batch(self, data):
        """Make all updates on one rollout batch or, in ``separate_async``, on a part of one."""
        self.updates_on_batch = pop_mark(data, UPDATES_MADE, 0)
        self.on_policy = pop_mark(data, ON_POLICY_FIRST_UPDATE, False)
        self.step = pop_mark(data, STEP, None)
        if self.scope is not None and self.updates_on_batch == 0:
            self.scope.next_batch()
        output = super().train_mini_batch(data)
        self.calls += 1
        if self.calls % EVERY == 0 and self.since_advice:
            window = f"the last {EVERY} training calls"
            found = advise(self.since_advice, asdict(self.scope.config), self.scope.about(), window)
            logger.warning("BAPO: %s", " ".join([found.text, *found.overrides]))
            self.since_advice = []
        return output

    def _make_scope(self, function, config) -> BoundScope | None:
        """Make what measures the updates of a loss; None if it is to be monitored and cannot be."""
        cls, scope_class = type(config.policy_loss), scope_class_of(config.policy_loss)
        ours = f"actor_rollout_ref.actor.policy_loss._target_={cls.__module__}.{cls.__qualname__}"
        try:
            if function is not ppo_loss:
                name = getattr(function, "__qualname__", function)
                raise ValueError(f"{ours} needs verl's ppo_loss (distillation.enabled=false), not {name}.")
            scope_class.refuse_unusable_settings(config, self.model_config)
            return scope_class(config, self.engine, get_device_id(), self.device_name)
        except Exception as error:
            if scope_class.applied:
                raise
            nothing = "BAPO's monitor: %s does nothing in this run: %s Training goes on without the monitor."
            logger.warning(nothing, ours, error)
            return None

    def _train_engine(self, data, loss_function):
        """Make one optimizer update with verl's engine."""
        self.logged = {}
        self.scope.before_update(data, self.updates_on_batch, self.on_policy)
        output = self.verl_train_batch(data, loss_function)
        if self.engine.is_mp_src_rank_with_outputs():
            # Each value is a list of one element, because verl's worker gathers lists of metrics from the ranks.
            output["metrics"] |= {name: [value] for name, value in self.logged.items()}
        self.on_policy = False
        self.updates_on_batch += 1
        return output

    def _optimizer_step(self):
        measured = self.scope.before_step()
        self.logged = bounds_metrics(measured.values, self.scope.applied)  # on every rank the same keys
        if self._is_first_rank_with_outputs():
            self._keep(measured)
        return self.verl_optimizer_step()

    def _compute_loss(self, loss_fn, config, model_output, data, dp_group=None):
        """Compute verl's loss of one micro-batch, after putting the bounds into its config, where it reads them."""
        find = self.scope.for_micro_batch if torch.is_grad_enabled() else self.scope.for_evaluation
        bounds = find(data, model_output["log_probs"].detach())
        if self.scope.applied:
            model_output = detach_unused_entropy(model_output, config)
            config.policy_loss.current_bounds = bounds
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _keep(self, measured):
        """Record an update, and keep its values for the next advice."""
        self.since_advice.append(measured.values)
        if self.record is not None:
            numbers = {"call": self.calls, "update": self.updates_on_batch, "step": self.step}
            self.record.write(measured.stats, measured.values, **numbers)

    def _is_first_rank_with_outputs(self):
        return self.engine.get_data_parallel_rank() == 0 and self.engine.is_mp_src_rank_with_outputs()


def replace_actor_worker_class() -> None:
    """Have verl make a ``BAPOTrainingWorker`` for every actor of this process, by setting its class attribute.

    The configs in ``policy_loss.py`` call this when they are built, which verl does before it reads the attribute.
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
    for subclass in ActorRolloutRefWorker.__subclasses__():
        own = vars(subclass).get("actor_worker_cls", BAPOTrainingWorker)  # else it inherits ours
        if not issubclass(own, BAPOTrainingWorker) and not subclass.__module__.startswith("verl."):
            raise TypeError(
                f"{subclass.__qualname__} sets actor_worker_cls={own.__qualname__}, which does not find clip bounds: "
                "derive that class from recipe.bapo.worker.BAPOTrainingWorker."
            )
    ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
