# SPDX-License-Identifier: Apache-2.0
"""Where the bounds of an update come from: one class for each ``bound_scope``, all with the same methods.

One more, ``Monitor``, leaves the loss as it is.

The worker calls them in this order: ``next_batch`` when a rollout batch begins; then for each update ``before_update``,
``for_micro_batch`` in the loss of each micro-batch, and ``before_step`` right before the optimizer's step.
``for_evaluation`` takes the place of ``for_micro_batch`` where a loss is computed without gradient, outside any update.
"""

import logging
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import torch
from tensordict import TensorDict

from bapo import (
    BoundsHistory,
    ClipStatistics,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    read_and_validate,
    read_scalars,
    remeasure,
    search_clip_bounds,
)
from recipe.bapo import compatibility
from recipe.bapo.own_clip import OwnClip, own_clip_of
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

logger = logging.getLogger(__name__)

SEARCH_FIELDS = ("response_mask", "old_log_probs", "advantages")  # the fields of a batch that the search reads
Bounds = tuple[float, float]  # c_low and c_high


@dataclass(frozen=True)
class Measured:
    """The tokens of an update over all ranks, with its bounds and what they do.

    Attributes:
        stats: sums of the tokens, on the host.
        values: bounds and metrics by name, as ``bapo.read_and_validate`` returns them; with ``MicroBatch`` means over
            the micro-batches. ``Monitor`` has ``invalid_tokens`` alone where input was not finite, and nothing where
            tokens could not be collected.
    """

    stats: ClipStatistics
    values: dict[str, float]

    @property
    def bounds(self) -> Bounds:
        """The bounds that the update uses."""
        return self.values["low"], self.values["high"]


class BoundScope:
    """Finds the bounds of each update; see the module for the order of the calls.

    Attributes:
        applied: whether the loss takes the bounds.

    Args:
        actor_config: verl's ``ActorConfig`` with one of our policy-loss configs.
        engine: verl's training engine.
        device: the device of this rank, as verl's ``get_device_id`` gives it.
        device_name: ``cpu`` or ``cuda``.
    """

    applied = True
    own_clip: OwnClip | None = None  # what another loss than BAPO's clips
    refuse_unusable_settings = staticmethod(compatibility.refuse_unusable_settings)

    def __init__(self, actor_config, engine, device, device_name="cpu"):
        self.config, self.clip_ratio_c = actor_config.policy_loss, actor_config.clip_ratio_c
        self.strategy = actor_config.strategy
        self.engine, self.device, self.device_name = engine, device, device_name

    def about(self) -> dict:
        """Return what the first line of the record says of the run's loss."""
        return {
            "loss_mode": self.config.loss_mode,
            "applied": self.applied,
            "clip_ratio_c": self.clip_ratio_c,
            "strategy": self.strategy,
        }

    def next_batch(self) -> None:
        """Begin a rollout batch."""

    def before_update(self, data: TensorDict, position: int, on_policy: bool) -> None:
        """Begin an update, with nothing left of the last one.

        Args:
            data: this rank's part of the mini-batch.
            position: number of the update on its rollout batch, from 0.
            on_policy: whether every ratio is to be taken as 1; only ``MiniBatch`` uses it.
        """

    def for_micro_batch(self, data: TensorDict, log_probs: torch.Tensor) -> Bounds | None:
        """Return the bounds for the loss of a micro-batch; ``log_probs`` are those of its training forward."""
        raise NotImplementedError

    def for_evaluation(self, data: TensorDict, log_probs: torch.Tensor) -> Bounds | None:
        """Return the bounds for a loss that is not trained on: a search over the tokens of the micro-batch."""
        return self._search(self._collect(data, log_probs)).bounds

    def before_step(self) -> Measured:
        """Finish the update before the optimizer's step."""
        raise NotImplementedError

    def _collect(self, data, log_probs=None) -> ClipStatistics:
        """Collect the statistics of a batch; without ``log_probs`` every ratio is 1."""
        log_prob = None if log_probs is None else no_padding_2_padding(log_probs, data)
        tokens, own_clip = tokens_of(data, log_prob), self.own_clip
        return collect_clip_statistics(**tokens, config=self.config, clip_ratio_c=self.clip_ratio_c, own_clip=own_clip)

    def _search(self, stats) -> Measured:
        """Search over the tokens of all data-parallel ranks. For invalid input this raises on all of them together."""
        stats = stats.all_reduce(self.engine.get_data_parallel_group()).to("cpu")
        bounds = search_clip_bounds(stats, self.config)
        return Measured(stats, read_and_validate(bounds, diagnose(stats, bounds)))


