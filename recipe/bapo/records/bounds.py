# SPDX-License-Identifier: Apache-2.0
"""Record the bounds of every update, bit for bit, in a JSON-lines file for each rank.

verl averages metrics over ranks, so its logs cannot show that all ranks hold the same bounds. This record can.
"""

import json
from pathlib import Path

from recipe.bapo.records import keep_earlier


class BoundsRecord:
    """Writes ``rank<N>.jsonl`` into a folder, or nothing if there is no folder."""

    def __init__(self, folder: str | None, rank: int):
        self.folder, self.rank = folder, rank
        self.file: Path | None = None  # set at the first line

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder, so that lines are written."""
        return self.folder is not None

    def write(self, update: int, source: str, values: dict[str, float]) -> None:
        """Add a line. Values are written as hexadecimal numbers, because these are exact.

        Args:
            update: counted from the start of the process. With ``bound_scope=micro_batch`` an update has many lines.
            source: which tokens the search saw. ``pass``: those of this update, by a forward before training.
                ``on_policy``: those of this update, whose ratios were known to be 1. ``loss``: those of the training
                forward. ``previous_batch``: those of the same update on the previous rollout batch.
            values: numbers by name, as ``bapo.read_and_validate`` returns them.
        """
        if self.folder is None:
            return
        if self.file is None:
            self.file = keep_earlier(Path(self.folder) / f"rank{self.rank}.jsonl")
        bits = {name: float(value).hex() for name, value in values.items()}
        with open(self.file, "a") as file:
            file.write(json.dumps({"update": update, "source": source, **bits}) + "\n")
