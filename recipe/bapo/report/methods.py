# SPDX-License-Identifier: Apache-2.0
"""What each loss leaves of a token's gradient, in closed form, from the token's log-probs and advantage alone.

The gradient of a token's loss with respect to its log-prob is ``-factor * A`` before aggregation; without clipping the
factor is the ratio r. Each class is a loss: its fields are the settings by verl's names, their defaults the published
ones. A new loss is added here and to ``methods_to_compare``; ``tests/unit/test_report_methods.py`` holds every factor
equal to autograd of verl's own function, which this room does not import.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipStatistics, search_clip_bounds
from bapo.ratio import LOG_RATIO_LIMIT, log_ratio_of

GSPO_LOG_RATIO_LIMIT = 10.0  # verl's
BAPO_TARGETS = (0.4, 0.45, 0.5)  # the paper's two, and that of the authors' README


@dataclass(frozen=True)
class Tokens:
    """Response tokens with all that a loss asks about them: ``(tokens,)`` float32 each.

    Attributes:
        old_log_prob, log_prob, advantages: as in the loss.
        response_log_ratio: the mean log-ratio of the token's response; NaN where the dump does not say where responses
            begin.
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_log_ratio: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Log of the ratio, limited to +-20."""
        return log_ratio_of(self.old_log_prob, self.log_prob)

    @property
    def ratio(self) -> Tensor:
        """r."""
        return self.log_ratio.exp()

    @property
    def ratio_gradient(self) -> Tensor:
        """dr / dlog_prob: r, or 0 where the limit on the log-ratio holds it."""
        free = (self.log_prob - self.old_log_prob).abs() <= LOG_RATIO_LIMIT
        return torch.where(free, self.ratio, 0)

    @property
    def outward(self) -> Tensor:
        """Whether the update moves the ratio further from 1: A > 0 and r > 1, or A < 0 and r < 1."""
        return self.log_ratio * self.advantages > 0


class Loss:
    """A loss; its fields are its settings, those of verl's losses by the names of their keys."""

    def factor(self, tokens: Tokens) -> Tensor:
        """What stands before ``-A`` in the gradient, ``(tokens,)``, at least 0."""
        raise NotImplementedError

    def in_update(self, statistics: ClipStatistics, tokens: list[Tokens]) -> "Loss":
        """The loss of one update, for losses that depend on all its tokens: ``statistics`` and ``tokens`` are those."""
        return self

    def settings(self) -> str:
        """One line for the reader of the report."""
        return ", ".join(f"{field.name}={getattr(self, field.name):g}" for field in fields(self))  # type: ignore


