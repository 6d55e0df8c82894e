# SPDX-License-Identifier: Apache-2.0
"""Balanced Policy Optimization with Adaptive Clipping (arXiv 2510.18927) in pure torch."""

from bapo.config import BAPOConfig
from bapo.loss import SurrogateLoss, clipped_surrogate_loss
from bapo.search import ClipBounds, find_clip_bounds, search_clip_bounds
from bapo.statistics import ClipStatistics, collect_clip_statistics

__version__ = "0.1.0"

__all__ = [
    "BAPOConfig",
    "ClipBounds",
    "ClipStatistics",
    "SurrogateLoss",
    "clipped_surrogate_loss",
    "collect_clip_statistics",
    "find_clip_bounds",
    "search_clip_bounds",
]
