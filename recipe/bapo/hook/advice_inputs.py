# SPDX-License-Identifier: Apache-2.0
"""What the advice needs of an update beside its metrics: the same in the worker and in the report."""

from dataclasses import replace

from torch import Tensor

from bapo import BAPOConfig, ClipStatistics
from bapo.config import CHOICES
from bapo.search import measure_search_path


def advice_inputs(stats: ClipStatistics, config: BAPOConfig, own_clip: bool) -> dict[str, Tensor]:
    """Return what follows from the sums of an update, or of many.

    Args:
        stats: sums of an update's tokens over all ranks, on the host, or of many updates in leading dimensions.
        config: the options of the search.
        own_clip: whether the run trains with another loss than BAPO's that clips by the ratio of a token.

    Returns:
        By name, in the leading dimensions of ``stats``: ``response_tokens``, ``positive_tokens`` and
        ``negative_tokens``; ``beyond_upper_start``, the number of tokens with A > 0 whose ratio is at or above the
        start of ``c_high``; with ``own_clip`` also ``clipped_positive`` and ``clipped_negative``, the numbers of tokens
        that the run's loss clips; and ``<contribution>_start`` and ``<contribution>_highest``, rho at the start of the
        search and the highest on its path, for both measures.
    """
    positive, negative = stats.tokens_by_sign
    inputs = {"response_tokens": stats.sums.tokens, "positive_tokens": positive, "negative_tokens": negative}
    inputs["beyond_upper_start"], _ = stats.clipped_tokens(config.lower.grid()[0], config.upper.grid()[0])
    if own_clip:
        inputs |= {f"clipped_{sign}": getattr(stats.sums, f"own_clipped_{sign}") for sign in ("positive", "negative")}
    for contribution in CHOICES["contribution"]:
        rho = measure_search_path(stats, replace(config, contribution=contribution)).positive_contribution
        inputs |= {f"{contribution}_start": rho[..., 0], f"{contribution}_highest": rho.max(-1).values}
    return inputs
