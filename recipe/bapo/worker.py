# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: finds the clip bounds once per optimizer update, the same for all micro-batches and ranks.

verl makes it in the place of its own training worker wherever a config of ``recipe.bapo.policy_loss`` is used, in any
trainer and with any entry point. Change here how an update comes to its bounds; the loss that uses them is in
``policy_loss.py``. With any other policy loss it does what verl's worker does, bit for bit.
"""

import json
import logging
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from tensordict import TensorDict

from bapo import BAPOConfig, collect_clip_statistics, diagnose, read_and_validate, search_clip_bounds
from recipe.bapo.health import WINDOW, health_warnings
from recipe.bapo.records import keep_earlier
from recipe.bapo.records.tokens import write_dump
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

logger = logging.getLogger(__name__)

# Set on a batch by our trainer: its old log-probs were recomputed by the current weights, so that in the first update
# every ratio is 1.
RATIOS_START_AT_1 = "bapo_ratios_start_at_1"
# Set by our trainer where tokens are dumped: the version of the weights that sampled each response, and of those that
# the first update starts from.
ROLLOUT_VERSION, TRAINER_VERSION = "bapo_sampled_by", "bapo_trained_from"
# The number, on the whole rollout batch, of a batch's first update: above 0 where ``separate_async`` trains on parts.
FIRST_UPDATE = "bapo_first_update"
SEARCH_FIELDS = ("response_mask", "old_log_probs", "advantages")  # what the search reads of a batch
# What verl's losses read of ActorConfig, for the report's row of the run's own loss.
LOSS_SETTINGS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker, which finds the bounds of each update before verl trains with them.

    The statistics come from a forward without gradient over the mini-batch, and without a forward where every ratio is
    known to be 1; where the mini-batch is one micro-batch, or with ``bound_scope=micro_batch``, from the training
    forward itself.
    """

    def __init__(self, config):
        super().__init__(config)
        self.verl_update = self.engine.train_batch
        self.actor_config = None  # verl's ActorConfig where its policy loss is one of ours
        self.bapo_config: BAPOConfig | None = None
        self.update_bounds = None  # ``ClipBounds`` and ``Diagnostics``; None where the training forward finds them
        self.token_dump_dir = None
        self.updates = self.updates_on_batch = 0
        self.ratios_are_1 = False  # in the next update
        self.trainer_version = self.record_file = None
        self.recent_batches: list[dict[str, float]] = []  # metrics of the training calls since the last warnings

    def set_loss_fn(self, loss_fn):
        """Take verl's loss function; where its config is one of ours, wrap it and put our search before each update.

        Raises:
            ValueError: our config comes with another function than verl's ``ppo_loss``, or with settings under which
                bounds or loss would be wrong, or the search would fail.
        """
        config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss = getattr(config, "policy_loss", None)
        self.bapo_config = policy_loss if isinstance(policy_loss, BAPOConfig) else None
        self.token_dump_dir = getattr(policy_loss, "token_dump_dir", None)
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
        # verl's ``TrainingWorker.train_batch`` calls the engine's after it has set how the mini-batch is cut and has
        # loaded the weights: there the search belongs.
        self.engine.train_batch = self._search_and_update
        super().set_loss_fn(partial(self._compute_loss, loss_fn))

    def train_mini_batch(self, data):
        """All updates on one rollout batch or, in ``separate_async``, on a part of one."""
        self.updates_on_batch = tu.pop(data, key=FIRST_UPDATE, default=0)
        self.ratios_are_1 = tu.pop(data, key=RATIOS_START_AT_1, default=False)
        self.trainer_version = tu.pop(data, key=TRAINER_VERSION, default=None)
        output = super().train_mini_batch(data)
        if self.bapo_config is not None and self.rank == 0:
            self._warn(tu.get(output, "metrics"))
        return output

    def _search_and_update(self, data, loss_function):
        """One optimizer update by verl's engine, after the search for its bounds."""
        if self.bapo_config is not None:
            self.update_bounds = self._bounds_before_training(data)
        output = self.verl_update(data, loss_function)
        self.update_bounds, self.ratios_are_1 = None, False
        self.updates += 1
        self.updates_on_batch += 1
        return output

    def _warn(self, metrics):
        """Once in ``WINDOW`` calls of ``train_mini_batch``, log what their metrics say of the target and the bounds.

        A run of ``verl.trainer.main_ppo`` has no console of ours: this is its only warning.
        """
        prefixes = ("actor/bapo/", "actor/pg_")
        self.recent_batches.append({name: fmean(metrics[name]) for name in metrics if name.startswith(prefixes)})
        if len(self.recent_batches) == WINDOW:
            for text in health_warnings(self.recent_batches, not self.bapo_config.fixed, "training calls"):
                logger.warning("BAPO: %s", text)
            self.recent_batches.clear()

    def _compute_loss(self, loss_fn, model_output, data, dp_group=None):
        """verl's loss of one micro-batch, which finds the bounds of its update in its config."""
        entropy = model_output.get("entropy")
        if entropy is not None and self.actor_config.entropy_coeff == 0:
            # verl subtracts 0 times the entropy, whose backward would hold a (tokens, vocabulary) tensor.
            model_output = {**model_output, "entropy": entropy.detach()}
        if self.token_dump_dir is not None and self.engine.is_mp_src_rank_with_outputs():
            self._dump(model_output, data)  # the other ranks of its parallel group have the same tokens
        if self.bapo_config is not None:
            self.bapo_config.current_bounds = self.update_bounds or self._bounds_from_training_forward(
                model_output["log_probs"], data
            )
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _dump(self, model_output, data):
        """Add a micro-batch to the dump of its tokens, whichever loss trains."""
        tokens = _tokens_of(data, no_padding_2_padding(model_output["log_probs"].detach(), data))
        optional = {}
        if model_output.get("entropy") is not None:
            optional["entropy"] = no_padding_2_padding(model_output["entropy"].detach(), data)
        if ROLLOUT_VERSION in data.keys():
            optional["version"] = data[ROLLOUT_VERSION].view(-1, 1).expand_as(tokens["log_prob"])
        if "rollout_is_weights" in data.keys():
            optional["rollout_is_weights"] = data.select("rollout_is_weights").to_padded_tensor()["rollout_is_weights"]
        about = {name: data[name] for name in ("dp_size", "global_batch_size")}
        about |= {name: getattr(self.actor_config, name) for name in LOSS_SETTINGS}
        about["loss_mode"] = self.actor_config.policy_loss.loss_mode
        if self.bapo_config is not None:
            switches = {field.name: getattr(self.bapo_config, field.name) for field in fields(BAPOConfig)}
            about |= {"bound_scope": self.bapo_config.bound_scope, "switches": json.dumps(switches)}
        write_dump(
            self.token_dump_dir,
            **tokens,
            **optional,
            about=about,
            update=self.updates_on_batch,
            trainer_version=self.trainer_version,
        )

    def _bounds_before_training(self, data):
        """The bounds of this update; None where the training forward finds them."""
        if self.bapo_config.bound_scope == "micro_batch":
            return None
        # Known ratios come first: on a tie a real forward rounds otherwise, and what is logged would depend on the
        # micro-batch size.
        if self.ratios_are_1:
            statistics = self._statistics_of(_tokens_of(data.select(*SEARCH_FIELDS).to(get_device_id())))
            source = "ratio 1"
        elif self._is_one_micro_batch(data):
            return None
        else:
            statistics, source = self._collect_by_forward(data), "pass"
        found = self._search(statistics)
        # Non-finite input raises here: on all ranks together, before the first training forward.
        values = read_and_validate(*found)
        self._record(values, source)
        return found

    def _bounds_from_training_forward(self, log_probs, data):
        """The bounds of a micro-batch, or of an update that is one micro-batch, from its training forward."""
        tokens = _tokens_of(data, no_padding_2_padding(log_probs.detach(), data))
        found = self._search(self._statistics_of(tokens))
        # Without a record nothing is read here: the loss reads the bounds together with its metrics, in one transfer.
        if self.bapo_config.bounds_record_dir is not None:
            self._record(read_and_validate(*found), "loss")
        return found

    def _search(self, statistics):
        statistics = statistics.all_reduce(self.engine.get_data_parallel_group())
        bounds = search_clip_bounds(statistics, self.bapo_config)
        return bounds, diagnose(statistics, bounds)

    def _statistics_of(self, tokens):
        return collect_clip_statistics(**tokens, config=self.bapo_config, clip_ratio_c=self.actor_config.clip_ratio_c)

    def _is_one_micro_batch(self, data):
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        return not dynamic and len(data) == tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)

    def _collect_by_forward(self, data):
        collected = []

        def collect(model_output, data, dp_group=None):
            log_prob = no_padding_2_padding(model_output.pop("log_probs"), data)
            collected.append(self._statistics_of(_tokens_of(data, log_prob)))
            return log_prob.new_zeros(()), {}

        view = data.copy()  # shallow: what the pass sets does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        # With dropout the training forward draws its masks anew: from the same random state they are the same masks.
        devices = [] if self.device_name == "cpu" else [get_device_id()]
        with torch.random.fork_rng(devices, device_type=self.device_name):
            self.engine.infer_batch(view, loss_function=collect)
        return sum(collected[1:], start=collected[0])

    def _record(self, values, source):
        """Add a line to ``rank<N>.jsonl``: every value of ``read_and_validate`` in hexadecimal, exactly.

        ``update`` counts from the start of the process (with ``bound_scope=micro_batch`` several lines have the same);
        ``source`` is "pass", "ratio 1" where ratios were known, or "loss" where the training forward found the bounds.
        """
        folder = self.bapo_config.bounds_record_dir
        if folder is None:
            return
        if self.record_file is None:
            self.record_file = keep_earlier(Path(folder) / f"rank{self.rank}.jsonl")
        bits = {name: float(value).hex() for name, value in values.items()}
        with open(self.record_file, "a") as file:
            file.write(json.dumps({"update": self.updates, "source": source, **bits}) + "\n")


