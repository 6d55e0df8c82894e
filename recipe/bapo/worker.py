# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: it finds the clip bounds of each optimizer update, the same for all micro-batches and ranks.

verl makes this worker in place of its own ``TrainingWorker`` wherever a config of ``recipe.bapo.policy_loss`` is used,
in any trainer and with any entry point. Change here how an update comes to its bounds; the loss that uses them is in
``policy_loss.py``. With a policy loss that is not ours, the worker does what verl's worker does, bit for bit.
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
    measure_clip_bounds,
    read_and_validate,
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

# Our trainer sets these on a batch. The worker needs none of them: without the first it makes a forward more, without
# the second it counts updates from 0 in each call, and without the third a dump does not know the weights' version.
ON_POLICY_FIRST_UPDATE = "bapo_on_policy_first_update"  # whether every ratio of the first update is 1
UPDATES_MADE = "bapo_updates_made"  # updates made on this rollout batch before; above 0 only in ``separate_async``
TRAINER_VERSION = "bapo_trained_from"  # version of the weights before the first update on this rollout batch


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker with a search for the clip bounds of each update.

    ``bound_scope`` says which tokens the search sees, and hence when it runs:

    * ``mini_batch``: the tokens of the update itself. They come from a forward without gradient before the first
      training forward. No such forward is needed where every ratio is known to be 1, or where the mini-batch is one
      micro-batch, whose training forward comes before its loss.
    * ``previous_batch``: the tokens of the same update on the rollout batch before. Each update leaves them to the next
      batch right before its optimizer step, when all its training forwards have been made.
    * ``micro_batch``: the tokens of the micro-batch, from its training forward.
    """

    def __init__(self, config):
        super().__init__(config)
        self.verl_train_batch = self.engine.train_batch
        self.verl_optimizer_step = self.engine.optimizer_step
        self.actor_config = None  # verl's ActorConfig, if its policy loss is one of ours
        self.bapo_config: BAPOConfig | None = None
        self.token_dump_dir = None
        self.update_bounds = None  # bounds of the update that is being made; None if the training forward finds them
        self.earlier_bounds: EarlierBounds | None = None  # set if bound_scope=previous_batch
        self.collected = None  # statistics of the micro-batches of the update that is being made
        self.logged: dict[str, list[float]] = {}  # metrics of the update that is being made, beside the loss's own
        self.updates = 0  # since the process began
        self.updates_on_batch = 0  # on the current rollout batch
        self.on_policy_update = False  # whether every ratio of the next update is known to be 1
        self.trainer_version = None
        self.record = None
        self.health = None

    def set_loss_fn(self, loss_fn):
        """Take verl's loss function. If its config is one of ours, wrap it and add the search to each update.

        Raises:
            ValueError: our config comes with a function other than verl's ``ppo_loss``, or with settings under which
                the bounds or the loss would be wrong or the search would fail.
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
        # ``TrainingWorker.train_batch`` calls the engine's ``train_batch`` once it has loaded the weights and set how
        # the mini-batch is cut, so this is where an update begins.
        self.engine.train_batch = self._train_engine
        super().set_loss_fn(partial(self._compute_loss, loss_fn))

    def train_mini_batch(self, data):
        """All updates on one rollout batch or, in ``separate_async``, on a part of one."""
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
        """One optimizer update by verl's engine, with its bounds."""
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
        """verl's loss of one micro-batch. It finds the bounds of its update in its config."""
        entropy = model_output.get("entropy")
        if entropy is not None and self.actor_config.entropy_coeff == 0:
            # verl subtracts 0 times the entropy, whose backward would hold a (tokens, vocabulary) tensor.
            model_output = {**model_output, "entropy": entropy.detach()}
        if self.token_dump_dir is not None and self.engine.is_mp_src_rank_with_outputs():
            dump_micro_batch(model_output, data, self.actor_config, self.updates_on_batch, self.trainer_version)
        if self.bapo_config is not None:
            log_probs = model_output["log_probs"].detach()
            self.bapo_config.current_bounds = self._bounds_of_micro_batch(log_probs, data)
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _bounds_before_training(self, data):
        """Bounds and diagnostics of this update before its first training forward; None if that forward finds them."""
        if self.earlier_bounds is not None:
            # Validated and logged right before the optimizer step, when the tokens of this update are known.
            return self.earlier_bounds.of_update(self.updates_on_batch), None
        if self.bapo_config.bound_scope == "micro_batch":
            return None
        # Known ratios come first: on a tie a real forward rounds differently, and the log would depend on how the
        # mini-batch is cut.
        if self.on_policy_update:
            tokens = tokens_of(data.select(*SEARCH_FIELDS).to(get_device_id()))
            stats, source = self._statistics_of(tokens), "on_policy"
        elif self._is_one_micro_batch(data):
            return None
        else:
            stats, source = self._collect_by_forward(data), "pass"
        found = bounds_from_statistics(stats, self.bapo_config, self.engine.get_data_parallel_group())
        # Invalid input raises here: on all ranks together, before the first training forward.
        self.record.write(self.updates, source, read_and_validate(*found))
        return found

    def _bounds_of_micro_batch(self, log_probs, data):
        """Bounds and diagnostics for the loss of one micro-batch."""
        if self.earlier_bounds is None and self.update_bounds is not None:
            return self.update_bounds
        if self.earlier_bounds is not None and not torch.is_grad_enabled():  # a loss that is evaluated, not trained
            return self.earlier_bounds.latest, None
        stats = self._statistics_of(tokens_of(data, no_padding_2_padding(log_probs, data)))
        if self.earlier_bounds is not None:
            self.collected = stats if self.collected is None else self.collected + stats
            return self.update_bounds
        found = bounds_from_statistics(stats, self.bapo_config, self.engine.get_data_parallel_group())
        # Without a record nothing is read here: the loss reads bounds and metrics in one transfer.
        if self.record.is_kept:
            self.record.write(self.updates, "loss", read_and_validate(*found))
        return found

    def _search_for_next_batch_and_step(self):
        """Right before the optimizer step: validate and log this update, and search the bounds that it leaves.

        Only one rank of each data-parallel share contributes its statistics, so that every token counts once. All ranks
        of the world take part in the collective, including those that never call the loss: they all hold the same
        bounds, and they all raise for invalid input while weights and optimizer state are unchanged.
        """
        stats = self.collected
        if stats is None or not self.engine.is_mp_src_rank_with_outputs():
            stats = empty_clip_statistics(self.bapo_config, get_device_id())
        stats = stats.all_reduce(torch.distributed.group.WORLD)
        used = measure_clip_bounds(stats, self.update_bounds[0], self.bapo_config)
        values = read_and_validate(used, diagnose(stats, used))
        self.record.write(self.updates, "previous_batch", values)
        # Lists of one element: verl's worker gathers a list of every metric from each rank.
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
        """The statistics of a mini-batch from a forward without gradient over all its micro-batches."""
        collected = []

        def collect(model_output, data, dp_group=None):
            log_prob = no_padding_2_padding(model_output.pop("log_probs"), data)
            collected.append(self._statistics_of(tokens_of(data, log_prob)))
            return log_prob.new_zeros(()), {}

        view = data.copy()  # shallow: what this forward sets does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        # With dropout, the training forward draws its masks from the same random state, and hence the same masks.
        devices = [] if self.device_name == "cpu" else [get_device_id()]
        with torch.random.fork_rng(devices, device_type=self.device_name):
            self.engine.infer_batch(view, loss_function=collect)
        return sum(collected[1:], start=collected[0])


def make_verl_use_our_worker() -> None:
    """Have verl make a ``BAPOTrainingWorker`` for every actor of this process: it sets an attribute of verl's class.

    verl reads ``actor_worker_cls``, which it offers to subclasses, after it has built the actor's config.

    Subclasses that verl itself defines (Tinker's) are left alone, because a process may import them without using them:
    the loss refuses to be called by their workers.

    Raises:
        TypeError: a subclass of verl's worker that verl does not define has an actor's worker of its own.
    """
    ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
    for subclass in ActorRolloutRefWorker.__subclasses__():
        own = subclass.actor_worker_cls
        if not issubclass(own, BAPOTrainingWorker) and not subclass.__module__.startswith("verl."):
            raise TypeError(
                f"{subclass.__qualname__} trains with a worker of its own (actor_worker_cls={own.__qualname__}), which "
                "finds no clip bounds: derive that from recipe.bapo.worker.BAPOTrainingWorker."
            )
