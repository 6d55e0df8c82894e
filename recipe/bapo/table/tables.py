# SPDX-License-Identifier: Apache-2.0
"""Write the table as markdown and csv, and say what is wrong with the runs that it compares."""

import csv
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TextIO

from recipe.bapo.table.runs import Run
from recipe.bapo.table.statistics import Cell, validated_different_problems, values_by_step

# Keys that differ between runs of one method: seeds, names and places.
_OF_A_RUN = ("seed", "run_dir", "experiment_name", "project_name", "_dir", "resume", "logger", "runtime_env")
# Keys that a method may set.
_OF_A_METHOD = (
    *("actor_rollout_ref.actor.policy_loss.", "actor_rollout_ref.actor.clip_ratio", "algorithm.filter_groups."),
    "actor_rollout_ref.actor.loss_agg_mode",
)


def markdown(cells: list[Cell], baseline: str | None) -> str:
    """Format two tables for each data set, at the last and at the best step, with methods in rows."""
    places = dict.fromkeys((cell.measure.source, cell.at) for cell in cells)
    ordered = sorted(places, key=lambda place: (place[0], place[1] == "best"))
    return "\n\n".join(_of_place(cells, source, at, baseline) for source, at in ordered)


def _of_place(cells, source, at, baseline):
    cells = [cell for cell in cells if (cell.measure.source, cell.at) == (source, at)]
    measures = sorted({cell.measure for cell in cells}, key=lambda one: (not one.is_mean, one))
    several = len({one.variable for one in measures}) > 1
    head = ["method", "runs", "step"]
    for measure in measures:
        head.append(measure.name.removesuffix("/mean") + (f" of {measure.variable}" if several else ""))
        if measure.is_mean:
            head += ["± problems", *([f"minus {baseline}"] if baseline else [])]
    rows = [head, ["---"] * len(head)]
    for method in dict.fromkeys(cell.method for cell in cells):
        of_method = {cell.measure: cell for cell in cells if cell.method == method}
        steps = dict.fromkeys(str(cell.step) for cell in of_method.values())
        row = [method, str(max(cell.runs for cell in of_method.values())), ", ".join(steps)]
        for measure in measures:
            row += _row(of_method.get(measure), measure, baseline)
        rows.append(row)
    return "\n".join([f"**{source}, {at} step**", "", *(f"| {' | '.join(row)} |" for row in rows)])


def _row(cell, measure, baseline):
    columns = 1 + measure.is_mean * (1 + bool(baseline))
    if cell is None:
        return ["-"] * columns
    row = [_number(cell.mean, cell.over_seeds), _spread(cell.over_problems)]
    return [*row, _number(cell.difference, cell.of_difference, sign="+")][:columns]


def _spread(width):
    return "-" if math.isnan(width) else f"± {width:.3f}"


def _number(value, width, sign=""):
    if math.isnan(value):
        return "-"
    return f"{value:{sign}.3f}" + ("" if math.isnan(width) else f" ± {width:.3f}")


def write_csv(cells: list[Cell], file: TextIO) -> None:
    """Write a line for each cell; what is not known is empty."""
    rows = []
    for cell in cells:
        row = {"data_set": cell.measure.source, "variable": cell.measure.variable, "measure": cell.measure.name}
        numbers = {name: value for name, value in asdict(cell).items() if name != "measure"}
        rows.append(row | {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in numbers.items()})
    writer = csv.DictWriter(file, fieldnames=rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def doubts(methods: dict[str, list[Run]]) -> Iterator[str]:
    """Say in a sentence each what a reader of the table should know of these runs."""
    single = [method for method, runs in methods.items() if len(runs) == 1]
    if single:
        yield f"{_list(single)}: one run, so there is no interval over seeds."
    ends: dict[int, list[str]] = {}
    for method, runs in methods.items():
        for run in runs:
            steps = [max(values) for values in run.validations.values()]
            ends.setdefault(max(steps), []).append(str(run.path))
        for measure in sorted({measure for run in runs for measure in run.validations}):
            if not values_by_step(runs, measure):
                yield f"{method}: no step has {measure.name} of {measure.source} in all runs, so it is left out."
            elif measure.is_mean and validated_different_problems(runs, measure):
                yield (
                    f"{method}: the runs validated different problems of {measure.source}, so there is no interval "
                    "over problems. (data.val_max_samples draws them with the seed of the run.)"
                )
    if len(ends) > 1:
        listed = [f"{step}: {_list(ends[step])}" for step in sorted(ends)]
        yield f"Runs end at different steps: {'; '.join(listed)}."
    for method, runs in methods.items():
        if found := _differences(runs, _OF_A_RUN):
            yield f"Runs of {method} differ in more than their seed: {_list(found)}."
    if found := _differences([runs[0] for runs in methods.values()], _OF_A_RUN, _OF_A_METHOD):
        yield f"Methods differ in more than their loss and its sampling: {_list(found)}."


def _differences(runs, parts, prefixes=()):
    """Return the keys in which the configs of these runs differ, but for some. Runs without a config are left out."""
    configs = [run.config for run in runs if run.config]
    keys = sorted({key for config in configs for key in config})
    return [
        key
        for key in keys
        if not any(part in key for part in parts)
        and not key.startswith(prefixes)
        and any(config.get(key) != configs[0].get(key) for config in configs)
    ]


def _list(names):
    return ", ".join(names)
