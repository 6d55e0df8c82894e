# SPDX-License-Identifier: Apache-2.0
"""Read the file to which verl's file logger writes all metrics of a run.

Console, pictures and scripts read metrics only through these functions.
"""

import json
from pathlib import Path

from recipe.bapo.host.files import METRICS


def read_metrics(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Read all ``(step, metrics)`` of the last run in a folder, in order.

    The files are ``metrics.1.jsonl`` and so on, of earlier starts, and ``metrics.jsonl``. A start whose first training
    step is later than the run's first one resumes the run, and replaces its steps from there on; the report on a record
    has the same rule. Otherwise it begins a new run. A start without a training step adds what it validated.

    Raises:
        ValueError: a line is not in the format of verl's file logger.
    """
    numbered = [path for path in run_dir.glob(METRICS.replace(".", ".*.")) if path.suffixes[0][1:].isdigit()]
    earlier = sorted(numbered, key=lambda path: int(path.suffixes[0][1:]))
    steps: dict[int, dict[str, float]] = {}
    first_of_run = None  # its first training step
    for path in [*earlier, run_dir / METRICS]:
        records = read_file(path) if path.exists() else []
        first = min((step for step, data in records if "training/global_step" in data), default=None)
        if first is not None:
            if first_of_run is None or first <= first_of_run:
                steps, first_of_run = {}, first
            steps = {step: data for step, data in steps.items() if step < first}
        for step, data in records:
            # A resumed run first validates at the step of its checkpoint. Add that record to the step's metrics.
            trained = "training/global_step" in data
            steps[step] = data if trained else {**steps.get(step, {}), **data}
    return sorted(steps.items())


def read_file(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Read a file that verl's file logger wrote.

    Raises:
        ValueError: a line is not in its format.
    """
    try:
        return parse_lines(path.read_text())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} has a line that is not in the format of verl's file logger ({error}): remove that line."
        ) from error


def parse_lines(text: str) -> list[tuple[int, dict[str, float]]]:
    """Parse each complete line of a metrics file into ``(step, metrics)``."""
    lines = text.split("\n")[:-1]  # anything after the last newline is still being written
    # verl's file logger writes NaN and infinity as null.
    nan = float("nan")
    return [
        (record["step"], {key: nan if value is None else value for key, value in record["data"].items()})
        for record in map(json.loads, lines)
    ]


def read_answers(path: Path) -> list[dict]:
    """Read a file with the responses of a validation, which verl writes, one JSON object a line.

    A response may hold characters such as U+2028, at which ``str.splitlines`` would cut a line.
    """
    return [json.loads(line) for line in path.read_text().split("\n") if line.strip()]


def validation_reward(data: dict[str, float]) -> float | None:
    """Return the validation reward in a step's metrics, averaged over data sources; None without a validation."""
    values = [value for key, value in data.items() if key.startswith("val-core/") and "/mean@" in key]
    return sum(values) / len(values) if values else None
