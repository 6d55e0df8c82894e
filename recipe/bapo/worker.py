# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: finds the clip bounds once per optimizer update, the same for all micro-batches and ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import ray
import torch

from bapo import collect_clip_statistics, diagnose, find_clip_bounds, read_values, search_clip_bounds
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, bounds_from
from recipe.bapo.records import keep_earlier
from recipe.bapo.records.tokens import noting
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

# Set on a batch by the trainer: its old log-probs were recomputed by the current weights, so that in the first update
# every ratio is 1.
RATIOS_START_AT_1 = "bapo_ratios_start_at_1"
# Set where tokens are dumped: the version of the weights that sampled each response, and of those that the first update
# starts from.
SAMPLED_BY, TRAINED_FROM = "bapo_sampled_by", "bapo_trained_from"
SEARCHED = ("response_mask", "old_log_probs", "advantages")  # what the search reads of a batch


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker whose every update begins with the search for its bounds.

    The statistics come from a forward without gradient over the mini-batch, and without a forward where every ratio is
    known to be 1; where the mini-batch is one micro-batch, or with ``bound_scope=micro_batch``, from the training
    forward itself.
    """

    def __init__(self, config):
        super().__init__(config)
        self.updates = self.updates_on_batch = 0
        self.ratios_are_1 = False  # in the next update
        self.record_file = None

    def set_loss_fn(self, loss_fn):
        """Take verl's loss, a partial that carries the actor's config, and with it ours."""
        self.actor_config = loss_fn.keywords["config"]
        self.loss_config: BAPOPolicyLossConfig = self.actor_config.policy_loss
        super().set_loss_fn(loss_fn if self.loss_config.token_dump_dir is None else partial(_noting_planes, loss_fn))

    def train_mini_batch(self, data):
        """All updates on one rollout batch."""
        self.updates_on_batch = 0
        self.ratios_are_1 = tu.pop(data, key=RATIOS_START_AT_1, default=False)
        version = tu.pop(data, key=TRAINED_FROM, default=None)
        with noting(**({} if version is None else {"trainer_version": version})):
            return super().train_mini_batch(data)

    def train_batch(self, data):
        """One optimizer update: find the bounds, then let verl train with them."""
        self._set_defaults(data)
        found = self._find_bounds(data)
        found_in_loss = []

        def search_in_loss(*tensors):
            clip_ratio_c = self.actor_config.clip_ratio_c
            found_in_loss.append(find_clip_bounds(*tensors, self.loss_config, self._group(), clip_ratio_c))
            return found_in_loss[-1]

        finder = search_in_loss if found is None else lambda *tensors: found
        with bounds_from(finder), noting(update=self.updates_on_batch):
            output = super().train_batch(data)
        if self.loss_config.bounds_record_dir is not None:  # else these reads by the host would be for nothing
            for bounds, diagnostics in found_in_loss:
                self._record(read_values(bounds, diagnostics), "loss")
        self.ratios_are_1 = False
        self.updates += 1
        self.updates_on_batch += 1
        return output

    def _group(self):
        return self.engine.get_data_parallel_group()

    def _set_defaults(self, data):
        # As verl's train_batch does, but before our forward, which must cut the mini-batch as training will.
        defaults = dict(
            use_remove_padding=self.model_config.get("use_remove_padding", False),
            use_dynamic_bsz=self.engine_config.use_dynamic_bsz,
            max_token_len_per_gpu=self.engine_config.max_token_len_per_gpu,
            micro_batch_size_per_gpu=self.engine_config.micro_batch_size_per_gpu,
            use_fused_kernels=self.engine_config.use_fused_kernels,
        )
        tu.assign_non_tensor(data, **{key: value for key, value in defaults.items() if key not in data.keys()})

    def _find_bounds(self, data):
        """The bounds of this update and its diagnostics; None where the loss finds them."""
        if self.loss_config.bound_scope == "micro_batch":
            return None
        # First: on a tie a real forward rounds otherwise, and what is logged would depend on the micro-batch size.
        if self.ratios_are_1:
            statistics, source = self._collect_at_ratio_1(data), "ratio 1"
        elif self._is_one_micro_batch(data):
            return None
        else:
            statistics, source = self._collect_by_forward(data), "pass"
        statistics = statistics.all_reduce(self._group())
        bounds = search_clip_bounds(statistics, self.loss_config)
        diagnostics = diagnose(statistics, bounds)
        # read_values raises before the first training forward, on all ranks together.
        self._record(read_values(bounds, diagnostics), source)
        return bounds, diagnostics

    def _is_one_micro_batch(self, data):
        if not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            return len(data) == tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)
        # verl has gathered the length of every rank's sequences: no need to cut the batch, which takes collectives.
        lengths, rows = tu.get(data, key="global_token_num"), len(data)
        if lengths is None:
            return False
        limit = data["max_token_len_per_gpu"] * self.engine.ulysses_sequence_parallel_size
        return all(sum(lengths[first : first + rows]) <= limit for first in range(0, len(lengths), rows))

    def _collect_at_ratio_1(self, data):
        return self._statistics_of(data.select(*SEARCHED).to(get_device_id()))

    def _collect_by_forward(self, data):
        collected = []

        def collect(model_output, data, dp_group=None):
            log_prob = no_padding_2_padding(model_output.pop("log_probs"), data)
            collected.append(self._statistics_of(data, log_prob))
            return log_prob.new_zeros(()), {}

        view = data.copy()  # shallow: what the pass sets does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        # With dropout the training forward draws its masks anew: from the same random state they are the same masks.
        devices = [] if self.device_name == "cpu" else [get_device_id()]
        with (
            torch.random.fork_rng(devices, device_type=self.device_name),
            self.engine.train_mode(disable_auto_offload=tu.get(data, "disable_auto_offload", default=False)),
        ):
            self.engine.infer_batch(view, loss_function=collect)
        return sum(collected[1:], start=collected[0])

    def _statistics_of(self, data, log_prob=None):
        """Of one micro-batch; ``log_prob`` ``(B, T)`` is None where it equals the old one."""
        fields = data.select(*SEARCHED).to_padded_tensor()
        old_log_prob = fields["old_log_probs"]
        return collect_clip_statistics(
            old_log_prob,
            old_log_prob if log_prob is None else log_prob,
            fields["advantages"],
            fields["response_mask"],
            self.loss_config,
            clip_ratio_c=self.actor_config.clip_ratio_c,
        )

    def _record(self, values, source):
        folder = self.loss_config.bounds_record_dir
        if folder is None:
            return
        if self.record_file is None:
            self.record_file = keep_earlier(Path(folder) / f"rank{self.rank}.jsonl")
        bits = {name: float(value).hex() for name, value in values.items()}
        with open(self.record_file, "a") as file:
            file.write(json.dumps({"update": self.updates, "source": source, **bits}) + "\n")


def _noting_planes(loss_fn, model_output, data, dp_group=None):
    """verl's loss, whose dump then holds the entropy and the version of the weights, where they are known."""
    planes = {}
    if model_output.get("entropy") is not None:
        planes["entropy"] = no_padding_2_padding(model_output["entropy"], data)
    if SAMPLED_BY in data.keys():
        width = data.select("response_mask").to_padded_tensor()["response_mask"].shape[1]
        planes["version"] = data[SAMPLED_BY].view(-1, 1).expand(-1, width)
    with noting(**planes):
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)


class BAPOActorRolloutRefWorker(ActorRolloutRefWorker):
    """For the modes in which trainer and rollout share their devices."""

    actor_worker_cls = BAPOTrainingWorker


class BAPODetachActorWorker(DetachActorWorker):
    """For ``separate_async``, which saves and restores weights between updates."""

    actor_worker_cls = BAPOTrainingWorker


_REPLACEMENT = {ActorRolloutRefWorker: BAPOActorRolloutRefWorker, DetachActorWorker: BAPODetachActorWorker}


def bapo_worker_for(actor_class):
    """The Ray actor class of ours that takes the place of the one verl's trainer mode chose.

    Raises:
        TypeError: it is neither of the two that verl 0.9.1 uses.
    """
    chosen = actor_class.__ray_metadata__.modified_class.__mro__[1]  # Ray derives a class of its own
    if chosen not in _REPLACEMENT:
        raise TypeError(f"verl chose the worker {chosen.__qualname__}, which BAPO does not know: use verl 0.9.1.")
    return ray.remote(_REPLACEMENT[chosen])
