# SPDX-License-Identifier: Apache-2.0
"""Where the bounds of an update come from: one class for each ``bound_scope``, all with the same methods.

The worker calls them in this order: ``next_batch`` when a rollout batch begins; then for each update ``before_update``,
``for_micro_batch`` in the loss of each micro-batch, and ``before_step`` right before the optimizer's step.
``for_evaluation`` takes the place of ``for_micro_batch`` where a loss is computed without gradient, outside any update.
"""

import torch
from tensordict import TensorDict

from bapo import (
    BoundsHistory,
    ClipBounds,
    ClipStatistics,
    Diagnostics,
    bounds_from_statistics,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    read_and_validate,
    remeasure,
    search_clip_bounds,
)
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

SEARCH_FIELDS = ("response_mask", "old_log_probs", "advantages")  # the fields of a batch that the search reads
Found = tuple[ClipBounds, Diagnostics | None]  # without diagnostics, ``before_step`` validates and logs the update


class BoundScope:
    """Finds the bounds of each update; see the module for the order of the calls.

    Args:
        actor_config: verl's ``ActorConfig`` with one of our policy-loss configs.
        engine: verl's training engine.
        device: the device of this rank, as verl's ``get_device_id`` gives it.
        device_name: ``cpu`` or ``cuda``.
        record: called with the source of the bounds and their values, by name; None: nothing is recorded.
    """

    def __init__(self, actor_config, engine, device, device_name="cpu", record=None):
        self.config, self.clip_ratio_c = actor_config.policy_loss, actor_config.clip_ratio_c
        self.engine, self.device, self.device_name, self.record = engine, device, device_name, record

    def next_batch(self) -> None:
        """Begin a rollout batch."""

    def before_update(self, data: TensorDict, position: int, on_policy: bool) -> None:
        """Begin an update, with nothing left of the last one.

        Args:
            data: this rank's part of the mini-batch.
            position: number of the update on its rollout batch, from 0.
            on_policy: whether every ratio is known to be 1.
        """

    def for_micro_batch(self, data: TensorDict, log_probs: torch.Tensor) -> Found:
        """Return the bounds for the loss of a micro-batch; ``log_probs`` are those of its training forward."""
        raise NotImplementedError

    def for_evaluation(self, data: TensorDict, log_probs: torch.Tensor) -> Found:
        """Return the bounds for a loss that is not trained on: a search over the tokens of the micro-batch."""
        return self._search(self._collect(data, log_probs))

    def before_step(self) -> dict[str, float]:
        """Finish the update before the optimizer's step. Returns metrics that the loss could not know."""
        return {}

    def _collect(self, data, log_probs=None) -> ClipStatistics:
        """Collect the statistics of a batch; without ``log_probs`` every ratio is 1."""
        log_prob = None if log_probs is None else no_padding_2_padding(log_probs, data)
        return collect_clip_statistics(**tokens_of(data, log_prob), config=self.config, clip_ratio_c=self.clip_ratio_c)

    def _search(self, stats) -> tuple[ClipBounds, Diagnostics]:
        """Search over the tokens of all data-parallel ranks."""
        return bounds_from_statistics(stats, self.config, self.engine.get_data_parallel_group())

    def _search_micro_batch(self, data, log_probs) -> Found:
        found = self._search(self._collect(data, log_probs))
        # Read on the host only for the record. The loss reads bounds and metrics in one transfer of its own.
        if self.record is not None:
            self.record("loss", read_and_validate(*found))
        return found


