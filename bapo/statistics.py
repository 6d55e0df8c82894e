# SPDX-License-Identifier: Apache-2.0
"""Additive statistics from which the positive contribution follows at every candidate pair of bounds.

P(c_high) = sum over A>0 of w*A*min(r, c_high) needs two sums at each grid point: w*A*r of the tokens with r < c_high
and w*A of the others. So the tokens with positive advantage are put into buckets of the ratio between the points of the
grid of ``c_high``, those with negative advantage between the points of the grid of ``c_low``, and each bucket keeps its
sums; ``bapo.search`` adds up buckets. The sums add up over micro-batches and ranks, too, so one all-reduce of one short
vector serves a whole optimizer update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.ratio import check_inputs, log_ratio_of

WA, WAR, TOKENS = range(3)  # of each bucket: sum of w*|A|, sum of w*|A|*r, number of tokens
TOTALS = 4  # sums of r, of r^2, of r*|A|, and of r*|A| where A < 0 and r > UNBOUNDED
UNBOUNDED = 3.0  # no bound limits r*|A| of a negative token; verl's dual clip does, from 3 on by default
# Response tokens, those of them with an unusable old log-prob, log-prob, advantage; responses with A > 0, with A < 0.
COUNTS = 6
MAX_OLD_LOG_PROB = 0.5  # beyond it there is no log-prob; bfloat16 rounds some that are nearly 0 to a little above 0
# The switches that enter the sums; the others enter the search alone.
COLLECTED = ["token_weight", *(f"ratio_{s}_{part}" for s in ("lower", "upper") for part in ("start", "max", "step"))]
CPU_CHUNK, GPU_CHUNK = 1 << 14, 1 << 20  # tokens at a time, about: they fit a CPU's cache; few kernels


def grid(config: BAPOConfig, side: str, device=None) -> Tensor:
    """Candidates of ``c_high`` (side ``upper``) or ``c_low`` (``lower``), ``(steps + 1,)`` float64: start + k*step, the
    last one exactly the maximum."""
    start, maximum, step = (getattr(config, f"ratio_{side}_{part}") for part in ("start", "max", "step"))
    # Built on the device from scalars: a copy from host memory would stop the host. Multiply and add are separate
    # operations so that every device rounds them as Python does.
    steps = torch.arange(getattr(config, f"{side}_steps") + 1, dtype=torch.float64, device=device)
    points = steps.mul_(step).add_(start)
    points[-1:].fill_(maximum)
    return points


@dataclass(frozen=True)
class ClipStatistics:
    """Sums over tokens. ``+`` and ``all_reduce`` add those of micro-batches and ranks.

    Attributes:
        vector: float64, ``(3 * buckets + 10,)``; ``(178,)`` with the default grids.
        config: the switches they were collected with.
    """

    vector: Tensor
    config: BAPOConfig

    @classmethod
    def zeros(cls, config: BAPOConfig, device=None) -> ClipStatistics:
        """The statistics of no tokens."""
        # n grid points make n + 1 buckets; negative tokens have one more, for those whose gradient the dual clip takes.
        buckets = (config.lower_steps + 3) + (config.upper_steps + 2)
        return cls(torch.zeros(3 * buckets + TOTALS + COUNTS, dtype=torch.float64, device=device), config)

    @property
    def sums(self) -> Tensor:
        """``(3, buckets)``, a view: along ``-c_low`` and then along ``c_high``, as ``_bucket_edges`` says."""
        return self.vector[: -TOTALS - COUNTS].view(3, -1)

    @property
    def positive(self) -> Tensor:
        """Sums of the tokens with A > 0. In bucket b the ratio is at or above b points of the grid of ``c_high``."""
        return self.sums[:, self.config.lower_steps + 3 :]

    @property
    def negative(self) -> Tensor:
        """Sums of the tokens with A < 0. In bucket b the ratio is above b points of ``c_low``; the last: dual clip."""
        return self.sums[:, : self.config.lower_steps + 3].flip(1)

    @property
    def totals(self) -> Tensor:
        """Sums over all response tokens, ``(4,)``, a view."""
        return self.vector[-TOTALS - COUNTS : -COUNTS]

    @property
    def counts(self) -> Tensor:
        """``(6,)``, a view."""
        return self.vector[-COUNTS:]

    def check_config(self, config: BAPOConfig) -> None:
        """Raise a ValueError unless ``config`` would have collected the same sums."""
        for name in COLLECTED:
            ours, theirs = getattr(self.config, name), getattr(config, name)
            if ours != theirs:
                raise ValueError(f"These statistics were collected with {name}={ours!r}, not {theirs!r}.")

    def __add__(self, other: ClipStatistics) -> ClipStatistics:
        other.check_config(self.config)
        return replace(self, vector=self.vector + other.vector)

    def all_reduce(self, group) -> ClipStatistics:
        """The sum over a ``torch.distributed`` process group, the world group passed by name (``group.WORLD``).

        One collective: every rank of ``group`` must call it, tokens or not.
        """
        vector = self.vector.clone()
        torch.distributed.all_reduce(vector, group=group)
        return replace(self, vector=vector)


@torch.no_grad()
def collect_clip_statistics(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    clip_ratio_c: float | None = None,
) -> ClipStatistics:
    """Collect the statistics of one micro-batch. Reads nothing back to the host.

    Args:
        old_log_prob: log-probs of the policy that the ratio is against, ``(B, T)``, any float type.
        log_prob: log-probs of the policy that is trained, ``(B, T)``.
        advantages: ``(B, T)``.
        response_mask: ``(B, T)``, true or non-zero where a token counts; what is masked may hold anything.
        config: the grids and the token weight.
        clip_ratio_c: verl's dual clip: negative tokens with a ratio from here on carry no gradient. None: no dual clip.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1.
    """
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    check_inputs(clip_ratio_c, **tensors)
    device = log_prob.device
    statistics = ClipStatistics.zeros(config, device)
    edges = _bucket_edges(config, clip_ratio_c, device)
    rows = max(1, (CPU_CHUNK if device.type == "cpu" else GPU_CHUNK) // max(1, log_prob.shape[1]))
    for chunk in zip(*(tensor.split(rows) for tensor in tensors.values()), strict=True):
        _add_chunk(statistics, edges, *chunk)
    return statistics


def _bucket_edges(config, clip_ratio_c, device):
    # Of a token's ratio with the sign of its advantage: -dual clip, -c_low from its maximum on, 0, c_high.
    # r >= clip_ratio_c is r > the number just below it.
    dual_clip = math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, 0)
    lower, upper = grid(config, "lower", device), grid(config, "upper", device)
    return torch.cat([lower.new_full((1,), -dual_clip), -lower.flip(0), lower.new_zeros(1), upper])


def _add_chunk(statistics, edges, old_log_prob, log_prob, advantages, mask):
    """Add whole responses, ``(rows, T)``, to the statistics in place."""
    # What is masked is gone before anything is computed from it: it becomes a token of ratio 1 and advantage 0.
    mask = mask.bool()
    old_log_prob, log_prob, advantages = (torch.where(mask, x, 0) for x in (old_log_prob, log_prob, advantages))
    # 0, but NaN where a value is not finite. Such a token spoils the sums; its count makes ``ClipBounds.read`` raise.
    unusable = (old_log_prob - old_log_prob.clamp(max=MAX_OLD_LOG_PROB), log_prob - log_prob, advantages - advantages)
    of_responses = (signed.clamp(min=0).sum(1) for signed in (advantages, -advantages))
    counts = torch.stack([found.count_nonzero() for found in (mask, *unusable, *of_responses)])
    statistics.counts.add_(counts)

    old_log_prob, log_prob, advantages = (x.flatten() for x in (old_log_prob, log_prob, advantages))
    ratio = log_ratio_of(old_log_prob, log_prob).exp().double()
    advantages = advantages.double()
    weight = advantages.abs()
    counted = weight.sign()  # 1, or 0 where A = 0
    # Dot products of clamped planes: comparisons and torch.where would cost as much as all the rest.
    unbounded = advantages.clamp(max=0).dot(torch.threshold(ratio, UNBOUNDED, 0.0)).neg()
    masked = mask.numel() - counts[0]  # of ratio 1
    totals = torch.stack([ratio.sum() - masked, ratio.dot(ratio) - masked, weight.dot(ratio), unbounded])
    statistics.totals.add_(totals)
    if statistics.config.token_weight == "rollout_prob":
        weight = weight * old_log_prob.double().exp()

    bucket = torch.bucketize(ratio.copysign(advantages), edges, right=True)  # number of edges at or below
    for sums, plane in zip(statistics.sums, (weight, weight * ratio, counted), strict=True):
        sums.scatter_add_(0, bucket, plane)
