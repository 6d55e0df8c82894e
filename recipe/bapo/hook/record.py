# SPDX-License-Identifier: Apache-2.0
"""The record of a run: the token sums of each update, from which ``recipe.bapo.report`` answers its questions.

Each start of a training process writes one new file, ``record-<UTC time>-<host>-<process>.jsonl``. Its name comes after
those of earlier starts, also where the clock of its host is behind. Its first line says what the run does. Each further
line is an update, with its sums over all ranks: about 190 numbers with the default ranges, whatever the size of the
batch. Numbers that are not finite are null. This file imports neither verl nor Ray, so any trainer can write a record.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from itertools import islice, takewhile
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import bapo
from bapo import BAPOConfig, ClipStatistics, TokenSums, empty_clip_statistics
from recipe.bapo.hook.tell import tell

Shapes = dict[str, torch.Size]  # of each sum
Parsed = tuple[dict[str, float], dict[str, float], list[list[float]]]  # an update's numbers, values and sums
TIME = "%Y%m%dT%H%M%S.%fZ"  # in the name of a record; times sort as their texts do
# Values that an update has together or not at all: if the first of a row is there, the others have to be.
TOGETHER = (
    ("met_at_start", "met_by_moving", "saturated", "clipfrac_positive", "clipfrac_negative")
    + ("positive_contribution", "positive_contribution_start", "positive_contribution_highest"),
    ("redone", "extra_forward"),
)
# A limit of ``own_clip`` that is null in the record.
NO_LIMITS = {"low": -math.inf, "high": math.inf, "dual_clip": math.inf}
# Sums of which the report needs nothing but ``entropy_covariance``, which is among the values.
NOT_RECORDED = {f"{sign}_gradient{of}" for sign in ("positive", "negative") for of in ("", "_log_prob")}
LARGEST = 1e300  # of a sum; products of larger ones are infinite
# What stands for sums that records of an earlier version do not have.
NEW_SUMS = {"dual_clipped_weight": 0.0}
NEW_SUMS |= dict.fromkeys(("far_from_1", "ratio_log_prob", "own_gradient", "own_gradient_log_prob"), math.nan)


class Record:
    """Writes the record of a process. An error of the file system is logged once, and then nothing is written.

    Args:
        folder: where the file is made, at the first update.
        config: the options of the search.
        about: what else the first line says of the run, by name. The report reads ``applied`` (whether the loss uses
            the bounds), ``loss_mode``, ``strategy``, ``clip_ratio_c`` and ``own_clip`` (the fields of an ``OwnClip``,
            if the run trains with another loss that clips); any of them may be missing.
    """

    def __init__(self, folder: str | Path, config: BAPOConfig, about: Mapping):
        self.folder = Path(folder)
        options = {field.name: getattr(config, field.name) for field in fields(BAPOConfig)}
        started = {"host": os.uname().nodename, "bapo": bapo.__version__}
        self.first_line = {**started, "options": options, **_finite(dict(about))}
        self.path: Path | None = None  # set at the first update
        self.failed = False

    def write(self, stats: ClipStatistics, values: Mapping[str, float], **numbers: float | None) -> None:
        """Add an update.

        Args:
            stats: sums of its tokens over all ranks, on the host.
            values: its bounds and metrics by name, as ``bapo.read_and_validate`` returns them.
            numbers: where the update stands: ``call``, the number of the trainer's call of the worker, and ``update``,
                the number of updates since the rollout servers got their weights, both from 0; ``step``, the trainer's
                own number, which goes on where a run is resumed; ``on_policy``, 1 where all ratios must be 1, because
                the weights that are updated computed the old log-probs; ``grad_norm``. Any of them may be missing.
        """
        if self.failed:
            return
        sums = {name: value.tolist() for name, value in stats.sums._asdict().items() if name not in NOT_RECORDED}
        line = {**numbers, "time": round(time.time(), 3), "values": dict(values), "sums": sums}
        try:
            if self.path is None:
                self._create()
            self._append(_finite(line))
        except OSError as error:
            self.failed = True
            tell(f"no record is written from now on, because {error}.")

    def _create(self) -> None:
        now = datetime.now(timezone.utc)
        self.folder.mkdir(parents=True, exist_ok=True)
        times = filter(None, map(_time_in_name, self.folder.glob("record-*.jsonl")))
        later = max([now, *(time + timedelta(microseconds=1) for time in times)])
        self.path = self.folder / f"record-{later:{TIME}}-{os.uname().nodename}-{os.getpid()}.jsonl"
        self.path.touch(exist_ok=False)
        self._append({"utc": now.isoformat(timespec="seconds"), **self.first_line})

    def _append(self, line: dict) -> None:
        assert self.path is not None
        with open(self.path, "a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Updates:
    """Consecutive updates in a record.

    Attributes:
        numbers: the ``call``, ``update``, ``step`` and ``time`` (seconds since 1970) of each, as in ``Record.write``.
        values: the bounds and metrics of each. What is null in the file is missing, as in ``numbers``.
        stats: the sums, ``(updates, buckets)`` and ``(updates,)``; NaN where the file has null, and for what is not
            recorded.
    """

    numbers: list[dict[str, float]]
    values: list[dict[str, float]]
    stats: ClipStatistics


@dataclass(frozen=True)
class Start:
    """What one start of a training process recorded.

    Attributes:
        path: the file.
        about: its first line.
        config: the options of the search.
    """

    path: Path
    about: dict
    config: BAPOConfig

    def updates(self, at_once: int = 250) -> Iterator[Updates]:
        """Read the updates up to the last line that is complete, ``at_once`` at a time.

        Raises:
            ValueError: a line is not an update of this version, or does not fit the options.
        """
        empty = empty_clip_statistics(self.config).sums._asdict()
        shapes = {name: one.shape for name, one in empty.items() if name not in NOT_RECORDED}
        with open(self.path, "rb") as file:
            complete = enumerate(takewhile(lambda line: line.endswith(b"\n"), file), start=1)
            lines = islice(complete, 1, None)
            while chunk := list(islice(lines, at_once)):
                numbers, values, sums = zip(*(self._read(line, number, shapes) for number, line in chunk), strict=True)
                found = {name: one.new_full((len(chunk), *one.shape), math.nan) for name, one in empty.items()}
                for (name, shape), column in zip(shapes.items(), zip(*sums, strict=True), strict=True):
                    found[name] = torch.tensor(column, dtype=torch.float64).view(-1, *shape)
                yield Updates(list(numbers), list(values), ClipStatistics(TokenSums(**found), self.config))

    def _read(self, line: bytes, number: int, shapes: Shapes) -> Parsed:
        try:
            return _parse_update(line, shapes)
        except ValueError as error:
            raise _unreadable(self.path, number, error) from error


def read_start(path: Path) -> Start | None:
    """Read the first line of a file of a record; None if it is not complete.

    Raises:
        ValueError: the file is not a record of this version.
    """
    with open(path, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):  # its process was killed, or the disk was full
        return None
    try:
        about = _parse_object(line)
        # The sums do not depend on the scope, and a record may have one that is no longer an option.
        options = {name: value for name, value in _part(about, "options").items() if name != "bound_scope"}
        _refuse_any("unknown options", options.keys() - {field.name for field in fields(BAPOConfig)})
        if about.get("own_clip") is not None:
            own_clip = _part(about, "own_clip")
            _refuse_any("an own_clip without", {"kind", *NO_LIMITS} - own_clip.keys())
            own_clip |= {name: limit for name, limit in NO_LIMITS.items() if own_clip[name] is None}
            _refuse_any("no numbers in own_clip as", NO_LIMITS.keys() - _numbers(own_clip).keys())
            own_clip.setdefault("of", "ratio")  # before other quantities were known
        return Start(path, about, BAPOConfig(**options))
    except (ValueError, OverflowError) as error:
        raise _unreadable(path, 1, error) from error


def _unreadable(path: Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a record of this version (line {number}: {error})")


def _parse_update(line: bytes, shapes: Shapes) -> Parsed:
    """Return the numbers, the values and the sums of an update: of each sum a list of its numbers."""
    update = _parse_object(line, parse_int=float)
    values = _numbers(_part(update, "values"))
    for first, *others in TOGETHER:
        if first in values:
            _refuse_any("no numbers as the values", set(others) - values.keys())
    sums = _part(update, "sums")
    _refuse_any("missing sums", shapes.keys() - sums.keys() - NEW_SUMS.keys())
    _refuse_any("unknown sums", sums.keys() - shapes.keys())
    parsed = {
        name: _parse_sum(name, sums[name], shape.numel()) if name in sums else [NEW_SUMS[name]] * shape.numel()
        for name, shape in shapes.items()
    }
    if "met_at_start" in values:  # it was measured, so only sums that the record does not have may be missing
        known = [name for name in shapes if name not in NEW_SUMS]
        _refuse_any("no usable numbers in", [n for n in known if not all(abs(x) < LARGEST for x in parsed[n])])
    return _numbers(update), values, list(parsed.values())


def _parse_sum(name: str, recorded: Any, size: int) -> list[float]:
    numbers = recorded if isinstance(recorded, list) else [recorded]
    if not {float, NoneType}.issuperset(map(type, numbers)):
        raise ValueError(f"something else than numbers in the sum {name}")
    if len(numbers) != size:
        raise ValueError(f"{len(numbers)} numbers in the sum {name}, and {size} with the options in line 1")
    return [math.nan if number is None else number for number in numbers] if None in numbers else numbers


def _parse_object(line: bytes, **how: Any) -> dict:
    """Parse a line that holds a dict."""
    with suppress(ValueError, RecursionError):
        if isinstance(parsed := json.loads(line, **how), dict):
            return parsed
    raise ValueError("no JSON object")


def _part(parsed: dict, name: str) -> dict:
    """Return a dict in a dict."""
    if not isinstance(parsed.get(name), dict):
        raise ValueError(f"no {name}")
    return parsed[name]


def _numbers(named: dict) -> dict[str, float]:
    """Return what of a dict is a number."""
    return {name: value for name, value in named.items() if isinstance(value, (int, float))}


def _refuse_any(what: str, names: Collection[str]) -> None:
    """Raise a ValueError if there are names."""
    if names:
        raise ValueError(f"{what} {', '.join(sorted(names))}")


def _time_in_name(path: Path) -> datetime | None:
    """Return the time in the name of a record; None if it has another name."""
    with suppress(ValueError):
        return datetime.strptime(path.name.split("-")[1], TIME).replace(tzinfo=timezone.utc)
    return None


def _finite(value: Any) -> Any:
    """Replace the numbers that are not finite by None, in dicts and lists too."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
