# SPDX-License-Identifier: Apache-2.0
"""Where the bounds of an update come from: one class for each ``bound_scope``. ``monitor.py`` has one more.

The worker calls ``update`` in place of verl's forwards and backwards of an optimizer update. While these run, verl
calls the loss of each micro-batch, and the loss asks ``for_micro_batch`` for its bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bapo import (
    BAPOConfig,
    BoundsForecaster,
    ClipBounds,
    ClipStatistics,
    EntropySums,
    Forecast,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    is_clipped,
    is_usable,
    read_and_validate,
    same_tokens_are_clipped,
    search_clip_bounds,
)
from recipe.bapo.hook.compatibility import refuse_unusable_settings
from recipe.bapo.hook.engine_state import EngineState, can_be_restored
from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.tell import Guard
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.utils.padding import no_padding_2_padding

SEARCH_FIELDS = ("response_mask", "old_log_probs", "advantages")  # the fields of a batch that the search reads
Bounds = tuple[float, float]  # c_low and c_high
Tokens = tuple[Tensor, Tensor, Tensor, Tensor]  # old log-probs, log-probs, advantages and mask, (B, T) each
Pass = Callable[[], dict]  # verl's forwards and backwards of an update; returns the engine's output


@dataclass(frozen=True)
class Measurement:
    """The tokens of an update over all ranks, with its bounds and what they do.

    Attributes:
        stats: sums of the tokens, on the host.
        metrics: bounds and metrics by name, as ``bapo.read_and_validate`` returns them, with ``entropy_covariance``,
            and with ``extra_forward`` and ``redone``: 1 if a forward pass was run to find the bounds, and if forwards
            and backwards were run twice, otherwise 0. With ``MicroBatch`` they are means over the micro-batches.
    """

    stats: ClipStatistics
    metrics: dict[str, float]


class BoundScope:
    """Finds the bounds of each update, and runs its forwards and backwards with them.

    Attributes:
        applied: whether the loss takes the bounds.
        latest: the bounds of the latest update, for a loss that is computed outside an update; before the first update
            the start of both ranges. None: the loss takes none.
        measurement: that of the latest update; None if a monitor could not make it.

    Args:
        actor_config: verl's config of the actor, with one of our policy-loss configs.
        model_config: verl's config of the model.
        engine: verl's training engine.
        device: the device of this rank, as verl's ``get_device_id`` gives it.
        guard: turns an error that must not end the run into a line for the user.

    Raises:
        ValueError: the settings cannot be used.
    """

    measurement: Measurement | None = None
    applied = True
    own_clip: OwnClip | None = None  # what another loss than BAPO's clips
    refuse: Callable[[Any, Any], None] = staticmethod(refuse_unusable_settings)

    def __init__(
        self,
        actor_config: ActorConfig,
        model_config: HFModelConfig,
        engine: BaseEngine,
        device: torch.device | str | int,
        guard: Guard,
    ):
        self.refuse(actor_config, model_config)
        policy_loss: Any = actor_config.policy_loss  # verl's type does not know our options
        # A plain copy: to build a config of verl's, as ``replace`` does, would install our worker again.
        self.config = BAPOConfig(**{option.name: getattr(policy_loss, option.name) for option in fields(BAPOConfig)})
        self.loss_mode, self.strategy = policy_loss.loss_mode, actor_config.strategy
        self.clip_ratio_c = actor_config.clip_ratio_c
        self.engine, self.device, self.guard = engine, device, guard
        self.forecaster = BoundsForecaster(self.config)
        # On FSDP verl's activation offload expects a backward after every forward, so no forward alone can be made.
        self.can_make_forward = self.strategy == "megatron" or not model_config.enable_activation_offload
        self.can_repeat = can_be_restored(engine)
        self.nothing = empty_clip_statistics(self.config, device)  # of a rank that adds no tokens
        self.pass_stats: ClipStatistics | None = None  # of this rank's micro-batches in the current pass so far
        self.latest: Bounds | None = (self.config.ratio_lower_start, self.config.ratio_upper_start)

    def about(self) -> dict:
        """Return what the first line of the record says of the run's loss."""
        return {
            "loss_mode": self.loss_mode,
            "applied": self.applied,
            "clip_ratio_c": self.clip_ratio_c,
            "strategy": self.strategy,
        }

    def update(self, data: TensorDict, position: int, on_policy: bool, run_pass: Pass) -> dict:
        """Run the forwards and backwards of an update with its bounds, and return what verl's engine returns for it.

        When this returns, the gradients are those of the whole mini-batch, ``measurement`` is that of this update, and
        the optimizer's step may follow.

        Args:
            data: this rank's part of the mini-batch.
            position: number of updates since the rollout servers got their weights, which is the position on the
                rollout batch where they get them after each batch.
            on_policy: whether every ratio is to be taken as 1.
            run_pass: runs the forwards and backwards, and adds to the gradients.

        Raises:
            ValueError: log-probs or advantages are not finite; on all ranks together, before the optimizer's step.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Keep what later losses need of the update, now that the optimizer's step was made."""

    def for_micro_batch(self, data: TensorDict, log_probs: Tensor) -> Bounds | None:
        """Return the bounds for the loss of a micro-batch; ``log_probs`` are those of its training forward."""
        raise NotImplementedError

    def cut(self, tokens: Tokens, bounds: Bounds | None) -> Tensor | None:
        """Return which tokens the run's loss clips or caps, ``(B, T)``; None if its limits are not known.

        Args:
            tokens: as ``tokens_of`` returns them.
            bounds: those of the loss, if it takes any.
        """
        old, new, advantages, mask = tokens
        if bounds is not None:
            return is_clipped(old, new, advantages, *bounds, self.clip_ratio_c)
        if self.own_clip is None:
            return None
        return self.own_clip(old, new, advantages, mask.bool() & is_usable(old))[1]

    def _sums_of(self, data: TensorDict, log_probs: Tensor | None = None) -> ClipStatistics:
        """Sum the tokens of a batch of this rank; without ``log_probs`` every ratio is 1."""
        tokens = tokens_of(data, log_probs)
        return collect_clip_statistics(*tokens, self.config, self.clip_ratio_c, self.own_clip)

    def _add_micro_batch(self, data: TensorDict, log_probs: Tensor) -> None:
        """Add the tokens of a micro-batch to ``pass_stats``."""
        sums = self._sums_of(data, log_probs)
        self.pass_stats = sums if self.pass_stats is None else self.pass_stats + sums

    def _reduce(self, sums: ClipStatistics | None) -> ClipStatistics:
        """Add the sums of all ranks, and copy them to the host.

        Of the ranks that work on the same data, only one contributes sums, so that every token counts once. All ranks
        of the world take part in the collective, including those that never call the loss, such as the earlier stages
        of a pipeline. So all of them hold the same sums, decide alike, and raise together.
        """
        if sums is None or not self.engine.is_mp_src_rank_with_outputs():
            sums = self.nothing
        return sums.all_reduce(torch.distributed.group.WORLD).to("cpu")

    def _measure(self, stats: ClipStatistics, bounds: ClipBounds, **costs: float) -> Measurement:
        """Measure what bounds do to the tokens of reduced sums.

        Args:
            stats: sums over all ranks.
            bounds: those of the loss.
            costs: ``extra_forward`` and ``redone`` where they are not 0.

        Raises:
            ValueError: a log-prob or an advantage is not finite, or too few old log-probs are usable.
        """
        values = read_and_validate(bounds, diagnose(stats, bounds))
        values["entropy_covariance"] = stats.entropy_sums(bounds.low, bounds.high).covariance.item()
        return Measurement(stats, values | {"extra_forward": 0.0, "redone": 0.0} | costs)

    def _trains_at_once(self, forecast: Forecast) -> bool:
        """Whether an update trains with a forecast at once. Otherwise a forward pass comes first.

        One of the two is always possible: a forward, which activation offload rules out on FSDP, or to recompute the
        update, which FP8 and CUDA graphs rule out on Megatron.
        """
        if not self.can_make_forward:
            return True
        return forecast.trusted and (self.can_repeat or self.config.fixed)

    def _is_one_micro_batch(self, data: TensorDict) -> bool:
        """Whether the mini-batch is a single micro-batch, whose training forward has all log-probs before the loss.

        The search is then made in the loss. On Megatron it is not, because the earlier stages of a pipeline, which
        never call the loss, would not join its collective. verl gives every rank as many rows, so all ranks agree.
        """
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)
        return self.strategy != "megatron" and not dynamic and len(data) == size


