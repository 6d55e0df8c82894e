# SPDX-License-Identifier: Apache-2.0
"""The gradient that each loss gives to a token, in closed form, from the token's log-probs and advantage alone.

The gradient of a token's loss with respect to its log-prob is ``-factor * A`` before aggregation. Without clipping the
factor is the ratio r. Each loss is a function that returns the factors, ``(tokens,)`` and at least 0. Its settings have
verl's names, and the published values as defaults. Add a new loss here and to ``methods_to_compare``.
``tests/unit/test_report_methods.py`` compares every factor with autograd of verl's own function; this package does not
import verl.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bapo import BAPOConfig, BoundsHistory, ClipStatistics, search_clip_bounds
from bapo.ratio import LOG_RATIO_LIMIT, log_ratio_of

GSPO_LOG_RATIO_LIMIT = 10.0  # as in verl
BAPO_TARGETS = (0.4, 0.45, 0.5)  # the two of the paper, and the one of the authors' README


@dataclass(frozen=True)
class Tokens:
    """Everything that a loss needs to know about response tokens: ``(tokens,)`` float32 each.

    Attributes:
        old_log_prob, log_prob, advantages: as in the loss.
        response_log_ratio: the mean log-ratio of the token's response; NaN if the dump does not say where responses
            begin.
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_log_ratio: Tensor

    @property
    def ratio(self) -> Tensor:
        """r, with its logarithm clamped to +-20."""
        return log_ratio_of(self.old_log_prob, self.log_prob).exp()

    @property
    def ratio_gradient(self) -> Tensor:
        """dr / dlog_prob: r, or 0 where the log-ratio is clamped."""
        free = (self.log_prob - self.old_log_prob).abs() <= LOG_RATIO_LIMIT
        return torch.where(free, self.ratio, 0)


def clipped(tokens: Tokens, low: float, high: float, clip_ratio_c: float = math.inf) -> Tensor:
    """PPO's clip between two bounds on the ratio, with verl's dual clip.

    This is verl's ``vanilla``, and within one update also BAPO.
    """
    ratio = tokens.ratio
    above_low = (ratio > low) & (ratio < clip_ratio_c)
    return tokens.ratio_gradient * torch.where(tokens.advantages > 0, ratio < high, above_low)


def gspo(tokens: Tokens, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4) -> Tensor:
    """verl's ``gspo`` (arXiv 2507.18071): every token has the ratio of its response, the mean over its tokens."""
    ratio = tokens.response_log_ratio.exp()
    kept = torch.where(tokens.advantages > 0, ratio < 1 + clip_ratio_high, ratio > 1 - clip_ratio_low)
    return ratio * (kept & (tokens.response_log_ratio <= GSPO_LOG_RATIO_LIMIT))


def sapo(tokens: Tokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """verl's ``sapo`` (arXiv 2511.20347): the derivative of its gate ``4 / tau * sigmoid(tau * (r - 1))``."""
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    return 4 * gate * (1 - gate) * tokens.ratio_gradient


def cispo(tokens: Tokens, clip_ratio_low: float = 10.0, clip_ratio_high: float = 0.2) -> Tensor:
    """verl's ``cispo`` (arXiv 2506.13585): the weight is clipped, and every token keeps a gradient.

    The settings come from verl's examples/cispo_trainer, because the paper gives no numbers.
    """
    return tokens.ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)


def dppo_tv(
    tokens: Tokens, clip_ratio_low: float = 0.15, clip_ratio_high: float = 0.15, clip_ratio_c: float = 1e4
) -> Tensor:
    """verl's ``dppo_tv`` (arXiv 2602.04879): masks a token by the change of its probability.

    The settings come from verl's examples/dppo_trainer. The loss needs a large ``clip_ratio_c``.
    """
    change = tokens.log_prob.exp() - tokens.old_log_prob.exp()
    kept = torch.where(tokens.advantages > 0, change <= clip_ratio_high, change >= -clip_ratio_low)
    return tokens.ratio.clamp(max=clip_ratio_c) * kept


def dppo_kl(
    tokens: Tokens, clip_ratio_low: float = 0.05, clip_ratio_high: float = 0.05, clip_ratio_c: float = 1e4
) -> Tensor:
    """verl's ``dppo_kl`` (arXiv 2602.04879): masks a token by the binary KL divergence (this token or any other).

    The settings come from verl's examples/dppo_trainer, as those of ``dppo_tv``.
    """
    old, new = tokens.old_log_prob.exp(), tokens.log_prob.exp()
    others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (tokens.old_log_prob - tokens.log_prob) + others
    kept_positive = (divergence <= clip_ratio_high) | (new <= old)
    kept_negative = (divergence <= clip_ratio_low) | (new >= old)
    return tokens.ratio.clamp(max=clip_ratio_c) * torch.where(tokens.advantages > 0, kept_positive, kept_negative)


VERL_LOSSES = {loss.__name__: loss for loss in (gspo, sapo, cispo, dppo_tv, dppo_kl)}


