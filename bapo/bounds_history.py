# SPDX-License-Identifier: Apache-2.0
"""Which earlier search an update takes its bounds from with ``bound_scope=previous_batch``.

Update k on a rollout batch takes the bounds that the search found on the tokens of update k on the batch before it. The
position k matters, because the ratios tend to move away from 1 with each update on a batch. If old log-probs are
recomputed, all ratios of the first update are 1. A search on its tokens can then only end at the start of the ranges or
at their end.
"""

from bapo.config import BAPOConfig
from bapo.search import ClipBounds


class BoundsHistory:
    """The bounds that were found on this and on the previous rollout batch, by the position of the update.

    Attributes:
        latest: the result of the latest search; the start of the ranges before the first one.
    """

    def __init__(self, config: BAPOConfig):
        self.latest = ClipBounds.before_any_search(config)
        self._previous_batch: dict[int, ClipBounds] = {}
        self._this_batch: dict[int, ClipBounds] = {}

    def next_batch(self) -> None:
        """Start a rollout batch: call this before its first update."""
        self._previous_batch, self._this_batch = self._this_batch, {}

    def get(self, position: int) -> ClipBounds:
        """Return the bounds for an update; ``position`` counts the updates on its rollout batch from 0.

        If the previous batch had no update at this position, the bounds are those of the latest search.
        """
        return self._previous_batch.get(position, self.latest)

    def put(self, position: int, found: ClipBounds | None) -> None:
        """Keep what the search found on the tokens of an update, for the next rollout batch.

        None: no token had an advantage, so nothing was found. The next batch then gets the previous batch's bounds at
        this position, if there are any.
        """
        if found is not None:
            self._this_batch[position] = self.latest = found
        elif position in self._previous_batch:
            self._this_batch[position] = self._previous_batch[position]
