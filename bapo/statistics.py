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
from bapo.ratio import LOG_RATIO_LIMIT, check_shapes, log_ratio_of, ratio_dtype

# Tokens handled at a time. The temporaries of a chunk, about 32 bytes a token, stay in the cache of a CPU and, with a
# fifth of the tokens, below two (B, T) float32 tensors; a GPU wants few large kernels. float32 counts up to 2^24.
MIN_CHUNK, MAX_CPU_CHUNK, MAX_CHUNK = 1 << 13, 1 << 16, 1 << 24
SUMS = 3  # per bucket: sum of w*|A|, sum of w*|A|*r, number of tokens
COUNTS = 4  # response tokens with a finite old log-prob, log-prob, advantage; all response tokens
LANES = 8  # partial sums that threads add up side by side; a constant: the number of threads changes no rounding


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
    device = log_prob.device
    upper, lower = bucket_counts(config)
    sums = torch.zeros(SUMS, LANES, lower + 1 + upper, dtype=torch.float64, device=device)
    counts = torch.zeros(COUNTS, dtype=torch.float64, device=device)
    tokens = [tensor.reshape(-1) for tensor in (old_log_prob, log_prob, advantages, response_mask)]
    edges = _signed_edges(config, clip_ratio_c, ratio_dtype(old_log_prob, log_prob), device)
    chunk = _chunk_size(log_prob)
    for start in range(0, log_prob.numel(), chunk):
        _add_chunk(sums, counts, [tensor[start : start + chunk] for tensor in tokens], edges, config)
    table = sums.sum(1).abs_()
    table = torch.cat([table[:, :lower], table[:, lower + 1 :]], 1)  # without the bucket of tokens that do not count
    return ClipStatistics(torch.cat([table.view(-1), counts]))


def _chunk_size(log_prob):
    chunk = max(MIN_CHUNK, -(-log_prob.numel() // (5 * LANES)) * LANES)
    return min(chunk, MAX_CPU_CHUNK if log_prob.device.type == "cpu" else MAX_CHUNK)


def _signed_edges(config, clip_ratio_c, dtype, device):
    """Edges of the buckets of ``ratio * sign(advantage)``: one lookup then serves both signs, and 0 is a bucket too."""
    # The float64 just below makes r >= clip_ratio_c, not r > clip_ratio_c, the bucket without a gradient.
    dual_clip = math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, -math.inf)
    ends = torch.zeros(3, dtype=torch.float64, device=device)
    ends[:1].fill_(-dual_clip)
    ends[2:].fill_(math.exp(-LOG_RATIO_LIMIT) / 2)  # below every ratio
    edges = torch.cat([ends[:1], -lower_grid(config, device).flip(0), ends[1:], upper_grid(config, device)])
    # In the ratio's own type, rounded up: edge <= ratio then says the same of every ratio as in float64.
    rounded = edges.to(dtype)
    return torch.where(rounded < edges, rounded.nextafter(torch.full_like(rounded, math.inf)), rounded)


def _add_chunk(sums, counts, tokens, edges, config):
    old_log_prob, log_prob, advantages, _ = tokens
    valid = _count_tokens(counts, tokens)
    # Edges <= key: for positive tokens grid points <= r; for negative ones grid points >= r. What does not count has
    # the key 0 and so a bucket of its own, whatever its weight.
    key = log_ratio_of(old_log_prob, log_prob).exp_().mul_(advantages.sign()).mul_(valid).nan_to_num_(0)
    del valid
    lanes = math.gcd(len(key), LANES)
    bucket = torch.bucketize(key, edges, right=True).view(lanes, -1)

    def add(total, source):
        total[:lanes].scatter_add_(1, bucket, source.view(lanes, -1))

    weight = advantages.double()  # of either sign, like the key: all sums of a bucket have one sign, dropped at the end
    if config.token_weight == "rollout_prob":
        weight = weight * old_log_prob.to(torch.promote_types(old_log_prob.dtype, torch.float32)).exp()
    add(sums[0], weight)
    add(sums[1], weight * key)
    add(sums[2], torch.ones_like(weight))


def _count_tokens(counts, tokens):
    """Add to the counts; 1.0 where a token counts and 0.0 elsewhere."""
    *values, mask = tokens
    # Not bools: to compare into floats and to add these up takes a third of the time. 0 times inf or NaN is NaN.
    flags = torch.empty(COUNTS, len(mask), dtype=torch.float32, device=mask.device)
    for flag, value in zip(flags, values, strict=False):
        torch.mul(value, 0, out=flag)
    finite, masked = flags[:-1], flags[-1]
    masked.copy_(mask.bool().view(torch.uint8))
    finite.eq_(0).mul_(masked)
    counts += flags.sum(1)
    return finite[0].mul_(finite[1]).mul_(finite[2])
