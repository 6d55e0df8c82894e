# SPDX-License-Identifier: Apache-2.0
"""The switches of BAPO: a plain dataclass that only validates."""

import math
from dataclasses import dataclass

CHOICES = {
    "contribution": ("value", "gradient"),
    "token_weight": ("rollout_prob", "uniform"),
    "search_order": ("upper_first", "lower_first"),
    "bound_scope": ("mini_batch", "micro_batch"),
}
# A step so small that a grid outgrows this is a slip of the pen; the statistics grow with the number of candidates.
MAX_GRID_POINTS = 100_000


@dataclass
class BAPOConfig:
    """What the search for the clip bounds aims at, measures and tries. Bounds are on the ratio itself (0.6, 1.2).

    Args:
        positive_contribution_target: rho0, the share in (0, 1) of the loss that tokens with positive advantage should
            reach. The paper's experiments use 0.4 (0.45 for OctoThinker), the authors' README 0.5.
        ratio_lower_start, ratio_lower_max, ratio_lower_step: a-, b-, delta2 of Algorithm 1, the grid of ``c_low``.
        ratio_upper_start, ratio_upper_max, ratio_upper_step: a+, b+, delta1 of Algorithm 1, the grid of ``c_high``.
        contribution: ``value`` measures the surrogate's value (Eq. 8), ``gradient`` the size of the gradient with
            respect to the log-probs of the tokens that still carry one (Eq. 5).
        token_weight: ``rollout_prob`` weighs a token by ``exp(old_log_prob)`` (Eq. 8), ``uniform`` by 1 (the authors'
            code).
        search_order: ``upper_first`` raises ``c_high`` first (Algorithm 1), ``lower_first`` raises ``c_low`` first (the
            authors' code).
        bound_scope: ``mini_batch`` finds the bounds once per optimizer update, ``micro_batch`` once per forward (the
            authors' code; the result then depends on how the mini-batch was cut).

    Raises:
        ValueError: names the field, its value and the fix. Raised on construction.
    """

    positive_contribution_target: float = 0.4
    ratio_lower_start: float = 0.6
    ratio_lower_max: float = 0.9
    ratio_lower_step: float = 0.02
    ratio_upper_start: float = 1.2
    ratio_upper_max: float = 3.0
    ratio_upper_step: float = 0.05
    contribution: str = "value"
    token_weight: str = "rollout_prob"
    search_order: str = "upper_first"
    bound_scope: str = "mini_batch"

    def __post_init__(self):
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                _refuse(name, value, f"use one of {', '.join(choices)}")
        _require_number(self, "positive_contribution_target")
        target = self.positive_contribution_target
        if not 0 < target < 1:
            fix = "it is a share: use a number between 0 and 1, ends excluded (a ratio t = P/N is the share t/(1+t))"
            _refuse("positive_contribution_target", target, fix)
        self._check_range("lower")
        self._check_range("upper")
        if self.ratio_lower_start < 0:
            _refuse("ratio_lower_start", self.ratio_lower_start, "a ratio is never negative: use a number from 0 to 1")
        if self.ratio_lower_max >= 1:
            _refuse("ratio_lower_max", self.ratio_lower_max, "bounds are on the ratio itself: use a number below 1")
        if self.ratio_upper_start <= 1:
            _refuse("ratio_upper_start", self.ratio_upper_start, "bounds are on the ratio itself: use a number above 1")

    def _check_range(self, side):
        start, maximum, step = (f"ratio_{side}_{part}" for part in ("start", "max", "step"))
        for name in (start, maximum, step):
            _require_number(self, name)
        if getattr(self, step) <= 0:
            _refuse(step, getattr(self, step), f"use a step above 0 (to fix the bound, set {start} equal to {maximum})")
        if getattr(self, start) > getattr(self, maximum):
            _refuse(start, getattr(self, start), f"lower it to {maximum}={getattr(self, maximum)} or raise that")
        points = (getattr(self, maximum) - getattr(self, start)) / getattr(self, step)
        if points > MAX_GRID_POINTS:
            _refuse(step, getattr(self, step), f"it makes over {MAX_GRID_POINTS} candidates: use a larger step")

    @property
    def lower_steps(self) -> int:
        """Number of steps of ``c_low`` from start to maximum; its grid has one point more."""
        return _steps(self.ratio_lower_start, self.ratio_lower_max, self.ratio_lower_step)

    @property
    def upper_steps(self) -> int:
        """Number of steps of ``c_high`` from start to maximum; its grid has one point more."""
        return _steps(self.ratio_upper_start, self.ratio_upper_max, self.ratio_upper_step)


def _steps(start, maximum, step):
    # The tolerance keeps (0.9 - 0.6) / 0.02 = 15.000000000000002 at 15 steps.
    return math.ceil((maximum - start) / step - 1e-6)


def _require_number(config, name):
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _refuse(name, value, "use a finite number")


def _refuse(name, value, fix):
    raise ValueError(f"{name}={value!r} is not usable: {fix}.")
