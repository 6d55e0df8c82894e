# SPDX-License-Identifier: Apache-2.0
"""The record of a run: the token sums of each update, from which ``recipe.bapo.report`` answers its questions.

Each start of a training process writes one new file, ``record-<UTC time>-<host>-<process>.jsonl``. Its name comes after
those of earlier starts, also where the clock of its host is behind. Its first line says what the run does. Each further
line is an update, with its sums over all ranks: 181 numbers with the default ranges, whatever the size of the batch.
Numbers that are not finite are null. This file imports neither verl nor Ray, so any trainer can write a record.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from bapo import BAPOConfig, ClipStatistics, TokenSums
from recipe.bapo.tell import tell

TIME = "%Y%m%dT%H%M%S.%fZ"  # in the name of a record; times sort as their texts do


class Record:
    """Writes the record of a process. An error of the file system is logged once, and then nothing is written.

    Args:
        folder: where the file is made, at the first update.
        config: the options of the search.
        about: what else the first line says of the run, by name. The report reads ``applied`` (whether the loss uses
            the bounds), ``loss_mode``, ``strategy``, ``clip_ratio_c`` and ``own_clip`` (the fields of an ``OwnClip``,
            if the run trains with another loss that clips by the token's ratio); any of them may be missing.
    """

    def __init__(self, folder: str | Path, config: BAPOConfig, about: Mapping):
        self.folder = Path(folder)
        options = {field.name: getattr(config, field.name) for field in fields(BAPOConfig)}
        self.first_line = {"host": socket.gethostname(), "options": options, **_finite(dict(about))}
        self.path: Path | None = None  # set at the first update
        self.failed = False

    def write(self, stats: ClipStatistics, values: Mapping[str, float], **numbers: float | None) -> None:
        """Add an update.

        Args:
            stats: sums of its tokens over all ranks, on the host.
            values: its bounds and metrics by name, as ``bapo.read_and_validate`` returns them.
            numbers: where the update stands: ``call``, the number of the trainer's call of the worker, and ``update``,
                the number of updates since the rollout servers got their weights, both from 0; ``step``, the trainer's
                own number, which goes on where a run is resumed. Any of them may be missing.
        """
        if self.failed:
            return
        sums = {name: value.tolist() for name, value in stats.sums._asdict().items()}
        line = {**numbers, "time": round(time.time(), 3), "values": dict(values), "sums": sums}
        try:
            if self.path is None:
                self._create()
            self._append(_finite(line))
        except OSError as error:
            self.failed = True
            tell(f"no record is written from now on, because {error}.")

    def _create(self):
        now = datetime.now(UTC)
        self.folder.mkdir(parents=True, exist_ok=True)
        times = filter(None, map(_time_in_name, self.folder.glob("record-*.jsonl")))
        later = max([now, *(time + timedelta(microseconds=1) for time in times)])
        self.path = self.folder / f"record-{later:{TIME}}-{socket.gethostname()}-{os.getpid()}.jsonl"
        self.path.touch(exist_ok=False)
        self._append({"utc": now.isoformat(timespec="seconds"), **self.first_line})

    def _append(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Update:
    """An update in a record.

    Attributes:
        numbers: ``call``, ``update``, ``step`` and ``time`` (seconds since 1970), as in ``Record.write``.
        values: bounds and metrics; NaN where the record has null.
        stats: the sums.
    """

    numbers: dict[str, float]
    values: dict[str, float]
    stats: ClipStatistics


@dataclass(frozen=True)
class Start:
    """What one start of a training process recorded.

    Attributes:
        path: the file.
        about: its first line.
        config: the options of the search.
        updates: in order.
    """

    path: Path
    about: dict
    config: BAPOConfig
    updates: list[Update]


def read_record(path: Path) -> Start:
    """Read a file of a record, up to the last line that is complete. If none is, there are no updates.

    Raises:
        ValueError: the file is not a record of this version.
    """
    complete = path.read_bytes().split(b"\n")[:-1]
    if not complete:  # its process was killed, or the disk was full, at the first line
        return Start(path, {}, BAPOConfig(), [])
    try:
        first, *lines = complete
        about = json.loads(first)
        # The sums do not depend on the scope, and a record may have one that is no longer an option.
        config = BAPOConfig(**{name: value for name, value in about["options"].items() if name != "bound_scope"})
        updates = [_read_update(json.loads(line), config) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a record of this version ({type(error).__name__}: {error}).") from error
    return Start(path, about, config, updates)


def _read_update(line, config):
    recorded = {"dual_clipped_weight": 0.0, **line["sums"]}  # a sum that records before version 0.3 do not have
    sums = {name: torch.tensor(_numbers(recorded[name]), dtype=torch.float64) for name in TokenSums._fields}
    values = {name: _numbers(value) for name, value in line["values"].items()}
    numbers = {name: value for name, value in line.items() if name not in ("values", "sums") and value is not None}
    return Update(numbers, values, ClipStatistics(TokenSums(**sums), config))


def _time_in_name(path):
    """Return the time in the name of a record; None if it has another name."""
    with suppress(ValueError):
        return datetime.strptime(path.name.split("-")[1], TIME).replace(tzinfo=UTC)
    return None


def _finite(value):
    """Replace the numbers that are not finite by None, in dicts and lists too."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value):
    """Replace None by NaN, in lists too."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return math.nan if value is None else value