def _tokens_of(data: TensorDict, log_prob=None) -> dict:
    """What the search reads of a micro-batch, ``(B, T)`` each; ``log_prob`` is None where it equals the old one."""
    padded = data.select(*SEARCH_FIELDS).to_padded_tensor()
    old_log_prob = padded["old_log_probs"]
    return {
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob if log_prob is None else log_prob,
        "advantages": padded["advantages"],
        "response_mask": padded["response_mask"],
    }


def refuse_unusable_settings(actor_config, model_config) -> None:
    """Refuse settings under which the bounds or the loss would be wrong, or the search would fail.

    Args:
        actor_config, model_config: verl's ``ActorConfig`` and ``HFModelConfig``, or the config's section of the model.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    if actor_config.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={actor_config.strategy} is not usable with loss_mode=bapo: set it to "
            "fsdp or fsdp2. (In pipelines only the last stage calls the loss, and its collective would hang.)"
        )
    parallel = actor_config.engine.ulysses_sequence_parallel_size
    attention = model_config.override_config.get("attn_implementation", "flash_attention_2")
    if parallel > 1 and not str(attention).startswith("flash_attention"):
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={parallel} is not usable with "
            f"attn_implementation={attention}: verl exchanges the parts of a sequence in flash attention alone, and "
            "each GPU would silently attend to its own part. Install flash-attn, or set it to 1."
        )
    if actor_config.loss_agg_mode == "seq-mean-token-sum-norm" and actor_config.loss_scale_factor is None:
        raise ValueError(
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm is not usable with loss_scale_factor=null: "
            "verl divides by each micro-batch's padded width, so the loss would depend on the cut. Set "
            "actor_rollout_ref.actor.loss_scale_factor to a constant such as the maximum response length."
        )
    if actor_config.policy_loss.bound_scope == "mini_batch" and model_config.enable_activation_offload:
        raise ValueError(
            "actor_rollout_ref.model.enable_activation_offload=true is not usable with bound_scope=mini_batch: verl's "
            "offloading counts on a backward after every forward, and the search makes one without. Set it to false."
        )


def make_verl_use_our_worker() -> None:
    """Have verl make a ``BAPOTrainingWorker`` for every actor of this process: it sets an attribute of verl's class.

    verl reads ``actor_worker_cls``, which it offers to subclasses, after it has built the actor's config.

    Raises:
        TypeError: a subclass of verl's worker in this process has an actor's worker of its own.
    """
    ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
    for subclass in ActorRolloutRefWorker.__subclasses__():
        own = subclass.actor_worker_cls
        if not issubclass(own, BAPOTrainingWorker):
            raise TypeError(
                f"{subclass.__qualname__} trains with a worker of its own (actor_worker_cls={own.__qualname__}), which "
                "finds no clip bounds: derive that from recipe.bapo.worker.BAPOTrainingWorker."
            )
