"""Additive statistics from which the positive contribution follows at every candidate pair of bounds.

For tokens with positive advantage ``sum w*A``, ``sum w*A*r`` and the count per bucket of the ratio r against the grid
of ``c_high``; for tokens with negative advantage the same with ``|A|`` against the grid of ``c_low``. Prefix and
suffix sums over the buckets then give P(c_high) and N(c_low) at every grid point (``bapo.search``). The sums add up
over micro-batches and ranks, so one all-reduce of one short vector serves a whole optimizer update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.ratio import check_shapes, log_ratio_of

# Tokens handled at a time. The temporaries of a chunk, about 60 bytes a token, stay in the cache of a CPU and, with an
# eighth of the tokens, below two (B, T) float32 tensors; a GPU wants few large kernels.
MIN_CHUNK, MAX_CPU_CHUNK = 1 << 13, 1 << 16
SUMS = 3  # per bucket: sum of w*|A|, sum of w*|A|*r, number of tokens
COUNTS = 4  # non-finite old log-probs, non-finite log-probs, non-finite advantages, response tokens


def upper_grid(config: BAPOConfig, device=None) -> Tensor:
    """Candidates of ``c_high``, ``(upper_steps + 1,)`` float64: start + k*step, the last one exactly the maximum."""
    return _grid(config.ratio_upper_start, config.ratio_upper_max, config.ratio_upper_step, config.upper_steps, device)


def lower_grid(config: BAPOConfig, device=None) -> Tensor:
    """Candidates of ``c_low``, ``(lower_steps + 1,)`` float64: start + k*step, the last one exactly the maximum."""
    return _grid(config.ratio_lower_start, config.ratio_lower_max, config.ratio_lower_step, config.lower_steps, device)


def _grid(start, maximum, step, steps, device):
    # Built on the device from scalars: a copy from host memory would stop the host. Multiply and add are separate
    # operations so that every device rounds them as Python does.
    grid = torch.arange(steps + 1, dtype=torch.float64, device=device).mul_(step).add_(start)
    grid[steps:].fill_(maximum)
    return grid


@dataclass(frozen=True)
class ClipStatistics:
    """One float64 vector of sums over tokens, for one ``BAPOConfig``.

    Attributes:
        vector: ``(SUMS * (upper buckets + lower buckets) + COUNTS,)``; ``(172,)`` with the default grids.
    """

    vector: Tensor

    @classmethod
    def zeros(cls, config: BAPOConfig, device=None) -> ClipStatistics:
        """The statistics of no tokens."""
        upper, lower = bucket_counts(config)
        return cls(torch.zeros(SUMS * (upper + lower) + COUNTS, dtype=torch.float64, device=device))

    def __add__(self, other: ClipStatistics) -> ClipStatistics:
        return ClipStatistics(self.vector + other.vector)

    def all_reduce(self, group) -> ClipStatistics:
        """The sum over a process group. One collective; every rank of ``group`` must call it, tokens or not.

        Args:
            group: a ``torch.distributed`` process group; the world group is passed by name
                (``torch.distributed.group.WORLD``).
        """
        vector = self.vector.clone()
        torch.distributed.all_reduce(vector, group=group)
        return ClipStatistics(vector)


def bucket_counts(config: BAPOConfig) -> tuple[int, int]:
    """Number of buckets of positive and of negative tokens.

    n grid points make n + 1 buckets. Negative tokens have one more, for those that the dual clip leaves no gradient.
    """
    return config.upper_steps + 2, config.lower_steps + 3


def split_buckets(statistics: ClipStatistics, config: BAPOConfig) -> tuple[Tensor, Tensor]:
    """The sums per bucket of positive and of negative tokens, ``(SUMS, buckets)``, both by rising ratio.

    Positive bucket b holds b grid points <= r; negative bucket b holds b grid points < r.
    """
    table = statistics.vector[:-COUNTS].view(SUMS, -1)
    _, lower = bucket_counts(config)
    return table[:, lower:], table[:, :lower].flip(1)


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
        ValueError: the shapes differ, or ``clip_ratio_c`` is below 1.
    """
    if clip_ratio_c is not None and not clip_ratio_c >= 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c!r} is not usable: use a number above 1, or None for no dual clip."
        )
    check_shapes(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    statistics = ClipStatistics.zeros(config, log_prob.device)
    edges = _signed_edges(config, clip_ratio_c, log_prob.device)
    tokens = [tensor.reshape(-1) for tensor in (old_log_prob, log_prob, advantages, response_mask)]
    chunk = _chunk_size(log_prob)
    for start in range(0, log_prob.numel(), chunk):
        _add_chunk(statistics.vector, [tensor[start : start + chunk] for tensor in tokens], edges, config)
    return statistics


def _chunk_size(log_prob):
    chunk = max(MIN_CHUNK, -(-log_prob.numel() // 8))
    return min(chunk, MAX_CPU_CHUNK) if log_prob.device.type == "cpu" else chunk


def _signed_edges(config, clip_ratio_c, device):
    """Edges of the buckets of ``copysign(ratio, advantage)``: one lookup then serves both signs."""
    # The float64 just below makes r >= clip_ratio_c, not r > clip_ratio_c, the bucket without a gradient.
    dual_clip = math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, -math.inf)
    ends = torch.zeros(2, dtype=torch.float64, device=device)
    ends[:1].fill_(-dual_clip)
    return torch.cat([ends[:1], -lower_grid(config, device).flip(0), ends[1:], upper_grid(config, device)])


def _add_chunk(vector, tokens, edges, config):
    old_log_prob, log_prob, advantages, mask = tokens
    mask = mask.bool()
    finite = [tensor.abs() < math.inf for tensor in (old_log_prob, log_prob, advantages)]  # cheaper than isfinite
    valid = mask & finite[0] & finite[1] & finite[2]
    ratio = log_ratio_of(old_log_prob, log_prob, valid).exp_().double()
    sources = ratio.new_empty(SUMS, len(ratio))
    weight, weighted_ratio, count = sources
    torch.abs(advantages.double(), out=weight)
    if config.token_weight == "rollout_prob":
        weight *= old_log_prob.to(torch.promote_types(old_log_prob.dtype, torch.float32)).exp()
    weight.masked_fill_(~valid, 0)
    torch.mul(weight, ratio, out=weighted_ratio)
    count.copy_((advantages != 0).logical_and_(valid))
    # Edges <= key: for positive tokens grid points <= r; for negative ones grid points >= r.
    bucket = torch.bucketize(ratio.copysign_(advantages), edges, right=True)
    vector[:-COUNTS].view(SUMS, -1).index_add_(1, bucket, sources)
    response_tokens = mask.sum(dtype=torch.int32)
    for index, tensor in enumerate(finite):
        vector[-COUNTS + index] += response_tokens - tensor.logical_and_(mask).sum(dtype=torch.int32)
    vector[-1] += response_tokens