@dataclass(frozen=True)
class Bounds(Loss):
    """PPO's clip between two bounds on the ratio, with verl's dual clip: verl's ``vanilla``, and BAPO in one update."""

    low: float
    high: float
    clip_ratio_c: float = math.inf

    def factor(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio
        above_low = (ratio > self.low) & (ratio < self.clip_ratio_c)
        return tokens.ratio_gradient * torch.where(tokens.advantages > 0, ratio < self.high, above_low)

    def settings(self) -> str:
        return f"[{self.low:g}, {self.high:g}]" + _dual_clip(self.clip_ratio_c)


def _dual_clip(clip_ratio_c):
    return f", dual clip {clip_ratio_c:g}" if clip_ratio_c < 1e6 else ""  # a larger one has no effect


@dataclass(frozen=True)
class BAPO(Loss):
    """The bounds that a search finds in each update."""

    config: BAPOConfig
    clip_ratio_c: float = math.inf

    def in_update(self, statistics: ClipStatistics, tokens: list[Tokens]) -> Bounds:
        bounds = search_clip_bounds(statistics, self.config)
        return Bounds(bounds.low.item(), bounds.high.item(), self.clip_ratio_c)

    def settings(self) -> str:
        low, high, target = self.config.lower, self.config.upper, self.config.positive_contribution_target
        ranges = f"c_low {low.start:g} to {low.maximum:g}, c_high {high.start:g} to {high.maximum:g}"
        measure = f"{self.config.contribution}, {self.config.token_weight}"
        return f"target {target:g}, {measure}, {ranges}" + _dual_clip(self.clip_ratio_c)


@dataclass(frozen=True)
class GSPO(Loss):
    """verl's ``gspo`` (arXiv 2507.18071): every token has the ratio of its response, the mean over its tokens."""

    clip_ratio_low: float = 3e-4
    clip_ratio_high: float = 4e-4

    def factor(self, tokens: Tokens) -> Tensor:
        ratio = tokens.response_log_ratio.exp()
        kept = torch.where(tokens.advantages > 0, ratio < 1 + self.clip_ratio_high, ratio > 1 - self.clip_ratio_low)
        return ratio * (kept & (tokens.response_log_ratio <= GSPO_LOG_RATIO_LIMIT))


@dataclass(frozen=True)
class SAPO(Loss):
    """verl's ``sapo`` (arXiv 2511.20347): the derivative of its gate ``4 / tau * sigmoid(tau * (r - 1))``."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def factor(self, tokens: Tokens) -> Tensor:
        tau = torch.where(tokens.advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (tokens.ratio - 1))
        return 4 * gate * (1 - gate) * tokens.ratio_gradient


@dataclass(frozen=True)
class CISPO(Loss):
    """verl's ``cispo`` (arXiv 2506.13585): the weight is clipped and every token keeps a gradient.

    The settings are those of verl's examples/cispo_trainer, because the paper prints no number.
    """

    clip_ratio_low: float = 10.0
    clip_ratio_high: float = 0.2

    def factor(self, tokens: Tokens) -> Tensor:
        return tokens.ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)


@dataclass(frozen=True)
class DPPOTV(Loss):
    """verl's ``dppo_tv`` (arXiv 2602.04879): masks by the change of the token's probability.

    The settings are those of verl's examples/dppo_trainer: the loss asks for a large ``clip_ratio_c``.
    """

    clip_ratio_low: float = 0.15
    clip_ratio_high: float = 0.15
    clip_ratio_c: float = 1e4

    def factor(self, tokens: Tokens) -> Tensor:
        change = tokens.log_prob.exp() - tokens.old_log_prob.exp()
        kept = torch.where(tokens.advantages > 0, change <= self.clip_ratio_high, change >= -self.clip_ratio_low)
        return tokens.ratio.clamp(max=self.clip_ratio_c) * kept


@dataclass(frozen=True)
class DPPOKL(Loss):
    """verl's ``dppo_kl`` (arXiv 2602.04879): masks by the KL divergence between token and not-token.

    The settings are from where those of ``DPPOTV`` are.
    """

    clip_ratio_low: float = 0.05
    clip_ratio_high: float = 0.05
    clip_ratio_c: float = 1e4

    def factor(self, tokens: Tokens) -> Tensor:
        old, new = tokens.old_log_prob.exp(), tokens.log_prob.exp()
        others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        divergence = old * (tokens.old_log_prob - tokens.log_prob) + others
        kept_positive = (divergence <= self.clip_ratio_high) | (new <= old)
        kept_negative = (divergence <= self.clip_ratio_low) | (new >= old)
        return tokens.ratio.clamp(max=self.clip_ratio_c) * torch.where(
            tokens.advantages > 0, kept_positive, kept_negative
        )


@dataclass(frozen=True)
class M2PO(Loss):
    """M2PO (arXiv 2510.01161, Algorithm 1): the mean of (log r)^2 over an update's outward tokens has a budget."""

    budget: float = 0.04

    def in_update(self, statistics: ClipStatistics, tokens: list[Tokens]) -> "M2POMask":
        """Drop the largest (log r)^2 of the outward tokens until the mean of the others is in the budget."""
        sizes = torch.cat([part.log_ratio.abs()[part.outward] for part in tokens])
        sizes.numpy().sort()  # in place, because torch.sort would hold an index of 8 bytes a token, too
        allowed = torch.arange(1, len(sizes) + 1, dtype=torch.float64).mul_(self.budget)
        # The mean of the smallest so many never falls with their number, so that those in the budget are the first.
        kept = int((sizes.double().square_().cumsum_(0) <= allowed).sum())
        return M2POMask(float(sizes[kept - 1]) if kept else 0.0)


@dataclass(frozen=True)
class M2POMask(Loss):
    """M2PO in one update: no gradient for the outward tokens whose |log r| is over the limit."""

    limit: float

    def factor(self, tokens: Tokens) -> Tensor:
        return tokens.ratio_gradient * ~(tokens.outward & (tokens.log_ratio.abs() > self.limit))


@dataclass(frozen=True)
class TOPR(Loss):
    """TOPR (arXiv 2503.14286), token by token: weight 1 for A > 0, min(r, 1) for A < 0."""

    def factor(self, tokens: Tokens) -> Tensor:
        return torch.where(tokens.advantages > 0, 1, tokens.ratio.clamp(max=1))


VERL_LOSSES: dict[str, Callable[..., Loss]] = {
    # Its settings are distances from 1.
    "vanilla": lambda clip_ratio_low, clip_ratio_high, clip_ratio_c: Bounds(
        1 - clip_ratio_low, 1 + clip_ratio_high, clip_ratio_c
    ),
    "gspo": GSPO,
    "sapo": SAPO,
    "cispo": CISPO,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
}


def loss_of_run(about: dict[str, str]) -> Loss | None:
    """The loss that made a dump, from the dump's metadata; None where they do not say enough.

    Raises:
        ValueError: the switches are not usable.
    """
    if "switches" in about:
        config, clip_ratio_c = BAPOConfig(**json.loads(about["switches"])), float(about.get("clip_ratio_c", math.inf))
        fixed = Bounds(config.ratio_lower_start, config.ratio_upper_start, clip_ratio_c)
        return fixed if config.fixed else BAPO(config, clip_ratio_c)
    make = VERL_LOSSES.get(about.get("loss_mode", ""))
    if make is None:
        return None
    # verl's clip_ratio stands for a side that is not set; a trainer without a dual clip names none.
    known = {name: about.get("clip_ratio") for name in ("clip_ratio_low", "clip_ratio_high")}
    known |= {"clip_ratio_c": math.inf} | about
    settings = {name: known.get(name) for name in inspect.signature(make).parameters}
    return None if None in settings.values() else make(**{name: float(value) for name, value in settings.items()})


def methods_to_compare(config: BAPOConfig, clip_ratio_c: float) -> dict[str, Loss]:
    """The methods of the report by name; the searches are by ``config``, for each of ``BAPO_TARGETS``."""
    return {
        "GRPO": Bounds(0.8, 1.2, clip_ratio_c),
        "clip-higher (DAPO)": Bounds(0.8, 1.28, clip_ratio_c),
        "upper bound alone": Bounds(0.8, 3.0, clip_ratio_c),
        "both bounds wide": Bounds(0.9, 3.0, clip_ratio_c),
        **{f"BAPO {t:g}": BAPO(replace(config, positive_contribution_target=t), clip_ratio_c) for t in BAPO_TARGETS},
        "GSPO": GSPO(),
        "SAPO": SAPO(),
        "CISPO": CISPO(),
        "DPPO-TV": DPPOTV(),
        "DPPO-KL": DPPOKL(),
        "M2PO": M2PO(),
        "TOPR": TOPR(),
    }
