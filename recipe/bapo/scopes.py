# SPDX-License-Identifier: Apache-2.0
"""Where the bounds of an update come from: one class for each ``bound_scope``. ``monitor.py`` has one more.

The worker calls ``update`` in place of verl's forwards and backwards of an optimizer update. While these run, verl
calls the loss of each micro-batch, and the loss asks ``for_micro_batch`` for its bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from tensordict import TensorDict

from bapo import (
    BoundsForecaster,
    ClipBounds,
    ClipStatistics,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    read_and_validate,
    same_tokens_are_clipped,
    search_clip_bounds,
)
from recipe.bapo import compatibility
from recipe.bapo.engine_state import EngineState, can_be_restored
from recipe.bapo.own_clip import OwnClip
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

SEARCH_FIELDS = ("response_mask", "old_log_probs", "advantages")  # the fields of a batch that the search reads
Bounds = tuple[float, float]  # c_low and c_high
Pass = Callable[[], dict]  # verl's forwards and backwards of an update; returns the engine's output


@dataclass(frozen=True)
class Measured:
    """The tokens of an update over all ranks, with its bounds and what they do.

    Attributes:
        stats: sums of the tokens, on the host.
        values: bounds and metrics by name, as ``bapo.read_and_validate`` returns them, with ``extra_forward`` and
            ``redone``: 1 if a forward pass was made to find the bounds, and if the forwards and backwards were made
            twice, otherwise 0. With ``MicroBatch`` they are means over the micro-batches.
    """

    stats: ClipStatistics
    values: dict[str, float]


class BoundScope:
    """Finds the bounds of each update.

    Attributes:
        applied: whether the loss takes the bounds.

    Args:
        actor_config: verl's ``ActorConfig`` with one of our policy-loss configs.
        model_config: verl's ``HFModelConfig``.
        engine: verl's training engine.
        device: the device of this rank, as verl's ``get_device_id`` gives it.
        guard: for what must not end the run.

    Raises:
        ValueError: the settings cannot be used.
    """

    applied = True
    own_clip: OwnClip | None = None  # what another loss than BAPO's clips

    def __init__(self, actor_config, model_config, engine, device, guard):
        self.refuse_unusable_settings(actor_config, model_config)
        self.config, self.clip_ratio_c = actor_config.policy_loss, actor_config.clip_ratio_c
        self.strategy = actor_config.strategy
        self.engine, self.device, self.guard = engine, device, guard
        self.collected: ClipStatistics | None = None  # of the micro-batches of the current pass so far
        # The bounds of the latest update, for a loss that is computed outside an update; None: the loss takes none.
        self.latest: Bounds | None = (self.config.ratio_lower_start, self.config.ratio_upper_start)
        self.measured: Measured  # of the latest update

    def refuse_unusable_settings(self, actor_config, model_config) -> None:
        """Refuse settings of verl with which the bounds or the loss would be wrong."""
        compatibility.refuse_unusable_settings(actor_config, model_config)

    def about(self) -> dict:
        """Return what the first line of the record says of the run's loss."""
        return {
            "loss_mode": self.config.loss_mode,
            "applied": self.applied,
            "clip_ratio_c": self.clip_ratio_c,
            "strategy": self.strategy,
        }

    def update(self, data: TensorDict, position: int, on_policy: bool, run_pass: Pass) -> dict:
        """Make the forwards and backwards of an update with its bounds, and return what verl's engine returns for it.

        When this returns, the gradients are those of the whole mini-batch, and the optimizer's step may follow.

        Args:
            data: this rank's part of the mini-batch.
            position: number of updates since the rollout servers got their weights, which is the position on the
            rollout
                batch where they get them after each batch.
            on_policy: whether every ratio is to be taken as 1.
            run_pass: makes the forwards and backwards, and adds to the gradients.

        Raises:
            ValueError: log-probs or advantages are not finite; on all ranks together, before the optimizer's step.
        """
        raise NotImplementedError

    def measure(self) -> Measured:
        """Return what was measured of the update whose ``update`` has returned."""
        return self.measured

    def for_micro_batch(self, data: TensorDict, log_probs: torch.Tensor) -> Bounds | None:
        """Return the bounds for the loss of a micro-batch; ``log_probs`` are those of its training forward."""
        raise NotImplementedError

    def _collect(self, data: TensorDict, log_probs: torch.Tensor | None = None) -> ClipStatistics:
        """Collect the statistics of a batch; without ``log_probs`` every ratio is 1."""
        log_prob = None if log_probs is None else no_padding_2_padding(log_probs, data)
        tokens, own_clip = tokens_of(data, log_prob), self.own_clip
        return collect_clip_statistics(**tokens, config=self.config, clip_ratio_c=self.clip_ratio_c, own_clip=own_clip)

    def _add(self, data: TensorDict, log_probs: torch.Tensor) -> None:
        """Add the tokens of a micro-batch to ``collected``."""
        stats = self._collect(data, log_probs)
        self.collected = stats if self.collected is None else self.collected + stats

    def _reduce(self, stats: ClipStatistics | None) -> ClipStatistics:
        """Add the sums of all ranks, and copy them to the host.

        Of the ranks that work on the same data, only one contributes sums, so that every token counts once. All ranks
        of the world take part in the collective, including those that never call the loss, such as the earlier stages
        of a pipeline. So all of them hold the same sums, decide alike, and raise together.
        """
        if stats is None or not self.engine.is_mp_src_rank_with_outputs():
            stats = empty_clip_statistics(self.config, self.device)
        return stats.all_reduce(torch.distributed.group.WORLD).to("cpu")

    def _search(self, stats: ClipStatistics) -> tuple[ClipBounds, Measured]:
        """Search on reduced sums, and validate them."""
        bounds = search_clip_bounds(stats, self.config)
        values = read_and_validate(bounds, diagnose(stats, bounds))
        return bounds, Measured(stats, values | {"extra_forward": 0.0, "redone": 0.0})

    def _is_one_micro_batch(self, data: TensorDict) -> bool:
        """Whether the mini-batch is a single micro-batch, whose training forward has all log-probs before the loss.

        Under a pipeline only the last stage calls the loss, so there it cannot be used.
        """
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None)
        return self.strategy != "megatron" and not dynamic and len(data) == size


