# SPDX-License-Identifier: Apache-2.0
"""What the verdict needs of an update beside its metrics: the same in the worker and in the report."""

from torch import Tensor

from bapo import ClipStatistics


def verdict_inputs(stats: ClipStatistics, own_clip: bool) -> dict[str, Tensor]:
    """Return what follows from the sums of an update, or of many.

    Args:
        stats: sums of an update's tokens over all ranks, on the host, or of many updates in leading dimensions.
        own_clip: whether the run trains with another loss than BAPO's that clips.

    Returns:
        Numbers of tokens by name, in the leading dimensions of ``stats``: ``response_tokens``, ``positive_tokens`` and
        ``negative_tokens``; ``far_from_1``; with ``own_clip`` also ``clipped_positive`` and ``clipped_negative``, which
        the run's loss clips.
    """
    positive, negative = stats.tokens_by_sign
    inputs = {"response_tokens": stats.sums.tokens, "positive_tokens": positive, "negative_tokens": negative}
    inputs["far_from_1"] = stats.sums.far_from_1
    if own_clip:
        inputs |= {f"clipped_{sign}": getattr(stats.sums, f"own_clipped_{sign}") for sign in ("positive", "negative")}
    return inputs