class MiniBatch(BoundScope):
    """Algorithm 1: the tokens of the update itself.

    Their log-probs come from a forward pass without gradient before the first training forward. It is skipped if every
    ratio is to be taken as 1, and if the mini-batch is a single micro-batch, whose training forward has all log-probs.
    """

    def before_update(self, data, position, on_policy):
        self.found: Measured | None = None
        # If all ratios are 1, use that instead of a real forward, which would round differently: where rho equals the
        # target exactly, the bounds would depend on how the mini-batch is split.
        if on_policy:
            self.found = self._search(self._collect(data.select(*SEARCH_FIELDS).to(self.device)))
        elif not self._is_one_micro_batch(data):
            self.found = self._search(self._collect_by_forward(data))

    def for_micro_batch(self, data, log_probs):
        if self.found is None:  # the mini-batch is this micro-batch
            self.found = self._search(self._collect(data, log_probs))
        return self.found.bounds

    def before_step(self):
        return self.found

    def _is_one_micro_batch(self, data):
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        return not dynamic and len(data) == tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)

    def _collect_by_forward(self, data):
        """Collect the statistics of a mini-batch by a forward without gradient over all its micro-batches."""
        collected = []

        def collect(model_output, data, dp_group=None):
            # Taken out of the output, because verl's engine keeps the outputs of all micro-batches.
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
    """The authors' code: the tokens of the micro-batches that the ranks train on at the same time.

    An update has many of these searches, so what it logs is their mean.
    """

    def before_update(self, data, position, on_policy):
        self.found: list[Measured] = []

    def for_micro_batch(self, data, log_probs):
        self.found.append(self._search(self._collect(data, log_probs)))
        return self.found[-1].bounds

    def before_step(self):
        first, *others = [found.stats for found in self.found]
        means = {name: fmean(found.values[name] for found in self.found) for name in self.found[0].values}
        return Measured(sum(others, start=first), means)


class _SumsTrainingForwards(BoundScope):
    """Adds up the tokens of an update's training forwards, and reduces them once, before the optimizer's step."""

    collected: ClipStatistics | None = None  # of the micro-batches of this update so far

    def before_update(self, data, position, on_policy):
        self.collected = None

    def _add(self, data, log_probs):
        stats = self._collect(data, log_probs)
        self.collected = stats if self.collected is None else self.collected + stats

    def _reduce(self) -> ClipStatistics:
        """Add the sums of all ranks, and copy them to the host.

        Of the ranks that work on the same data, only one contributes sums, so that every token counts once. All ranks
        of the world take part in the collective, including those that never call the loss. So all of them hold the same
        sums, and all of them raise for invalid input while weights and optimizer state are still unchanged.
        """
        stats = self.collected
        if stats is None or not self.engine.is_mp_src_rank_with_outputs():
            stats = empty_clip_statistics(self.config, self.device)
        return stats.all_reduce(torch.distributed.group.WORLD).to("cpu")


