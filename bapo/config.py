# SPDX-License-Identifier: Apache-2.0
"""BAPO's options, and the range in which each of the two clip bounds is searched.

``BAPOConfig`` holds the defaults and refuses values that cannot be used. Add a new option here first. The field names
are keys of the users' yaml files; ``recipe/bapo/config/bapo_trainer.yaml`` repeats the defaults, and a test compares
the two. All other files of this folder take the candidates of a bound from ``Range.grid``.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

CHOICES = {
    "contribution": ("value", "gradient"),
    "token_weight": ("rollout_prob", "uniform"),
    "search_order": ("upper_first", "lower_first"),
    "bound_scope": ("mini_batch", "micro_batch"),
}
# The statistics grow with the number of candidates. A range with more steps than this has a mistyped step.
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Range:
    """The candidates of one bound: ``start + k * step`` for k = 0, 1, ..., and finally ``maximum`` itself."""

    start: float
    maximum: float
    step: float

    @property
    def steps(self) -> int:
        """Number of steps from the first candidate to the last; there is one more candidate than steps."""
        # The tolerance keeps (0.9 - 0.6) / 0.02 = 15.000000000000002 at 15 steps.
        return math.ceil((self.maximum - self.start) / self.step - 1e-6)

    @property
    def fixed(self) -> bool:
        """Whether there is only one candidate, so that the search cannot move the bound."""
        return self.steps == 0

    def grid(self, device: torch.device | None = None) -> Tensor:
        """The candidates in ascending order, ``(steps + 1,)`` float64 on ``device``."""
        # Computed on the device: copying them from the host would make the host wait.
        k = torch.arange(self.steps + 1, dtype=torch.float64, device=device)
        return torch.where(k < self.steps, self.start + k * self.step, self.maximum)


@dataclass
class BAPOConfig:
    """Options of the clip-bound search: target, contribution measure, ranges.

    Bounds are on the ratio itself (such as 0.6 and 1.2), not distances from 1.

    Args:
        positive_contribution_target: rho0, the share in (0, 1) of the loss that tokens with positive advantage should
            reach. The default is the value of the paper's experiments, except for OctoThinker (0.45); the authors'
            README has 0.5.
        ratio_lower_start, ratio_lower_max, ratio_lower_step: a-, b-, delta2 of Algorithm 1, the range of ``c_low``.
            Set start equal to max to fix the bound.
        ratio_upper_start, ratio_upper_max, ratio_upper_step: a+, b+, delta1 of Algorithm 1, the range of ``c_high``.
        contribution: ``value`` measures the surrogate's value (Eq. 8), ``gradient`` the size of the gradient with
            respect to the log-probs of the tokens that still carry one (Eq. 5).
        token_weight: ``rollout_prob`` weighs a token by ``exp(old_log_prob)`` (Eq. 8), ``uniform`` by 1 (the authors'
            code).
        search_order: ``upper_first`` raises ``c_high`` first (Algorithm 1), ``lower_first`` raises ``c_low`` first (the
            authors' code).
        bound_scope: which tokens the bounds of an optimizer update are found on. ``mini_batch``: all tokens of the
            update itself (Algorithm 1). ``micro_batch``: the tokens of the micro-batches that the ranks train on at the
            same time (the authors' code); the result then depends on how the mini-batch is cut.

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
        target = self.positive_contribution_target
        _require_number("positive_contribution_target", target)
        if not 0 < target < 1:
            fix = "it is a share: use a number between 0 and 1, ends excluded (a ratio t = P/N is the share t/(1+t))"
            _refuse("positive_contribution_target", target, fix)
        _check_range("ratio_lower", self.lower)
        _check_range("ratio_upper", self.upper)
        if self.ratio_lower_start < 0:
            _refuse("ratio_lower_start", self.ratio_lower_start, "a ratio is never negative: use a number from 0 to 1")
        # Ratios are mostly float32, in which a bound very near 1 is 1, and then clips what has not moved.
        if torch.tensor(self.ratio_lower_max, dtype=torch.float32) >= 1:
            _refuse("ratio_lower_max", self.ratio_lower_max, "bounds are on the ratio itself: use a number below 1")
        if torch.tensor(self.ratio_upper_start, dtype=torch.float32) <= 1:
            _refuse("ratio_upper_start", self.ratio_upper_start, "bounds are on the ratio itself: use a number above 1")

    @property
    def lower(self) -> Range:
        """The range of ``c_low``."""
        return Range(self.ratio_lower_start, self.ratio_lower_max, self.ratio_lower_step)

    @property
    def upper(self) -> Range:
        """The range of ``c_high``."""
        return Range(self.ratio_upper_start, self.ratio_upper_max, self.ratio_upper_step)

    @property
    def fixed(self) -> bool:
        """Whether both bounds are fixed, so that the search has nothing to move."""
        return self.lower.fixed and self.upper.fixed


def _check_range(prefix: str, candidates: Range) -> None:
    """Check the values of the fields ``<prefix>_start``, ``<prefix>_max`` and ``<prefix>_step``."""
    start, maximum, step = f"{prefix}_start", f"{prefix}_max", f"{prefix}_step"
    _require_number(start, candidates.start)
    _require_number(maximum, candidates.maximum)
    _require_number(step, candidates.step)
    if candidates.step <= 0:
        _refuse(step, candidates.step, f"use a step above 0 (to fix the bound, set {start} equal to {maximum})")
    if candidates.start > candidates.maximum:
        _refuse(start, candidates.start, f"lower it to {maximum}={candidates.maximum} or raise that")
    # This does not use candidates.steps, which raises an OverflowError if the quotient is infinite.
    if (candidates.maximum - candidates.start) / candidates.step > MAX_STEPS:
        _refuse(step, candidates.step, f"it makes over {MAX_STEPS} candidates: use a larger step")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _refuse(name, value, "use a finite number")


def _refuse(name: str, value: object, fix: str) -> NoReturn:
    raise ValueError(f"invalid {name}={value!r}: {fix}.")
