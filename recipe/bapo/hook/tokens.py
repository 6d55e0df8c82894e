# SPDX-License-Identifier: Apache-2.0
"""Single tokens of a sample of a run's updates, from which ``python -m recipe.bapo.report tokens`` makes its page.

The sample: every update of the training steps 1, 2, 4, 8, 16 and so on, and of each update the first ``RESPONSES``
responses of each data-parallel rank, in the order of its forwards. Each rank writes a file for each update, and stops
at ``MAX_BYTES``. A row is a response token. This file imports neither verl nor Ray.
"""

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from bapo import is_usable
from recipe.bapo.hook.record import TIME
from recipe.bapo.hook.tell import tell

RESPONSES = 64  # of an update on a rank
MAX_BYTES = 256 * 2**20  # that a rank writes in one start of the training process
VERSION = 1
KEY = b"bapo_tokens"  # of a file's metadata: JSON with the version, what is known of the loss, step, update and rank
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # of the trainer
        ("update", pa.int32()),  # number of updates since the rollout servers got their weights, from 0
        ("rank", pa.int32()),  # among the data-parallel ranks
        ("response", pa.int32()),  # number of the response in this rank's part of the update, from 0
        ("position", pa.int32()),  # of the token in its response, from 0
        ("token", pa.int32()),
        ("old_log_prob", pa.float32()),
        ("log_prob", pa.float32()),  # before the update
        ("advantage", pa.float32()),
        ("cut", pa.bool_()),  # whether the run's loss clips or caps the token; null: its limits are not known
        ("c_low", pa.float64()),  # the bounds that BAPO's loss had, or those that the monitor found for this update;
        ("c_high", pa.float64()),  # null: it found none
    ]
)


class TokenFiles:
    """Writes the tokens of one rank. An error of the file system is told once, and then nothing is written.

    Args:
        folder: where the files are made.
        about: what the first line of the record says of the run's loss.
        rank: the number of this rank among the data-parallel ranks.
    """

    def __init__(self, folder: str | Path, about: Mapping, rank: int):
        self.folder, self.about, self.rank = Path(folder), {"version": VERSION, **about}, rank
        self.started = datetime.now(timezone.utc)
        self.parts: list[dict[str, Tensor]] = []  # the columns of each micro-batch of the current pass
        self.responses = self.written = 0  # of the current pass, and bytes of all files
        self.wanted = self.stopped = False  # whether the pass takes more responses; whether nothing more is written

    def begin(self, step: int) -> None:
        """Begin a pass over an update. What an earlier pass over it added is dropped."""
        self.parts, self.responses = [], 0
        self.wanted = not self.stopped and step & (step - 1) == 0  # also of step 0, which stands for an unknown one

    def add(
        self,
        token: Tensor,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        cut: Tensor | None,
        bounds: tuple[float, float] | None,
    ) -> None:
        """Add the responses of a micro-batch, ``(B, T)`` each. ``bounds``: those of the run's loss, if it has any."""
        fields = {"token": token, "old_log_prob": old_log_prob, "log_prob": log_prob, "advantage": advantages}
        fields = {name: field.float() if field.is_floating_point() else field for name, field in fields.items()}
        if cut is not None:
            fields["cut"] = cut & (advantages != 0) & is_usable(old_log_prob)
        if bounds is not None:
            low, high = (torch.full(mask.shape, bound, dtype=torch.float64) for bound in bounds)
            fields |= {"c_low": low, "c_high": high}
        rows = slice(RESPONSES - self.responses)
        response, position = mask[rows].bool().cpu().nonzero(as_tuple=True)
        part = {name: field[rows].cpu()[response, position] for name, field in fields.items()}
        self.parts.append(part | {"response": response + self.responses, "position": position})
        self.responses += len(mask[rows])
        self.wanted = self.responses < RESPONSES

    def write(self, step: int, update: int, bounds: tuple[float, float] | None) -> None:
        """Write the file of an update, if it is one of the sample. ``bounds``: those found, if its loss had none."""
        parts, self.parts = self.parts, []
        if not parts:
            return
        place = {"step": step, "update": update, "rank": self.rank}
        low, high = bounds or (None, None)
        constants = {**place, "cut": None, "c_low": low, "c_high": high}
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        size = len(columns["token"])
        arrays = [
            pa.array(columns[name].numpy(), kind)
            if name in columns
            else pa.repeat(pa.scalar(constants[name], kind), size)
            for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)
        ]
        metadata = {KEY: json.dumps(self.about | place)}
        file = io.BytesIO()
        pq.write_table(pa.table(arrays, SCHEMA.with_metadata(metadata)), file, compression="zstd")
        name = f"tokens-{self.started:{TIME}}-step{step:06d}-update{update:04d}-rank{self.rank:04d}.parquet"
        try:
            self._save(self.folder / name, file.getvalue())
        except OSError as error:
            self.stopped = True
            tell(f"no tokens are written from now on, because {error}.")

    def _save(self, path: Path, content: bytes) -> None:
        """Write a file that is complete as soon as it has its name."""
        unfinished = path.with_suffix(".part")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(content)
            unfinished.rename(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        self.written += len(content)
        if self.written > MAX_BYTES:
            self.stopped = True
            tell(f"rank {self.rank} writes no more tokens in this run: it has written {self.written / 2**20:.0f} MiB.")