class PreviousBatch(_SumsTrainingForwards):
    """The tokens of the same update on the previous rollout batch, without an extra forward pass.

    Right before its optimizer step, when all its training forwards are done, an update searches bounds for the same
    update on the next batch. The history starts empty, also where a run is resumed: see ``BoundsHistory``.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = BoundsHistory(self.config)
        self.position, self.used = 0, self.history.latest  # of this update

    def next_batch(self):
        self.history.next_batch()

    def before_update(self, data, position, on_policy):
        super().before_update(data, position, on_policy)
        self.position, self.used = position, self.history.get(position)

    def for_micro_batch(self, data, log_probs):
        self._add(data, log_probs)
        return self.used.low.item(), self.used.high.item()

    def for_evaluation(self, data, log_probs):
        return self.history.latest.low.item(), self.history.latest.high.item()

    def before_step(self):
        """Measure and validate this update, and search bounds for the next rollout batch."""
        stats = self._reduce()
        used = remeasure(stats, self.used, self.config)
        measured = Measured(stats, read_and_validate(used, diagnose(stats, used)))
        found = search_clip_bounds(stats, self.config)
        self.history.put(self.position, found if found.searched else None)
        return measured


class Monitor(_SumsTrainingForwards):
    """Measures what BAPO would do in a run with any of verl's losses, and changes nothing: ``MonitorConfig``.

    If the tokens of a micro-batch cannot be collected on a rank, that is logged once, the rank still takes part in the
    collective, and the update counts as not measured.
    """

    applied = False
    refuse_unusable_settings = staticmethod(compatibility.refuse_to_monitor)

    def __init__(self, actor_config, *args, **kwargs):
        super().__init__(actor_config, *args, **kwargs)
        self.own_clip = own_clip_of(actor_config)
        self.warned: set[str] = set()

    def about(self):
        return {**super().about(), "own_clip": None if self.own_clip is None else asdict(self.own_clip)}

    def for_micro_batch(self, data, log_probs):
        try:
            self._add(data, log_probs)
        except Exception as error:  # whatever it is, the run goes on
            reason = f"{type(error).__name__}: {error}"
            self._warn("collect", f"the tokens of a micro-batch could not be measured ({reason})")
            nothing = empty_clip_statistics(self.config, self.device)
            self.collected = replace(nothing, sums=nothing.sums._replace(uncollected=nothing.sums.uncollected + 1))

    def for_evaluation(self, data, log_probs):
        return None

    def before_step(self):
        stats = self._reduce()
        if stats.sums.uncollected > 0:
            return Measured(stats, {})
        bounds = search_clip_bounds(stats, self.config)
        values = read_scalars(vars(bounds) | vars(diagnose(stats, bounds)) | self._own_shares(stats))
        invalid = values.pop("invalid_log_probs") + values.pop("invalid_advantages")
        if invalid:
            self._warn("invalid", f"{invalid:.0f} log-probs or advantages of response tokens are not finite")
            return Measured(stats, {"invalid_tokens": invalid})
        unusable = values.pop("invalid_old_log_probs")  # their share stays, as masked_token_fraction
        if unusable:
            self._warn("masked", f"{unusable:.0f} response tokens without a usable old log-prob are left out")
        return Measured(stats, values | {"invalid_tokens": 0.0})

    def _own_shares(self, stats):
        """Return the share of the tokens of each sign that the run's own loss clips or caps."""
        if self.own_clip is None:
            return {}
        positive, negative = (tokens.clamp(min=1) for tokens in stats.tokens_by_sign)
        name = f"own_{self.own_clip.kind}frac"
        return {
            f"{name}_positive": stats.sums.own_clipped_positive / positive,
            f"{name}_negative": stats.sums.own_clipped_negative / negative,
        }

    def _warn(self, kind, text):
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("BAPO's monitor: %s. Training goes on as without the monitor.", text)


SCOPES = {"mini_batch": MiniBatch, "previous_batch": PreviousBatch, "micro_batch": MicroBatch}


def scope_class_of(policy_loss) -> type[BoundScope]:
    """Return the class for one of our policy-loss configs."""
    return SCOPES[policy_loss.bound_scope] if policy_loss.loss_mode == "bapo" else Monitor


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


def bounds_metrics(values: dict[str, float], applied: bool) -> dict[str, float]:
    """Map the values of an update to the keys that verl logs, ``actor/bapo/...``, and add ``applied``.

    The bounds are ``clip_low`` and ``clip_high`` there; all other names stay.
    """
    names = {"low": "clip_low", "high": "clip_high"}
    named = {names.get(name, name): value for name, value in values.items()}
    return {f"actor/bapo/{name}": value for name, value in {**named, "applied": float(applied)}.items()}
