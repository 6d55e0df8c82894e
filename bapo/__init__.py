# SPDX-License-Identifier: Apache-2.0
"""Balanced Policy Optimization with Adaptive Clipping (arXiv 2510.18927) in pure torch.

Read ``config``, ``ratio``, ``statistics``, ``search``, ``diagnostics``, ``bounds`` and ``loss``, in this order; each
imports only what stands before it. What code outside this repository may import is listed here; the rest may change.
"""

from bapo.bounds import find_clip_bounds, read_values
from bapo.config import BAPOConfig, Range
from bapo.diagnostics import Diagnostics, diagnose
from bapo.loss import SurrogateLoss, clipped_surrogate_loss
from bapo.search import ClipBounds, search_clip_bounds
from bapo.statistics import ClipStatistics, collect_clip_statistics

__version__ = "0.1.0"

__all__ = [
    "BAPOConfig",
    "ClipBounds",
    "ClipStatistics",
    "Diagnostics",
    "Range",
    "SurrogateLoss",
    "clipped_surrogate_loss",
    "collect_clip_statistics",
    "diagnose",
    "find_clip_bounds",
    "read_values",
    "search_clip_bounds",
]
