# SPDX-License-Identifier: Apache-2.0
"""Write the table as markdown, and say what is wrong with the runs that it compares."""

import math
from collections.abc import Iterator
from itertools import repeat

import pandas as pd

from recipe.bapo.table.runs import MEASURE, TrainingRun

# Keys that differ between runs of one method: seeds, names and places.
_OF_A_RUN = ("seed", "run_dir", "experiment_name", "project_name", "_dir", "resume", "logger", "runtime_env")
# Keys that make a method what it is. The dual clip (clip_ratio_c) is no such key: it should be the same for all.
_OF_A_METHOD = (
    *("actor_rollout_ref.actor.policy_loss.", "actor_rollout_ref.actor.loss_agg_mode", "algorithm.filter_groups."),
    *("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"),
)


def markdown(scores: pd.DataFrame, baseline: str | None) -> str:
    """Format two tables for each data set, at the last and at the best step, with methods in rows.

    Args:
        scores: those of ``scores.compare``.
        baseline: the method that was subtracted from the others, or None.
    """
    tables = []
    for data_set, of_data_set in scores.groupby("data_set"):
        for at, at_step in of_data_set.groupby("at", sort=False):
            table = _columns(at_step, baseline)
            rows = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
            lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
            tables.append(f"**{data_set}, {at} step**\n\n{lines}")
    return "\n\n".join(tables)


def _columns(scores, baseline):
    """Return the text of each field, for one data set and one step: a row for each method, columns for each measure."""
    fields = scores.assign(
        score=list(map(_number, scores["mean"], scores["over_seeds"])),
        problems=["-" if math.isnan(half) else f"± {half:.3f}" for half in scores["over_problems"]],
        minus=list(map(_number, scores["difference"], scores["of_difference"], repeat("+"))),
    )
    of_method = fields.groupby("method", sort=False)
    columns = [of_method["runs"].first().map(str), of_method["step"].agg(lambda steps: _list(map(str, steps.unique())))]
    several = fields["variable"].nunique() > 1
    not_mean = ~fields["measure"].str.startswith("mean@")
    for (is_other, variable, measure), own in fields.groupby([not_mean, "variable", "measure"]):
        names = {"score": measure.removesuffix("/mean") + (f" of {variable}" if several else "")}
        if not is_other:
            names |= {"problems": "± problems"} | ({"minus": f"minus {baseline}"} if baseline else {})
        columns.append(own.set_index("method")[list(names)].rename(columns=names))
    return pd.concat(columns, axis=1).fillna("-").reset_index()


def _number(value, half, sign=""):
    if math.isnan(value):
        return "-"
    return f"{value:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def doubts(methods: dict[str, list[TrainingRun]], scores: pd.DataFrame) -> Iterator[str]:
    """Say in a sentence each what a reader of the table should know of these runs."""
    single = [method for method, runs in methods.items() if len(runs) == 1]
    if single:
        yield f"{_list(single)}: one run, so there is no interval over seeds."
    last = scores[scores["at"] == "last"].set_index(["method", *MEASURE])["different_problems"].to_dict()
    ends: dict[int, list[str]] = {}
    for method, runs in methods.items():
        for run in runs:
            ends.setdefault(run.validations["step"].max(), []).append(str(run.path))
        measures = pd.concat([run.validations[MEASURE] for run in runs]).drop_duplicates().sort_values(MEASURE)
        for data_set, variable, measure in measures.itertuples(index=False):
            different_problems = last.get((method, data_set, variable, measure))
            if different_problems is None:
                yield f"{method}: no step has {measure} of {data_set} in all runs, so it is left out."
            elif different_problems:
                yield (
                    f"{method}: the runs validated different problems of {data_set}, so there is no interval "
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
    differing = {key for one in configs for key in one if any(one[key] != other.get(key) for other in configs)}
    return sorted(k for k in differing if not any(part in k for part in parts) and not k.startswith(prefixes))


def _list(names):
    return ", ".join(names)