class MiniBatch(BoundScope):
    """Algorithm 1: the bounds of an update are found on all of its own tokens, which are known only after a forward.

    1. Forecast the bounds.
    2. If the forecast is not trusted, run a forward pass without gradient, find the exact bounds, and train with them.
    3. Otherwise train with the forecast bounds, and find the exact bounds on the sums of the training forwards.
    4. If these clip other tokens, run forwards and backwards again with the exact bounds.

    ``bapo.forecast`` says why the gradient is exact in each case.
    """

    measurement: Measurement
    bounds: Bounds | None = None  # of the current pass; None: the loss finds them
    sums_tokens = False  # whether the current pass adds up its tokens

    def update(self, data: TensorDict, position: int, on_policy: bool, run_pass: Pass) -> dict:
        if on_policy:
            # Every ratio is taken as 1, so no forward is needed. Its rounding would also differ for every way to split
            # the mini-batch and, where rho equals the target exactly, decide the bounds.
            at_ratio_1 = self._reduce_at_ratio_1(data)
            bounds = search_clip_bounds(at_ratio_1, self.config)
            self._measure(at_ratio_1, bounds)  # raises before anything is computed
            output = self._train(bounds, run_pass, sums_tokens=True)
            self.measurement = self._measure(self._reduce(self.pass_stats), bounds)  # the ratios that the loss had
        elif self._is_one_micro_batch(data):
            output = self._train(None, run_pass)
        else:
            output = self._update_by_forecast(data, position == 0, run_pass)
        return output

    def finish(self) -> None:
        self.latest = self.measurement.metrics["low"], self.measurement.metrics["high"]

    def for_micro_batch(self, data: TensorDict, log_probs: Tensor) -> Bounds:
        if self.bounds is None:  # the mini-batch is this micro-batch
            stats = self._reduce(self._sums_of(data, log_probs))
            bounds = search_clip_bounds(stats, self.config)
            self.measurement = self._measure(stats, bounds)
            return bounds.low.item(), bounds.high.item()
        if self.sums_tokens:
            self._add_micro_batch(data, log_probs)
        return self.bounds

    def _update_by_forecast(self, data: TensorDict, first: bool, run_pass: Pass) -> dict:
        at_ratio_1 = self._reduce_at_ratio_1(data)
        self._measure(at_ratio_1, search_clip_bounds(at_ratio_1, self.config))  # raises before anything is computed
        forecast, state = self.forecaster.forecast(at_ratio_1, first), EngineState(self.engine)
        if not self._trains_at_once(forecast):
            stats = self._reduce(self._sums_by_forward(data))
            state.restore()  # with dropout, the training forwards then draw the same masks
            bounds = search_clip_bounds(stats, self.config)
            self.measurement = self._measure(stats, bounds, extra_forward=1.0)
            output = self._train(bounds, run_pass)
        else:
            output = self._train(forecast.bounds, run_pass, sums_tokens=True)
            stats = self._reduce(self.pass_stats)
            bounds = search_clip_bounds(stats, self.config)
            redo = not same_tokens_are_clipped(stats, forecast.bounds, bounds)
            self.measurement = self._measure(stats, bounds, redone=float(redo))
            if redo:
                state.restore()
                self.engine.optimizer_zero_grad()
                output = self._train(bounds, run_pass)
        self.forecaster.learn(forecast, stats, bounds, first)
        return output

    def _train(self, bounds: ClipBounds | None, run_pass: Pass, sums_tokens: bool = False) -> dict:
        """Run forwards and backwards with these bounds. ``sums_tokens``: add up their tokens in ``pass_stats``."""
        self.bounds = None if bounds is None else (bounds.low.item(), bounds.high.item())
        self.pass_stats, self.sums_tokens = None, sums_tokens
        return run_pass()

    def _reduce_at_ratio_1(self, data: TensorDict) -> ClipStatistics:
        """Sum the tokens of the update over all ranks as if every ratio were 1, which needs no forward pass."""
        return self._reduce(self._sums_of(data.select(*SEARCH_FIELDS).to(self.device)))

    def _sums_by_forward(self, data: TensorDict) -> ClipStatistics | None:
        """Sum this rank's tokens of a mini-batch by a forward without gradient over all its micro-batches.

        Returns None on a rank that never calls the loss.
        """
        self.pass_stats = None

        def add(model_output, data, dp_group=None):
            # Taken out of the output, because verl's engine keeps the outputs of all micro-batches until the end.
            log_probs = model_output.pop("log_probs")
            self._add_micro_batch(data, log_probs)
            return log_probs.values().new_zeros(()), {}

        view = data.copy()  # a shallow copy, so that the setting below does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        self.engine.infer_batch(view, loss_function=add)
        return self.pass_stats


