"""The search of Algorithm 1 over all its candidates at once, from the statistics of ``bapo.statistics``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.statistics import (
    COUNTS,
    SUMS,
    ClipStatistics,
    bucket_counts,
    collect_clip_statistics,
    lower_grid,
    split_buckets,
    upper_grid,
)

# Relative to P + N. With r = 1 and a target of 0.5 the start often sits exactly on the tie P = N; rounding must not
# choose between the first candidate and the last.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class ClipBounds:
    """Clip bounds of one optimizer update and how they were found. All fields are 0-d tensors on the inputs' device.

    Attributes:
        low, high: ``c_low`` and ``c_high``, bounds on the ratio itself, float64.
        positive_contribution: rho = P / (P + N) at these bounds; 0 where no token counts.
        positive_contribution_start: rho at the start of the search.
        search_steps: candidates passed over before this one, int64.
        saturated: whether no candidate reaches the target (the bounds are then the last ones), bool.
        positive_token_fraction: share of the response tokens with positive advantage.
        clipfrac_positive: share of the tokens with positive advantage whose ratio is at or above ``high``.
        clipfrac_negative: share of the tokens with negative advantage whose ratio is at or below ``low``.
        invalid_counts: non-finite old log-probs, log-probs and advantages on response tokens, ``(3,)`` float64.
    """

    low: Tensor
    high: Tensor
    positive_contribution: Tensor
    positive_contribution_start: Tensor
    search_steps: Tensor
    saturated: Tensor
    positive_token_fraction: Tensor
    clipfrac_positive: Tensor
    clipfrac_negative: Tensor
    invalid_counts: Tensor

    def packed(self) -> Tensor:
        """Every number of this object as one float64 vector, so that one transfer reads them all (``unpack``)."""
        return torch.cat([torch.stack([getattr(self, name).double() for name in METRICS]), self.invalid_counts])

    def read(self) -> dict[str, float]:
        """All scalar fields as Python numbers, in one transfer to the host.

        Raises:
            ValueError: as ``raise_if_invalid``.
        """
        return unpack(self.packed().tolist())

    def raise_if_invalid(self) -> None:
        """Raise a ValueError that names each tensor with a non-finite value on a response token, and how many."""
        raise_if_counted(self.invalid_counts.tolist())


METRICS = (
    "low",
    "high",
    "positive_contribution",
    "positive_contribution_start",
    "search_steps",
    "saturated",
    "positive_token_fraction",
    "clipfrac_positive",
    "clipfrac_negative",
)


def unpack(values: list[float]) -> dict[str, float]:
    """``ClipBounds.packed`` on the host: the scalar fields by name.

    Raises:
        ValueError: as ``ClipBounds.raise_if_invalid``.
    """
    raise_if_counted(values[len(METRICS) :])
    return dict(zip(METRICS, values[: len(METRICS)], strict=True))


def raise_if_counted(counts: list[float]) -> None:
    """Raise a ValueError if any of the three counts of non-finite values is not 0."""
    names = ("old_log_prob", "log_prob", "advantages")
    found = [f"{int(count)} in {name}" for name, count in zip(names, counts, strict=True) if count]
    if found:
        raise ValueError(
            f"Non-finite values on response tokens of this mini-batch: {', '.join(found)}. "
            "No clip bounds were found and no update was made; look for a diverged model or a broken rollout or reward."
        )


@torch.no_grad()
def search_clip_bounds(statistics: ClipStatistics, config: BAPOConfig) -> ClipBounds:
    """Pick the first candidate on the path of Algorithm 1 that reaches the target, or the last one.

    Nothing is read back to the host, so non-finite input raises only in ``ClipBounds.raise_if_invalid``.

    Args:
        statistics: of the whole mini-batch, collected with the same ``config``.
        config: the target, the grids, the order and the definition of the contribution.

    Raises:
        ValueError: the statistics have another length than the grids of ``config`` make.
    """
    vector = statistics.vector
    upper_buckets, lower_buckets = bucket_counts(config)
    if vector.shape != (SUMS * (upper_buckets + lower_buckets) + COUNTS,):
        raise ValueError(f"Statistics of shape {tuple(vector.shape)} were collected with other grids than {config}.")
    high, low = upper_grid(config, vector.device), lower_grid(config, vector.device)
    positive, negative = split_buckets(statistics, config)

    # Sums over r < c_high and r >= c_high, over r <= c_low and r > c_low, at every grid point.
    pos_below = positive.cumsum(1)[:, :-1]
    pos_above = _suffix_sums(positive)[:, 1:]
    neg_below = negative.cumsum(1)[:, :-2]
    neg_above = _suffix_sums(negative)[:, 1:-1]
    neg_kept = _suffix_sums(negative[:, :-1])[:, 1:]  # without the last bucket: the dual clip took its gradient
    if config.contribution == "value":
        p = pos_below[1] + high * pos_above[0]
        n = low * neg_below[0] + neg_above[1]
    else:
        p = pos_below[1]
        n = neg_kept[1]

    candidates = _Path(config)
    p, n = candidates.upper(p), candidates.lower(n)
    target = config.positive_contribution_target
    reached = (1 - target) * p - target * n >= -TOLERANCE * (p + n)
    passed = torch.cumprod((~reached).long(), 0).sum()
    chosen = passed.clamp(max=len(reached) - 1).view(1)

    rho = torch.where(p + n > 0, p / (p + n), 0.0)
    clipped_positive = candidates.upper(pos_above[2]).gather(0, chosen)
    clipped_negative = candidates.lower(neg_below[2]).gather(0, chosen)
    return ClipBounds(
        low=candidates.lower(low).gather(0, chosen).squeeze(),
        high=candidates.upper(high).gather(0, chosen).squeeze(),
        positive_contribution=rho.gather(0, chosen).squeeze(),
        positive_contribution_start=rho[0],
        search_steps=chosen.squeeze(),
        saturated=passed == len(reached),
        positive_token_fraction=positive[2].sum() / vector[-1].clamp(min=1),
        clipfrac_positive=(clipped_positive / positive[2].sum().clamp(min=1)).squeeze(),
        clipfrac_negative=(clipped_negative / negative[2].sum().clamp(min=1)).squeeze(),
        invalid_counts=vector[-1] - vector[-COUNTS:-1],
    )


def _suffix_sums(rows):
    return rows.flip(1).cumsum(1).flip(1)


class _Path:
    """The candidate pairs in the order of the search: one bound runs through its grid, then the other."""

    def __init__(self, config):
        self.upper_first = config.search_order == "upper_first"
        self.upper_steps, self.lower_steps = config.upper_steps, config.lower_steps

    def upper(self, values):
        """``values`` at the points of the grid of ``c_high``, at every candidate."""
        return self._first(values, self.lower_steps) if self.upper_first else self._second(values, self.lower_steps)

    def lower(self, values):
        """``values`` at the points of the grid of ``c_low``, at every candidate."""
        return self._second(values, self.upper_steps) if self.upper_first else self._first(values, self.upper_steps)

    @staticmethod
    def _first(values, other_steps):
        return torch.cat([values, values[-1:].expand(other_steps)])

    @staticmethod
    def _second(values, other_steps):
        return torch.cat([values[:1].expand(other_steps), values])


def find_clip_bounds(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    process_group=None,
    clip_ratio_c: float | None = None,
) -> ClipBounds:
    """Find the clip bounds of one optimizer update from its whole mini-batch (Eq. 8, Algorithm 1).

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``, as in ``collect_clip_statistics``.
        config: the switches.
        process_group: the ranks that share the mini-batch; None: no communication. All of them must call this once.
        clip_ratio_c: verl's dual clip, which ``contribution="gradient"`` respects; None: no dual clip.

    Raises:
        ValueError: the shapes differ. Non-finite input raises in ``ClipBounds.raise_if_invalid``.
    """
    statistics = collect_clip_statistics(old_log_prob, log_prob, advantages, response_mask, config, clip_ratio_c)
    if process_group is not None:
        statistics = statistics.all_reduce(process_group)
    return search_clip_bounds(statistics, config)
