# SPDX-License-Identifier: Apache-2.0
"""Balanced Policy Optimization with Adaptive Clipping (arXiv 2510.18927) in pure torch.

Read the modules in this order: ``config``, ``ratio``, ``entropy``, ``clip_statistics``, ``search``, ``diagnostics``,
``bounds``, ``forecast``, ``loss``. Each imports only modules before it in the list. Code outside this repository may
import the names in ``__all__``; everything else may change.
"""

from importlib.metadata import PackageNotFoundError, version

from bapo.bounds import find_clip_bounds, read_and_validate, read_scalars
from bapo.clip_statistics import ClipStatistics, TokenSums, collect_clip_statistics, empty_clip_statistics
from bapo.config import BAPOConfig, Range
from bapo.diagnostics import Diagnostics, diagnose
from bapo.entropy import EntropySums
from bapo.forecast import BoundsForecaster, Forecast, same_tokens_are_clipped
from bapo.loss import SurrogateLoss, clipped_surrogate_loss, is_clipped
from bapo.ratio import is_usable
from bapo.search import ClipBounds, search_clip_bounds

try:
    __version__ = version("bapo-verl")  # with the commit it was installed from
except PackageNotFoundError:
    __version__ = "of a folder that is not installed"

__all__ = [
    "BAPOConfig",
    "ClipBounds",
    "ClipStatistics",
    "Diagnostics",
    "EntropySums",
    "BoundsForecaster",
    "Forecast",
    "Range",
    "SurrogateLoss",
    "TokenSums",
    "clipped_surrogate_loss",
    "collect_clip_statistics",
    "diagnose",
    "empty_clip_statistics",
    "find_clip_bounds",
    "is_clipped",
    "is_usable",
    "read_and_validate",
    "read_scalars",
    "same_tokens_are_clipped",
    "search_clip_bounds",
]