class MicroBatch(BoundScope):
    """The authors' code: the tokens of the micro-batches that the ranks train on at the same time.

    An update has many of these searches, so what it logs is their mean.
    """

    def update(self, data: TensorDict, position: int, on_policy: bool, run_pass: Pass) -> dict:
        self.found: list[Measurement] = []
        self.entropy_sums: list[EntropySums] = []
        output = run_pass()
        first, *others = [one.stats for one in self.found]
        stats = sum(others, start=first)
        self._measure(stats, search_clip_bounds(stats, self.config))  # raises where the update as a whole is invalid
        means = {name: fmean(one.metrics[name] for one in self.found) for name in self.found[0].metrics}
        of_update = EntropySums(*(sum(parts) for parts in zip(*self.entropy_sums, strict=True)))
        self.measurement = Measurement(stats, means | {"entropy_covariance": of_update.covariance.item()})
        return output

    def finish(self) -> None:
        self.latest = self.found[-1].metrics["low"], self.found[-1].metrics["high"]  # and no mean

    def for_micro_batch(self, data: TensorDict, log_probs: Tensor) -> Bounds:
        stats = self._reduce(self._sums_of(data, log_probs))
        bounds = search_clip_bounds(stats, self.config)
        values = read_and_validate(bounds, diagnose(stats, bounds), max_masked_fraction=1.0)
        self.found.append(Measurement(stats, values | {"extra_forward": 0.0, "redone": 0.0}))
        self.entropy_sums.append(stats.entropy_sums(bounds.low, bounds.high))
        return values["low"], values["high"]


SCOPES = {"mini_batch": MiniBatch, "micro_batch": MicroBatch}


def tokens_of(data: TensorDict, log_probs: Tensor | None) -> Tokens:
    """Return old log-probs, log-probs, advantages and mask of a batch, ``(B, T)``.

    Args:
        data: a batch of verl's.
        log_probs: those of its forward, in verl's layout; None: every ratio is 1.
    """
    padded = data.select(*SEARCH_FIELDS).to_padded_tensor()
    old = padded["old_log_probs"]
    # A token without a usable old log-prob is counted as such, and not as one whose new log-prob is not finite.
    new = torch.where(is_usable(old), old, 0) if log_probs is None else no_padding_2_padding(log_probs, data)
    return old, new, padded["advantages"], padded["response_mask"]


def bounds_metrics(values: dict[str, float]) -> dict[str, float]:
    """Map the values of an update to the keys that verl logs, ``actor/bapo/...``.

    The bounds are ``clip_low`` and ``clip_high`` there; all other names stay.
    """
    names = {"low": "clip_low", "high": "clip_high"}
    return {f"actor/bapo/{names.get(name, name)}": value for name, value in values.items()}
