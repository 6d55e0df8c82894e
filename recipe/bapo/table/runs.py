# SPDX-License-Identifier: Apache-2.0
"""Read the validations of runs, and group runs by method.

A run is a folder with ``metrics.jsonl``, as ours write it, or a file that verl's ``file`` logger wrote. verl alone
writes ``<project>/<experiment>.jsonl``, so a folder without ``metrics.jsonl`` holds as many runs as it has such files.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from recipe.bapo.host.files import ANSWERS, CONFIG, METRICS, is_record
from recipe.bapo.host.metrics import read_answers, read_file, read_metrics

# What verl logs of a validation, such as mean@16 of acc on aime_2024. The variable is acc where verl's scorer returns
# it, otherwise reward.
MEASURE = ["data_set", "variable", "measure"]
_VALIDATION = re.compile(r"val-core/(.+)/([^/]+)/(mean@\d+|(?:best|maj)@\d+/mean)")
CURVES = {"critic/rewards/mean": "training reward", "actor/entropy": "entropy, nats a token"}
_SEED = re.compile(r"[-_]seed[-_]?\d+$")


@dataclass(frozen=True)
class TrainingRun:
    """What one training run logged.

    Attributes:
        path: its folder, or its file of metrics.
        logged: a row for each value, with the columns ``MEASURE``, ``step`` and ``value``. Of the curves of training
            ``data_set`` is the title in ``CURVES``, ``variable`` and ``measure`` are empty.
        config: the config that a run of ours saved, by dotted key; empty for others.
    """

    path: Path
    logged: pd.DataFrame
    config: dict[str, Any]

    @property
    def validations(self) -> pd.DataFrame:
        """The rows of ``logged`` without the curves of training."""
        return self.logged[self.logged["measure"] != ""]

    def problems(self, data_set: str, variable: str, step: int, logged: float) -> pd.Series:
        """Return the mean of each problem's responses at a validation, by prompt.

        Empty where the responses were not kept (``trainer.validation_data_dir``), or where their mean is not
        ``logged``, the one of verl: then they cannot be told apart by data set.
        """
        nothing = pd.Series(dtype=float)
        path = Path(self.config.get("trainer.validation_data_dir") or self.path / ANSWERS) / f"{step}.jsonl"
        path = path if path.exists() else self.path / ANSWERS / path.name  # the folder may have been moved
        if not path.exists():
            return nothing
        responses = pd.DataFrame(read_answers(path))
        key = "score" if variable == "reward" else variable
        if key not in responses:
            return nothing
        means = responses[key].astype(float).groupby(responses["input"], sort=False).mean().dropna()
        if self.validations["data_set"].nunique() > 1:
            means = means[[self._data_set_of(prompt) == data_set for prompt in means.index]]
        return means if np.isclose(means.mean(), logged, atol=1e-6) else nothing

    def _data_set_of(self, prompt: str) -> str | None:
        """Find the data set of a prompt, which verl keeps with the chat template around it."""
        files = self.config.get("data.val_files") or []
        data_sets = _data_sets(tuple([files] if isinstance(files, str) else files))
        return next((data_set for text, data_set in data_sets.items() if text in prompt), None)


@cache
def _data_sets(files: tuple[str, ...]) -> dict[str, str]:
    """Return the data set of each problem's text, from those of the files that are still there."""
    data_sets: dict[str, str] = {}
    for file in files:
        if Path(file).exists():
            table = pd.read_parquet(file, columns=["data_source", "prompt"])
            texts = [prompt[-1]["content"].strip() for prompt in table["prompt"]]
            data_sets |= zip(texts, table["data_source"], strict=True)
    return data_sets


def read_methods(arguments: list[str]) -> dict[str, list[TrainingRun]]:
    """Read runs, each given as ``PATH`` or ``METHOD=PATH``, and group them by method, in the order of the arguments.

    Without a method, it is the name of the folder or file without a seed at its end: ``bapo`` for ``runs/bapo-seed2``,
    ``bapo_seed2`` and ``bapo_seed_2``. Another number at the end is part of the method's name.

    Raises:
        ValueError: a path is no run, or a run has no validation.
    """
    methods: dict[str, list[TrainingRun]] = {}
    for argument in arguments:
        named, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
        for file in _files_of(Path(path)):
            method = named or _SEED.sub("", file.stem if file.is_file() else file.resolve().name)
            methods.setdefault(method, []).append(_read(file))
    return methods


def _files_of(path: Path) -> list[Path]:
    """Return the path of each run in ``path``: itself, or the files in a folder that verl's logger wrote."""
    if (path / METRICS).exists():
        return [path]
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{path} holds no run: give a folder with {METRICS}, or a file of verl's file logger.")
    runs = [file for file in files if not is_record(file)]
    if not runs:
        raise ValueError(f"{path} holds a record and no validations: python -m recipe.bapo.report {path} reads it.")
    return runs


def _read(path: Path) -> TrainingRun:
    values = {}  # by measure and step; the last value of a step counts
    for step, data in read_metrics(path) if path.is_dir() else read_file(path):
        for key, value in data.items():
            if match := _VALIDATION.fullmatch(key):
                values[(*match.groups(), step)] = value
            elif key in CURVES:
                values[CURVES[key], "", "", step] = value
    logged = pd.DataFrame([(*key, float(value)) for key, value in values.items()], columns=[*MEASURE, "step", "value"])
    config = path / CONFIG
    saved = yaml.safe_load(config.read_text()) if config.exists() else {}
    run = TrainingRun(path, logged, pd.json_normalize(saved).to_dict("records")[0] if saved else {})
    if run.validations.empty:
        raise ValueError(f"{path} has no validation (val-core/*): set trainer.test_freq and data.val_files in the run.")
    return run