class MiniBatch(BoundScope):
    """Algorithm 1: the bounds of an update are found on all of its own tokens.

    Their log-probs are known only after a forward pass. So the update trains with a forecast of its bounds, and the
    sums of its training forwards then show whether the exact bounds clip the same tokens (``bapo.forecast`` says why
    the gradient is then exact). If they do not, the forwards and backwards are made again with the exact bounds. If the
    forecast is not trusted, a forward pass without gradient comes first and finds the exact bounds.
    """

    def __init__(self, actor_config, model_config, engine, device, guard):
        super().__init__(actor_config, model_config, engine, device, guard)
        self.forecaster = BoundsForecaster(self.config)
        # verl's activation offload expects a backward after every forward, so there no forward can come first.
        self.can_make_forward = not model_config.enable_activation_offload
        self.can_repeat = can_be_restored(engine)
        self.bounds: Bounds | None = None  # of the current pass; None: the loss finds them
        self.measures = False  # whether the current pass adds up its tokens

    def update(self, data, position, on_policy, run_pass):
        if on_policy:
            # Not a real forward, which would round differently for every way to split the mini-batch. Where rho equals
            # the target exactly, that would decide the bounds.
            bounds, self.measured = self._search(self._collect_at_ratio_1(data))
            output = self._train(bounds, run_pass)
        elif self._is_one_micro_batch(data):
            output = self._train(None, run_pass)
        else:
            output = self._update_by_forecast(data, position == 0, run_pass)
        self.latest = self.measured.values["low"], self.measured.values["high"]
        return output

    def for_micro_batch(self, data, log_probs):
        if self.bounds is None:  # the mini-batch is this micro-batch
            bounds, self.measured = self._search(self._reduce(self._collect(data, log_probs)))
            return bounds.low.item(), bounds.high.item()
        if self.measures:
            self._add(data, log_probs)
        return self.bounds

    def _update_by_forecast(self, data, first, run_pass):
        own = self._collect_at_ratio_1(data)
        self._search(own)  # raises for an invalid advantage or old log-prob before anything is computed
        forecast, state = self.forecaster.forecast(own, first), EngineState(self.engine)
        makes_forward = self.can_make_forward and not (forecast.trusted and self.can_repeat)
        repeats = False
        if makes_forward:
            stats = self._reduce(self._collect_by_forward(data))
            state.restore()  # with dropout, the training forwards then draw the same masks
            bounds, self.measured = self._search(stats)
            output = self._train(bounds, run_pass)
        else:
            output = self._train(forecast.bounds, run_pass, measures=True)
            stats = self._reduce(self.collected)
            bounds, self.measured = self._search(stats)
            repeats = not same_tokens_are_clipped(stats, forecast.bounds, bounds)
            if repeats:
                state.restore()
                self.engine.optimizer_zero_grad()
                output = self._train(bounds, run_pass)
        self.forecaster.learn(forecast, stats, bounds, first)
        self.measured.values.update(extra_forward=float(makes_forward), redone=float(repeats))
        return output

    def _train(self, bounds: ClipBounds | None, run_pass: Pass, measures: bool = False) -> dict:
        """Make forwards and backwards with these bounds. ``measures``: add up the tokens in ``collected``."""
        self.bounds = None if bounds is None else (bounds.low.item(), bounds.high.item())
        self.collected, self.measures = None, measures
        return run_pass()

    def _collect_at_ratio_1(self, data: TensorDict) -> ClipStatistics:
        """Collect the statistics of the update over all ranks as if every ratio were 1, without a forward pass."""
        return self._reduce(self._collect(data.select(*SEARCH_FIELDS).to(self.device)))

    def _collect_by_forward(self, data: TensorDict) -> ClipStatistics | None:
        """Collect the statistics of a mini-batch by a forward without gradient over all its micro-batches.

        Returns None on a rank that never calls the loss.
        """
        self.collected = None

        def collect(model_output, data, dp_group=None):
            # Taken out of the output, because verl's engine keeps the outputs of all micro-batches.
            log_probs = model_output.pop("log_probs")
            self._add(data, log_probs)
            return log_probs.values().new_zeros(()), {}

        view = data.copy()  # a shallow copy, so that the setting below does not reach the update
        tu.assign_non_tensor(view, calculate_entropy=False)
        self.engine.infer_batch(view, loss_function=collect)
        return self.collected


class MicroBatch(BoundScope):
    """The authors' code: the tokens of the micro-batches that the ranks train on at the same time.

    An update has many of these searches, so what it logs is their mean.
    """

    def update(self, data, position, on_policy, run_pass):
        self.found: list[Measured] = []
        output = run_pass()
        first, *others = [found.stats for found in self.found]
        means = {name: fmean(found.values[name] for found in self.found) for name in self.found[0].values}
        self.measured = Measured(sum(others, start=first), means)
        return output

    def for_micro_batch(self, data, log_probs):
        _, found = self._search(self._reduce(self._collect(data, log_probs)))
        self.found.append(found)
        self.latest = found.values["low"], found.values["high"]
        return self.latest


SCOPES = {"mini_batch": MiniBatch, "micro_batch": MicroBatch}


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
    """Map the values of an update to the keys that verl logs, ``actor/bapo/...``.

    The bounds are ``clip_low`` and ``clip_high`` there; all other names stay.
    """
    names = {"low": "clip_low", "high": "clip_high"}
    return {f"actor/bapo/{names.get(name, name)}": value for name, value in values.items()}
