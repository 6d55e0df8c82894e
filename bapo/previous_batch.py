# SPDX-License-Identifier: Apache-2.0
"""Which earlier search an update takes its bounds from with ``bound_scope=previous_batch``.

Update k on a rollout batch takes the bounds that the search found on the tokens of update k on the batch before it. The
position k matters, because ratios grow along the updates on a batch: where old log-probs are recomputed, all ratios of
the first update are 1, and a search on its tokens finds the start of the ranges or their end and nothing between.
"""

import torch

from bapo.config import BAPOConfig
from bapo.search import ClipBounds


class EarlierBounds:
    """The bounds that the updates of this and the previous rollout batch left, by the position of the update.

    Attributes:
        latest: the result of the latest search; the start of the ranges before the first one.
    """

    def __init__(self, config: BAPOConfig, device: torch.device | str | None = None):
        self.latest = ClipBounds.before_any_search(config, device)
        self._previous_batch: dict[int, ClipBounds] = {}
        self._this_batch: dict[int, ClipBounds] = {}

    def start_batch(self) -> None:
        """Start a rollout batch: call this before its first update."""
        self._previous_batch, self._this_batch = self._this_batch, {}

    def of_update(self, position: int) -> ClipBounds:
        """Return the bounds for an update; ``position`` counts the updates on its rollout batch from 0.

        Where the batch before had no update at this position, the bounds are those of the latest search.
        """
        return self._previous_batch.get(position, self.latest)

    def keep(self, position: int, found: ClipBounds) -> None:
        """Leave the search's result on the tokens of an update to the next rollout batch."""
        self._this_batch[position] = self.latest = found
