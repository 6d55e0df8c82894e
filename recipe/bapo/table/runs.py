# SPDX-License-Identifier: Apache-2.0
"""Read the validations of runs, and group runs by method.

A run is a folder with ``metrics.jsonl``, as ours write it, or a file that verl's ``file`` logger wrote. verl alone
writes ``<project>/<experiment>.jsonl``, so a folder without ``metrics.jsonl`` holds as many runs as it has such files.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from recipe.bapo.host.files import ANSWERS, CONFIG, METRICS
from recipe.bapo.host.metrics import read_file, read_metrics

CURVES = {"critic/rewards/mean": "training reward", "actor/entropy": "entropy, nats a token"}
_VALIDATION = re.compile(r"val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<measure>mean@\d+|(?:best|maj)@\d+/mean)")
_SEED = re.compile(r"[-_](?:seed[-_]?)?\d{1,3}$")


class Measure(NamedTuple):
    """What verl logs of a validation, such as ``mean@16`` of ``acc`` on ``aime_2024``."""

    source: str
    variable: str  # acc where verl's scorer returns it, otherwise reward
    name: str  # mean@k, best@k/mean or maj@k/mean

    @property
    def is_mean(self) -> bool:
        """Whether this is the mean over all responses."""
        return self.name.startswith("mean@")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        path: its folder, or its file of metrics.
        method: the name of its row.
        validations: the value at each validated step, by measure.
        curves: the value at each training step, by metric of ``CURVES``.
        config: the config that a run of ours saved, by dotted key; empty for others.
    """

    path: Path
    method: str
    validations: dict[Measure, dict[int, float]]
    curves: dict[str, dict[int, float]]
    config: dict[str, Any]

    def problems(self, measure: Measure, step: int) -> dict[str, float]:
        """Return the mean of each problem's responses at a validation, by prompt.

        Empty where the responses were not kept (``trainer.validation_data_dir``), or where their mean is not what verl
        logged: then they cannot be told apart by data set.
        """
        path = Path(self.config.get("trainer.validation_data_dir") or self.path / ANSWERS) / f"{step}.jsonl"
        path = path if path.exists() else self.path / ANSWERS / path.name  # the folder may have been moved
        if not measure.is_mean or not path.exists():
            return {}
        key = "score" if measure.variable == "reward" else measure.variable
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if not all(key in row for row in rows):
            return {}
        found = pd.DataFrame({"prompt": row["input"], "value": float(row[key] or 0)} for row in rows)
        means = found.groupby("prompt", sort=False)["value"].mean().to_dict()
        if len({one.source for one in self.validations}) > 1:
            means = {prompt: mean for prompt, mean in means.items() if self._source_of(prompt) == measure.source}
        logged = self.validations[measure][step]
        return means if means and np.isclose(np.mean(list(means.values())), logged, atol=1e-6) else {}

    def _source_of(self, prompt: str) -> str | None:
        """Find the data set of a prompt, which verl keeps with the chat template around it."""
        return next((source for text, source in self._texts.items() if text in prompt), None)

    @property
    def _texts(self) -> dict[str, str]:
        """The data set of each problem's text, in the files that the run validated on, where they are still there."""
        files = self.config.get("data.val_files") or []
        return _texts_of(tuple([files] if isinstance(files, str) else files))


@cache
def _texts_of(files: tuple[str, ...]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for file in files:
        if Path(file).exists():
            table = pd.read_parquet(file, columns=["data_source", "prompt"])
            texts |= {
                prompt[-1]["content"].strip(): source
                for source, prompt in zip(table["data_source"], table["prompt"], strict=True)
            }
    return texts


def read_runs(arguments: list[str]) -> list[Run]:
    """Read runs, each given as ``PATH`` or ``METHOD=PATH``.

    Without a method, it is the name of the folder or file without a number at its end: ``bapo`` for ``runs/bapo-2``.

    Raises:
        ValueError: a path is no run, or a run has no validation.
    """
    runs = []
    for argument in arguments:
        method, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
        for file in _files_of(Path(path)):
            runs.append(_read(file, method or _SEED.sub("", file.stem if file.is_file() else file.resolve().name)))
    return runs


def _files_of(path: Path) -> list[Path]:
    """Return the path of each run in ``path``: itself, or the files in a folder that verl's logger wrote."""
    if path.is_file() or (path / METRICS).exists():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{path} holds no run: give a folder with {METRICS}, or a file of verl's file logger.")
    return files


def _read(path: Path, method: str) -> Run:
    records = read_metrics(path) if path.is_dir() else read_file(path)
    validations: dict[Measure, dict[int, float]] = {}
    curves: dict[str, dict[int, float]] = {metric: {} for metric in CURVES}
    for step, data in records:
        for key, value in data.items():
            if match := _VALIDATION.fullmatch(key):
                measure = Measure(match["source"], match["variable"], match["measure"])
                validations.setdefault(measure, {})[step] = value
            elif key in curves:
                curves[key][step] = value
    if not validations:
        raise ValueError(f"{path} has no validation (val-core/*): set trainer.test_freq and data.val_files in the run.")
    config = path / CONFIG
    return Run(path, method, validations, curves, dict(_flat(config)) if config.exists() else {})


def _flat(path: Path) -> Iterator[tuple[str, Any]]:
    def items(value, key):
        if isinstance(value, dict) and value:
            for name, below in value.items():
                yield from items(below, f"{key}.{name}" if key else str(name))
        else:
            yield key, value

    yield from items(yaml.safe_load(path.read_text()), "")


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs by method, in the order in which methods appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups
