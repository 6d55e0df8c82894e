# SPDX-License-Identifier: Apache-2.0
"""Read the metrics of a run from what verl writes anyway: its console output, its file logger, or wandb's history.

It needs neither torch nor verl. Of a step that is in the file twice the last one counts, as after a restart.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Step = tuple[int, dict[str, float]]

# The beginning of a line of verl's console logger, after Ray's prefix and in a page's quotation.
_STEP = re.compile(r"(?:^|(?<=[\s)`>]))step:(\d+) *(?=-|\n *-)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# In a command that a shell prints (set -x), and in the config that verl prints at its start, as a dict of Python or as
# yaml. Distillation has another loss_mode, so the one of the policy loss has to follow that key.
_LOSS_MODE = re.compile(
    r"policy_loss\.loss_mode=[\"']?(\w+)"
    r"|[\"']policy_loss[\"']: ?\{[^{}]*?[\"']loss_mode[\"']: ?[\"'](\w+)"
    r"|(?<![\w.])policy_loss: *\n(?:(?![^\n]*_loss:)[^\n]*\n){0,40}?[^\n]*?(?<![\w.])loss_mode: *[\"']?(\w+)"
)
# A page or a terminal breaks long lines, before an item or anywhere.
_NEW_LINE = re.compile(r"\s*$|```|.*step:\d+ *-|.*\bpid=\d|Training Progress")
_ITEM = re.compile(r"[\w./@+()-]+/[\w./@+()-]*:-?[\w.+()-]*")
_STEP_COLUMNS = ("training/global_step", "global_step", "_step", "Step", "step")
_PARTS = ("actor/", "critic/")  # what the metrics of a training step begin with; validations have others
_COLUMNS = (*_PARTS, "response_length/", "training/")  # that are read from wandb's history
_OURS = re.compile(r"^.*BAPO: .*$", re.M)  # what our worker says is no config
_LAST_STEP = 10**12  # a larger number is none of a step


@dataclass
class Log:
    """The training steps of a run, as far as its log has them.

    Attributes:
        kind: what the file is, for a sentence.
        steps: number and metrics of each training step, in order. A value may be NaN or infinite.
        modes: the ``loss_mode`` of each step, where the file names one before it.
        restarts: how often an earlier step followed a later one.
        unread: number of values or lines that could not be read.
        decimals: the most decimals with which a value is written. Older versions of verl round to three.
    """

    kind: str
    steps: list[Step] = field(default_factory=list)
    modes: dict[int, str] = field(default_factory=dict)
    restarts: int = 0
    unread: int = 0
    decimals: int = 0

    def values(self, *names: str) -> list[tuple[int, float]]:
        """Return step and value of the first of these metrics that the log has, where it has it."""
        for name in names:
            found = [(step, metrics[name]) for step, metrics in self.steps if name in metrics]
            if found:
                return found
        return []


def read_log(path: Path) -> Log:
    """Read a file.

    Raises:
        ValueError: it is empty or binary, holds several runs, or has no training step of verl's.
    """
    content = path.read_bytes()
    if b"\0" in content:
        raise ValueError(
            f"{path} is a binary file: give a text log, verl's metrics as jsonl, or wandb's history as csv."
        )
    text = _COLOUR.sub("", content.decode(errors="replace")).replace("\r\n", "\n")
    if not text.strip():
        raise ValueError(f"{path} is empty.")
    first = text.lstrip().partition("\n")[0]
    if first.startswith("{") and '"data"' in first:
        log, steps = _read_jsonl(text)
    elif path.suffix == ".csv" or (_STEP.search(text) is None and _step_column(next(csv.reader([first])))):
        log, steps = _read_csv(path, text)
    else:
        log, steps = _read_console(text)
    _keep_last(log, steps)
    if not log.steps:
        unread = f" ({log.unread} values or lines could not be read)" * (log.unread > 0)
        raise ValueError(
            f"{path}{unread} has no training step of verl's: no line 'step:1 - actor/...' of its console logger, no "
            "line of its file logger, and no csv columns of steps and of metrics such as actor/pg_clipfrac. Logs of "
            "other frameworks are not read."
        )
    return log


def _read_console(text: str) -> tuple[Log, Iterator[Step]]:
    log = Log("verl's console output")
    text = _join_broken_lines(_OURS.sub("", text))
    modes = [(found.start(), "".join(filter(None, found.groups()))) for found in _LOSS_MODE.finditer(text)]
    starts = [start for start in _STEP.finditer(text) if len(start[1]) < 13]
    lines = [(int(start[1]), text[start.end() :].partition("\n")[0].split(" - ")) for start in starts]
    for start in starts:
        before = [mode for place, mode in modes if place < start.start()]
        log.modes |= {int(start[1]): before[-1]} if before else {}
    # A notebook's cell ends its lines with a quoted newline.
    lines = [(step, [re.sub(r'(\\n)?[\s"`,-]*$', "", item.lstrip(" -")) for item in items]) for step, items in lines]
    lines = [(step, list(filter(None, items))) for step, items in lines]
    lines = [(step, items) for step, items in lines if any(item.startswith(_PARTS) for item in items)]
    # verl's lines end alike. The last value of a line that was cut may be another number, so it is not taken.
    ends = Counter(_key(items[-1]) for _, items in lines)

    def steps() -> Iterator[Step]:
        for step, items in lines:
            if _key(items[-1]) != ends.most_common(1)[0][0]:
                log.unread += 1
                items.pop()
            yield step, _items(log, items)

    return log, steps()


def _join_broken_lines(text: str) -> str:
    """Join the lines of a step again."""
    joined: list[str] = []
    for line in text.split("\n"):
        before = joined[-1] if joined else ""
        if re.search(r"step:\d+", before) and not _NEW_LINE.match(line):
            if re.match(r"\s*- ?[\w/]+", line):
                joined[-1] = f"{before} {line.strip()}"
                continue
            item = before.rpartition(" - ")[2] + line.partition(" - ")[0]  # if it was broken inside an item
            if _ITEM.fullmatch(item.strip()) and (" - " in line or not _ITEM.fullmatch(line.strip())):
                joined[-1] = before + line
                continue
        joined.append(line)
    return "\n".join(joined)


def _key(item: str) -> str:
    return item.rpartition(":")[0]


def _items(log: Log, items: list[str]) -> dict[str, float]:
    """Read ``key:value``; verl prints numpy's numbers as ``np.float64(0.5)``."""
    metrics: dict[str, float] = {}
    for item in items:
        name, _, value = item.rpartition(":")
        value = re.sub(r"^[\w.]+\((.*?)\)?$", r"\1", value)
        _add(log, metrics, name, value)
    return metrics


def _add(log: Log, metrics: dict[str, float], name: str, value: str) -> None:
    try:
        metrics[name] = float(value)
    except ValueError:
        log.unread += 1
        return
    log.decimals = max(log.decimals, 17 if "e" in value else len(value.partition(".")[2]))


def _read_jsonl(text: str) -> tuple[Log, Iterator[Step]]:
    log = Log("verl's file logger", decimals=17)

    def steps() -> Iterator[Step]:
        for line in filter(None, map(str.strip, text.split("\n"))):
            try:
                record = json.loads(line)
                # verl writes NaN and infinity as null, and may log a text beside the numbers.
                data = {name: math.nan if value is None else value for name, value in record["data"].items()}
                step = _step(record["step"])
                yield step, {name: float(v) for name, v in data.items() if isinstance(v, (int, float))}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                log.unread += 1

    return log, steps()


def _step(number: Any) -> int:
    """Return the number of a step.

    Raises:
        ValueError, OverflowError: it is none.
    """
    step = int(number)
    if abs(step) > _LAST_STEP:
        raise ValueError(f"step {number}")
    return step


def _step_column(names: list[str]) -> str | None:
    return next((name for name in _STEP_COLUMNS if name in names), None)


def _read_csv(path: Path, text: str) -> tuple[Log, Iterator[Step]]:
    log = Log("wandb's history")
    csv.field_size_limit(2**31 - 1)  # a column may hold the texts of a table
    rows = csv.DictReader(text.split("\n"))
    columns = list(rows.fieldnames or [])
    step_column = _step_column(columns)
    # A chart's export has a column "RUN - METRIC" for each run, and "RUN - METRIC__MIN" and "__MAX" beside it.
    named = {name: name.rpartition(" - ")[2] for name in columns if name}
    wanted = Counter(metric for metric in named.values() if metric.startswith(_COLUMNS))
    several = [metric for metric, number in wanted.items() if number > 1]
    if several:
        raise ValueError(f"{path} has {wanted[several[0]]} columns of {several[0]}: export one run alone.")

    def steps() -> Iterator[Step]:
        for row in rows:
            metrics: dict[str, float] = {}
            for name, metric in named.items():
                value = row.get(name) or ""
                if metric in wanted and value:
                    _add(log, metrics, metric, value)
            try:
                step = _step(float(row.get(step_column or "") or "nan"))
            except (ValueError, OverflowError):
                log.unread += 1
                continue
            yield step, metrics

    return log, steps()


def _keep_last(log: Log, steps: Iterator[Step]) -> None:
    """Keep the training steps. An earlier one after a later one is a restart or a new run: it replaces what follows."""
    kept: dict[int, dict[str, float]] = {}
    last = None
    for step, metrics in steps:
        if not any(name.startswith(_PARTS) for name in metrics):
            continue
        if last is not None and step < last:
            log.restarts += 1
            kept = {one: values for one, values in kept.items() if one < step}
        kept[step] = metrics if step != last else {**kept[step], **metrics}
        last = step
    log.steps = sorted(kept.items())
    log.modes |= {step: "bapo" for step, one in kept.items() if one.get("actor/bapo/applied") == 1}
    log.modes = {step: mode for step, mode in log.modes.items() if step in kept}