class MiniBatch(BoundScope):
    """Algorithm 1: the tokens of the update itself.

    Their log-probs come from a forward pass without gradient before the first training forward. It is skipped if every
    ratio is known to be 1, and if the mini-batch is a single micro-batch, whose training forward has all log-probs.
    """

    found: Found | None = None

    def before_update(self, data, position, on_policy):
        self.found = None
        # If all ratios are known to be 1, use that instead of a real forward. On a tie the forward would round
        # differently, and the log would depend on how the mini-batch is split.
        if on_policy:
            stats, source = self._collect(data.select(*SEARCH_FIELDS).to(self.device)), "on_policy"
        elif self._is_one_micro_batch(data):
            return
        else:
            stats, source = self._collect_by_forward(data), "pass"
        self.found = self._search(stats)
        # For invalid input this raises on all ranks together, before the first training forward.
        values = read_and_validate(*self.found)
        if self.record is not None:
            self.record(source, values)

    def for_micro_batch(self, data, log_probs):
        return self.found or self._search_micro_batch(data, log_probs)

    def _is_one_micro_batch(self, data):
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        return not dynamic and len(data) == tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)

    def _collect_by_forward(self, data):
        """Collect the statistics of a mini-batch by a forward without gradient over all its micro-batches."""
        collected = []

        def collect(model_output, data, dp_group=None):
            log_probs = model_output.pop("log_probs")
            collected.append(self._collect(data, log_probs))
            return log_probs.values().new_zeros(()), {}

        view = data.copy()  # a shallow copy, so that the setting below does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        # Restore the random state afterwards, so that with dropout the training forward draws the same masks.
        devices = [] if self.device_name == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device_name):
            self.engine.infer_batch(view, loss_function=collect)
        return sum(collected[1:], start=collected[0])


class MicroBatch(BoundScope):
    """The authors' code: the tokens of the micro-batch alone, from its training forward."""

    def for_micro_batch(self, data, log_probs):
        return self._search_micro_batch(data, log_probs)


class PreviousBatch(BoundScope):
    """The tokens of the same update on the previous rollout batch, without an extra forward pass.

    Right before its optimizer step, when all its training forwards are done, an update searches bounds for the same
    update on the next batch.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = BoundsHistory(self.config, self.device)
        self.collected: ClipStatistics | None = None  # of the micro-batches of this update so far

    def next_batch(self):
        self.history.next_batch()

    def before_update(self, data, position, on_policy):
        self.position, self.used = position, self.history.get(position)
        self.collected = None

    def for_micro_batch(self, data, log_probs):
        stats = self._collect(data, log_probs)
        self.collected = stats if self.collected is None else self.collected + stats
        return self.used, None

    def for_evaluation(self, data, log_probs):
        return self.history.latest, None

    def before_step(self):
        """Validate and log this update, and search bounds for the next rollout batch.

        Of the ranks that work on the same data, only one contributes statistics, so that every token counts once. All
        ranks of the world take part in the collective, including those that never call the loss. So all of them hold
        the same bounds, and all of them raise for invalid input while weights and optimizer state are still unchanged.
        """
        stats = self.collected
        if stats is None or not self.engine.is_mp_src_rank_with_outputs():
            stats = empty_clip_statistics(self.config, self.device)
        stats = stats.all_reduce(torch.distributed.group.WORLD)
        used = remeasure(stats, self.used, self.config)
        found = search_clip_bounds(stats, self.config)
        values = read_and_validate(used, diagnose(stats, used), found=found.searched)
        self.history.put(self.position, found if values.pop("found") else None)
        if self.record is not None:
            self.record("previous_batch", values)
        return bounds_metrics(values)


SCOPES = {"mini_batch": MiniBatch, "previous_batch": PreviousBatch, "micro_batch": MicroBatch}


def tokens_of(data: TensorDict, log_prob: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return the token tensors that ``bapo.collect_clip_statistics`` takes, ``(B, T)`` each.

    Args:
        data: a micro-batch or a whole mini-batch in verl's jagged layout.
        log_prob: padded log-probs under the policy that is trained, ``(B, T)``. None: equal to the old ones.
    """
    padded = data.select(*SEARCH_FIELDS).to_padded_tensor()
    old_log_prob = padded["old_log_probs"]
    return {
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob if log_prob is None else log_prob,
        "advantages": padded["advantages"],
        "response_mask": padded["response_mask"],
    }


def bounds_metrics(values: dict[str, float]) -> dict[str, float]:
    """Map the values of ``bapo.read_and_validate`` to the keys that verl logs, ``actor/bapo/...``.

    Of ``met_at_start``, ``met_by_moving`` and ``saturated`` one is 1. All are 0 if no search gave the bounds.
    """
    values = dict(values)
    searched, moved = values.pop("searched"), values["search_steps"] > 0
    met = searched and not values["saturated"]
    values |= {"clip_low": values.pop("low"), "clip_high": values.pop("high")}
    values |= {"met_at_start": float(met and not moved), "met_by_moving": float(met and moved)}
    return {f"actor/bapo/{name}": value for name, value in values.items()}