@dataclass(frozen=True)
class Method:
    """A loss with its settings.

    Attributes:
        loss: one of the functions above.
        settings: its keyword arguments.
        search: the options of BAPO's search, which runs for each update; None for every other method.
        earlier: with ``bound_scope=previous_batch``, the bounds that earlier updates found. None: an update uses the
            bounds that its own search finds.
    """

    loss: Callable[..., Tensor]
    settings: dict[str, float]
    search: BAPOConfig | None = None
    earlier: BoundsHistory | None = None

    def in_update(self, stats: ClipStatistics, position: int) -> Callable[[Tokens], Tensor]:
        """Return the function that computes this method's factors in one update. Call this for all updates in order.

        Args:
            stats: statistics of all tokens of the update.
            position: number of the update on its rollout batch, from 0.
        """
        if self.search is None:
            return partial(self.loss, **self.settings)
        bounds = found = search_clip_bounds(stats, self.search)
        if self.earlier is not None:
            if position == 0:
                self.earlier.next_batch()
            bounds = self.earlier.get(position)
            self.earlier.put(position, found)
        return partial(self.loss, low=bounds.low.item(), high=bounds.high.item(), **self.settings)

    def description(self) -> str:
        """Format the settings as one line for the reader of the report."""
        if self.loss is not clipped:
            return ", ".join(f"{name}={value:g}" for name, value in self.settings.items())
        text = "[{low:g}, {high:g}]".format(**self.settings) if self.search is None else _describe(self.search)
        dual_clip = self.settings["clip_ratio_c"]
        return f"{text}, dual clip {dual_clip:g}" if dual_clip < 1e6 else text  # a larger dual clip has no effect


def _describe(config):
    low, high, target = config.lower, config.upper, config.positive_contribution_target
    ranges = f"c_low {low.start:g} to {low.maximum:g}, c_high {high.start:g} to {high.maximum:g}"
    return f"target {target:g}, {config.contribution}, {config.token_weight}, {ranges}"


def with_bounds(low: float, high: float, clip_ratio_c: float) -> Method:
    """Make the method of PPO's clip with fixed bounds on the ratio."""
    return Method(clipped, {"low": low, "high": high, "clip_ratio_c": clip_ratio_c})


def as_published(loss: Callable[..., Tensor]) -> Method:
    """Make the method of a loss with its published settings, which are the defaults of its function."""
    parameters = list(inspect.signature(loss).parameters.values())[1:]
    return Method(loss, {parameter.name: parameter.default for parameter in parameters})


def loss_of_run(about: dict[str, str]) -> Method | None:
    """Make the method of the run that wrote a dump, from the dump's metadata; None if they do not say enough.

    Raises:
        ValueError: BAPO's options in the metadata are not usable.
    """
    known: dict[str, str | float] = {"clip_ratio_c": math.inf, **about}  # a trainer without a dual clip names none
    if "switches" in about:
        try:
            config = BAPOConfig(**json.loads(about["switches"]))
        except TypeError as error:  # an option that this version does not know
            raise ValueError(f"the dump's options of BAPO are of another version: {error}") from error
        if config.fixed:
            return with_bounds(config.ratio_lower_start, config.ratio_upper_start, float(known["clip_ratio_c"]))
        earlier = BoundsHistory(config) if config.bound_scope == "previous_batch" else None
        return Method(clipped, {"clip_ratio_c": float(known["clip_ratio_c"])}, config, earlier)
    if about.get("loss_mode") == "vanilla" and {"clip_ratio_low", "clip_ratio_high"} <= known.keys():
        low, high = 1 - float(known["clip_ratio_low"]), 1 + float(known["clip_ratio_high"])
        return with_bounds(low, high, float(known["clip_ratio_c"]))
    loss = VERL_LOSSES.get(about.get("loss_mode", ""))
    if loss is None or not as_published(loss).settings.keys() <= known.keys():
        return None
    return Method(loss, {name: float(known[name]) for name in as_published(loss).settings})


def methods_to_compare(config: BAPOConfig, clip_ratio_c: float) -> dict[str, Method]:
    """Return the methods of the report by name. BAPO's searches use ``config`` with each of ``BAPO_TARGETS``."""
    searches = {f"BAPO {target:g}": replace(config, positive_contribution_target=target) for target in BAPO_TARGETS}
    return {
        "GRPO": with_bounds(0.8, 1.2, clip_ratio_c),
        "clip-higher (DAPO)": with_bounds(0.8, 1.28, clip_ratio_c),
        "upper bound alone": with_bounds(0.8, 3.0, clip_ratio_c),
        "both bounds wide": with_bounds(0.9, 3.0, clip_ratio_c),
        **{name: Method(clipped, {"clip_ratio_c": clip_ratio_c}, search) for name, search in searches.items()},
        "GSPO": as_published(gspo),
        "SAPO": as_published(sapo),
        "CISPO": as_published(cispo),
        "DPPO-TV": as_published(dppo_tv),
        "DPPO-KL": as_published(dppo_kl),
    }
