# SPDX-License-Identifier: Apache-2.0
"""Measure what BAPO would do in a run with one of verl's own losses, and change nothing: ``MonitorConfig``."""

from dataclasses import asdict, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bapo import ClipBounds, ClipStatistics, diagnose, read_scalars, same_tokens_are_clipped, search_clip_bounds
from recipe.bapo.hook.compatibility import refuse_to_monitor
from recipe.bapo.hook.own_clip import own_clip_of
from recipe.bapo.hook.scopes import BoundScope, Measurement, Pass
from recipe.bapo.hook.tell import Guard, tell
from verl.workers.config import ActorConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine


class Monitor(BoundScope):
    """Adds up the tokens of the training forwards, and searches on them right before the optimizer's step.

    What it measures of an update has one of three forms:

    - As in a run with BAPO. ``extra_forward`` and ``redone`` say what BAPO would have done. Where the run's own loss
      clips by the ratio, also ``own_clipfrac_*`` or ``own_capfrac_*``, the share of the tokens of a sign that it clips
      or caps, and ``entropy_covariance`` of an update with that loss.
    - ``invalid_tokens`` alone, where log-probs or advantages were not finite.
    - Nothing, where the tokens of a micro-batch could not be summed on some rank. That rank takes part in the
      collective all the same.
    """

    applied = False
    refuse = staticmethod(refuse_to_monitor)

    def __init__(
        self,
        actor_config: ActorConfig,
        model_config: HFModelConfig,
        engine: BaseEngine,
        device: torch.device | str | int,
        guard: Guard,
    ):
        super().__init__(actor_config, model_config, engine, device, guard)
        self.own_clip, self.latest = own_clip_of(actor_config), None
        sums = self.nothing.sums
        # Allocated now, because summing may fail for want of memory.
        self.not_summed = replace(self.nothing, sums=sums._replace(uncollected=torch.ones_like(sums.uncollected)))
        # Of the current update:
        self.first, self.needs_forecast = True, True
        self.failed = False  # whether the tokens of one of its micro-batches could not be summed
        with guard("looking at the output layer"):
            if head_gradient_is_wrong(getattr(engine, "module", None)):
                tell(
                    "verl's own gradient of lm_head is wrong in this run, with or without the monitor: its fused "
                    "forward does not add it up over the ranks. Set actor_rollout_ref.model.use_fused_kernels=false."
                )

    def about(self) -> dict:
        return {**super().about(), "own_clip": None if self.own_clip is None else asdict(self.own_clip)}

    def update(self, data: TensorDict, position: int, on_policy: bool, run_pass: Pass) -> dict:
        self.pass_stats, self.failed, self.first = None, False, position == 0
        with self.guard("looking at the mini-batch"):
            self.needs_forecast = not (on_policy or self._is_one_micro_batch(data))
        output = run_pass()
        self.measurement = None
        with self.guard("measuring an update"):
            stats = self._reduce(self.not_summed if self.failed else self.pass_stats)
            self.measurement = self._measure(stats, search_clip_bounds(stats, self.config))
        return output

    def for_micro_batch(self, data: TensorDict, log_probs: Tensor) -> None:
        summed = False
        with self.guard("summing the tokens of a micro-batch"):
            self._add_micro_batch(data, log_probs)
            summed = True
        self.failed = self.failed or not summed

    def _measure(self, stats: ClipStatistics, bounds: ClipBounds, **costs: float) -> Measurement:
        if stats.sums.uncollected > 0:
            return Measurement(stats, {})
        values = read_scalars(vars(bounds) | vars(diagnose(stats, bounds)) | self._of_own_loss(stats))
        invalid = values.pop("invalid_log_probs") + values.pop("invalid_advantages")
        if invalid:
            self.guard.tell_once("invalid", f"{invalid:.0f} log-probs or advantages of response tokens are not finite.")
            return Measurement(stats, {"invalid_tokens": invalid})
        unusable = values.pop("invalid_old_log_probs")  # their share stays, as masked_token_fraction
        if unusable:
            text = f"the monitor leaves out {unusable:.0f} response tokens without a usable old log-prob."
            self.guard.tell_once("masked", text)
        return Measurement(stats, values | {"invalid_tokens": 0.0} | self._cost_with_bapo(stats, bounds) | costs)

    def _of_own_loss(self, stats: ClipStatistics) -> dict[str, Tensor]:
        """Return what the run's own loss does to the tokens, if it clips by the ratio."""
        if self.own_clip is None:
            return {}
        positive, negative = (tokens.clamp(min=1) for tokens in stats.tokens_by_sign)
        name = f"own_{self.own_clip.kind}frac"
        return {
            f"{name}_positive": stats.sums.own_clipped_positive / positive,
            f"{name}_negative": stats.sums.own_clipped_negative / negative,
            "entropy_covariance": stats.own_entropy_sums.covariance,
        }

    def _cost_with_bapo(self, stats: ClipStatistics, bounds: ClipBounds) -> dict[str, float]:
        """Return whether BAPO would have made a forward first for this update, and whether it would have redone it."""
        if not self.needs_forecast:
            return {"extra_forward": 0.0, "redone": 0.0}
        forecast = self.forecaster.forecast(stats, self.first)
        forward = not self._trains_at_once(forecast)
        redone = not forward and not same_tokens_are_clipped(stats, forecast.bounds, bounds)
        self.forecaster.learn(forecast, stats, bounds, self.first)
        return {"extra_forward": float(forward), "redone": float(redone)}


def head_gradient_is_wrong(module: Any) -> bool:
    """Whether verl's forward of this model leaves the gradient of ``lm_head`` unreduced over the ranks, or fails.

    ``recipe/bapo/verl_patches/fused_heads.py`` says why. A run with BAPO's loss has the fix; a monitor changes nothing.

    Args:
        module: the engine's module, after FSDP has wrapped it.
    """
    parts = module.modules() if isinstance(module, nn.Module) else ()  # Megatron's is a list
    # verl marks the part of the model whose forward reads the head.
    heads = [getattr(part, "lm_head", None) for part in parts if "_verl_fused_kernels_backend" in vars(part)]
    units: list[Any] = [head for head in heads if isinstance(head, FSDPModule)]
    return any(unit.weight.requires_grad and unit.weight.device_mesh.size() > 1 for unit in units)
