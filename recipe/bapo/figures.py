# SPDX-License-Identifier: Apache-2.0
"""The figures of an update that an advice needs: the same in the worker and in the report."""

from collections.abc import Mapping
from dataclasses import replace

from bapo import BAPOConfig, ClipStatistics, search_clip_bounds
from bapo.config import CHOICES


def figures_of(
    stats: ClipStatistics, values: Mapping[str, float], config: BAPOConfig, applied: bool, own_clip: bool
) -> dict[str, float]:
    """Return the values of an update with what follows from its sums.

    Args:
        stats: sums of its tokens over all ranks, on the host.
        values: what was measured of it (``recipe.bapo.scopes.Measured``).
        config: the options of the search.
        applied: whether the run's loss uses the bounds.
        own_clip: whether the run's loss, if it is another one, clips by the ratio of a token.

    Returns:
        ``values``, and, if the update was measured: ``response_tokens``, ``positive_tokens`` and ``negative_tokens``;
        ``clipped_positive`` and ``clipped_negative``, the numbers of tokens that the run's loss clips, if it does; and
        ``<contribution>_start`` and ``<contribution>_highest``, rho at the start of the search and the highest on its
        path, for both measures.
    """
    figures = dict(values)
    if "met_at_start" not in values:
        return figures
    tokens = dict(zip(("positive", "negative"), (count.item() for count in stats.tokens_by_sign), strict=True))
    figures |= {"response_tokens": stats.sums.tokens.item()} | {f"{sign}_tokens": n for sign, n in tokens.items()}
    for sign, count in tokens.items():
        if applied:
            figures[f"clipped_{sign}"] = values[f"clipfrac_{sign}"] * count
        elif own_clip:
            figures[f"clipped_{sign}"] = getattr(stats.sums, f"own_clipped_{sign}").item()
    for contribution in CHOICES["contribution"]:
        found = search_clip_bounds(stats, replace(config, contribution=contribution))
        figures[f"{contribution}_start"] = found.positive_contribution_start.item()
        figures[f"{contribution}_highest"] = found.positive_contribution_highest.item()
    return figures
