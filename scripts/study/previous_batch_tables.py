# SPDX-License-Identifier: Apache-2.0
"""Compute tests and tables from the raw table of ``scripts.study.previous_batch``.

docs/dev/plan_previous_batch.md states the rules. A failed run is defined as in the third study.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from scripts.study import analysis, plan
from scripts.study.analysis import interval, markdown
from scripts.study.methods import PREVIOUS_BATCH, config_of, path_of
from scripts.study.plan import Comparison, Place
from scripts.study.previous_batch import (
    BESIDE,
    DESCRIBED,
    EXACT,
    FAILING_MARGIN,
    FAILING_SEEDS,
    FOLLOW_UP_FAILING_MARGIN,
    FOLLOW_UP_TABLE,
    HARD,
    HARD_EXACT,
    HARD_LAGGED,
    LABELS,
    LAGGED,
    OTHER_SEED,
    PARTIAL_128,
    PLACES,
    SPEED_MARGIN,
    TABLE,
    seeds_of,
)
from scripts.study.train import Cell


def read_table(path: Path = TABLE) -> pd.DataFrame:
    """Read the raw table and add the columns of ``analysis.with_failures``. The controls are the third study's."""
    third = pd.read_parquet(plan.TABLE)
    frame = pd.concat([third[third["source"] == "fresh"], pd.read_parquet(path)], ignore_index=True)
    return analysis.with_failures(frame.fillna({"dual_clip": 0}))


def against(frame: pd.DataFrame, place: Place, method: str, exact: str = EXACT, measure: str = "speed") -> np.ndarray:
    """Return a method minus exact BAPO by seed: log ratios of the updates, or (``failing``) shares of failed runs.

    The result is empty if a cell of either is missing. Only seeds that both have are compared.
    """
    if not analysis.is_there(frame, Comparison(place, method, exact)):
        return np.zeros(0)
    first, second = (analysis.by_seed(frame, place, name, measure) for name in (method, exact))
    return first.sub(second).dropna().to_numpy()


def within_margin(differences: np.ndarray) -> bool:
    """Whether the upper end of the interval of the ratio of updates is below the plan's margin."""
    return bool(np.exp(interval(differences)[1]) < SPEED_MARGIN)


def failing_verdicts(differences: np.ndarray, margin: float = FAILING_MARGIN) -> dict[str, bool]:
    """Answer the plan's two questions about failed runs. Both, one or neither can be true."""
    low, high = interval(differences)
    return {"fails more": low > 0, "not much more": high < margin}


def what_the_task_tells(within: dict[str, bool]) -> str:
    """Say by the plan's rule what a place can tell; ``within``: whether each of ``BESIDE`` is within the margin."""
    if not within[OTHER_SEED]:
        return "whether bounds are the run's own"
    if all(within.values()):
        return "nothing about bounds"
    return "wrong bounds from right ones, not whether they are the run's own"


def signed(differences: np.ndarray) -> str:
    """Format the mean of differences with its interval."""
    if not len(differences):
        return "-"
    low, high = interval(differences)
    return f"{differences.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def ratio(differences: np.ndarray) -> str:
    """Format the mean of log ratios as a ratio with its interval, with one more digit than the margin has."""
    if not len(differences):
        return "-"
    low, high = np.exp(interval(differences))
    return f"{np.exp(differences.mean()):.3f} [{low:.3f}, {high:.3f}]"


def speed_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of updates to the target reward against exact BAPO at every place, and what the place can tell."""
    rows = []
    for place in PLACES:
        found = {method: against(frame, place, method) for method in (LAGGED, *BESIDE)}
        verdict = "-"
        if all(len(found[method]) for method in BESIDE):
            verdict = what_the_task_tells({method: within_margin(found[method]) for method in BESIDE})
        rows.append([place.name, *map(ratio, found.values()), verdict])
    return markdown(["place", *(LABELS[method] for method in (LAGGED, *BESIDE)), "the task can tell"], rows)


def got_there_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of the declared tests of speed.

    Each row also has the share of pairs in which both runs reached the target, the ratio over these pairs only, and the
    difference of the mean rewards over all updates (description).
    """
    rows = []
    for place in PLACES:
        differences = against(frame, place, LAGGED)
        if not len(differences):
            continue
        there = analysis.conditional(frame, Comparison(place, LAGGED, EXACT))
        rewards = [analysis.at_best_rate(analysis.at_place(frame, place, m), "mean_reward") for m in (LAGGED, EXACT)]
        verdict = "yes" if within_margin(differences) else "no"
        rows.append(
            [place.name, str(len(differences)), ratio(differences), verdict]
            + [f"{there['both']:.3f}", f"{np.exp(there['conditional']):.3f}"]
            + [signed(rewards[0].sub(rewards[1]).dropna().to_numpy())]
        )
    head = ["place", "seeds", "ratio of updates, batch before : exact", f"upper end below {SPEED_MARGIN:.2f}"]
    return markdown([*head, "both got there", "ratio there", "mean reward, batch before minus exact"], rows)


def failing_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of failed runs of every method, with the difference between the lagged method and exact BAPO."""
    rows = []
    for place in (PARTIAL_128, *PLACES):
        counts = []
        for method in (EXACT, LAGGED, *BESIDE):
            part = analysis.at_place(frame, place, method)["failed"]
            counts.append(f"{part.sum()} of {len(part)}" if len(part) else "-")
        rates = ", ".join(f"{rate:g}" for rate in place.rates)
        where = f"{place.name} {', '.join(map(str, place.stalenesses))}, at {rates}"
        rows.append([where, *counts, signed(against(frame, place, LAGGED, measure="failing"))])
    head = ["where", *(LABELS[method] for method in (EXACT, LAGGED, *BESIDE)), "share, batch before minus exact"]
    return markdown(head, rows)


def failing_beside_table(frame: pd.DataFrame) -> list[str]:
    """Make a descriptive table of failed runs with other sources of bounds, at the place of the declared test.

    Only seeds that both methods have are compared.
    """
    rows, exact = [], analysis.at_place(frame, PARTIAL_128, EXACT)
    for method in BESIDE:
        part = analysis.at_place(frame, PARTIAL_128, method)
        of_exact = exact[exact["seed"].isin(part["seed"])]["failed"]
        counts = f"{part['failed'].sum()} : {of_exact.sum()} of {len(part)}"
        rows.append([LABELS[method], counts, signed(against(frame, PARTIAL_128, method, measure="failing"))])
    return markdown(["method", "failed, it : exact BAPO", "share, it minus exact BAPO"], rows)


def used_steps(own: np.ndarray, updates_on_a_batch: int) -> np.ndarray:
    """Return the candidates whose bounds a lagged run used, given those that its own searches found, ``(R, U)``."""
    used = np.zeros_like(own)
    first = min(updates_on_a_batch, own.shape[1])
    used[:, 1:first] = own[:, : first - 1]
    used[:, updates_on_a_batch:] = own[:, : own.shape[1] - updates_on_a_batch]
    return used


def lag_row(frame: pd.DataFrame, cell: Cell) -> list[str]:
    """Make the row of a lagged cell: how its own searches ended, and how far the used bounds were from theirs."""
    rows = frame[frame["cell"] == cell.name]
    own = np.stack(rows["search_steps"].to_list())
    used = used_steps(own, cell.updates_on_a_batch)
    low, high = (bound.numpy() for bound in path_of(config_of(cell.method.removeprefix(PREVIOUS_BATCH))))
    distance = [np.abs(bound[used] - bound[own]).mean() for bound in (high, low)]
    ends = [f"{rows[name].mean():.2f}" for name in ("at_once", "on_the_way", "out_of_reach")]
    return [*ends, f"{(used != own).mean():.2f}", *(f"{value:.2f}" for value in distance)]


def lag_table(frame: pd.DataFrame) -> list[str]:
    """Make the table of distances between the lagged bounds and those of a search on the update's own tokens."""
    rows, there = [], set(frame["cell"])
    for place in (*PLACES, PARTIAL_128):
        for cell in place.cells([LAGGED]):
            if cell.name in there:
                where = [place.name, str(cell.staleness), f"{cell.learning_rate:g}", str(cell.updates_on_a_batch)]
                rows.append([*where, *lag_row(frame, cell)])
    head = ["place", "staleness", "rate", "updates on a batch", "already met", "moved", "out of reach"]
    return markdown([*head, "other bounds than its own", "distance of c_high", "of c_low"], rows)


def means_table(frame: pd.DataFrame, place: Place, methods: list[str]) -> list[str]:
    """Make a descriptive table of means over all runs of each cell."""
    rows, there = [], set(frame["cell"])
    for method in methods:
        for cell in place.cells([method]):
            if cell.name not in there:
                continue
            part = frame[frame["cell"] == cell.name]
            label = LABELS.get(method) or "batch before" * method.startswith(PREVIOUS_BATCH) or "exact"
            figures = [f"{np.exp(part['log_updates'].mean()):.1f}", f"{part['failed'].sum()} of {len(part)}"]
            figures += [f"{part[name].mean():.3f}" for name in ("mean_reward", "final_reward")]
            figures += [f"{part[name].mean():.2f}" for name in ("entropy", "c_low", "c_high")]
            rows.append([label, str(cell.staleness), f"{cell.learning_rate:g}", *figures])
    head = ["method", "staleness", "rate", "updates to target", "failed", "mean reward", "final reward"]
    return markdown([*head, "entropy at the end", "mean c_low", "mean c_high"], rows)


def described_table(frame: pd.DataFrame) -> list[str]:
    """Make a descriptive table of the hard task and the larger model: lagged bounds against exact ones."""
    rows = []
    for place, exact in DESCRIBED:
        lagged = PREVIOUS_BATCH + exact
        speed = against(frame, place, lagged, exact)
        if not len(speed):
            continue
        counts = [analysis.at_place(frame, place, method)["failed"] for method in (exact, lagged)]
        failed = " : ".join(str(int(part.sum())) for part in counts) + f" of {len(counts[0])}"
        rows.append([place.name, plan.LABELS[exact], str(len(speed)), ratio(speed), failed])
    return markdown(
        ["place", "target", "seeds", "ratio of updates, batch before : exact", "failed, exact : batch before"], rows
    )


def follow_up_lines(path: Path = FOLLOW_UP_TABLE) -> list[str]:
    """Format the test on the hard task that was added after the data; nothing while cells are missing."""
    if not path.exists():
        return []
    frame, place = read_table(path), HARD[0]
    speed, failing = (against(frame, place, HARD_LAGGED, HARD_EXACT, measure) for measure in ("speed", "failing"))
    if not len(speed):
        return []
    there = analysis.conditional(frame, Comparison(place, HARD_LAGGED, HARD_EXACT))
    counts = [analysis.at_place(frame, place, method)["failed"] for method in (HARD_LAGGED, HARD_EXACT)]
    failed = " : ".join(str(part.sum()) for part in counts) + f" of {len(counts[0])}"
    verdicts = ["yes" if holds else "no" for holds in failing_verdicts(failing, FOLLOW_UP_FAILING_MARGIN).values()]
    row = [place.name, str(len(speed)), ratio(speed), "yes" if within_margin(speed) else "no"]
    row += [f"{there['both']:.3f}", f"{np.exp(there['conditional']):.3f}", failed, signed(failing), *verdicts]
    head = [
        "place",
        "seeds",
        "ratio of updates",
        f"upper end below {SPEED_MARGIN:.2f}",
        "both got there",
        "ratio there",
    ]
    head += ["failed, batch before : exact", "difference of shares", "fails more", "not much more"]
    lines = ["## The follow-up on the hard task", "", *markdown(head, [row])]
    return [*lines, *means_table(frame, place, [HARD_EXACT, HARD_LAGGED])]


def missing(frame: pd.DataFrame, planned: list[Cell]) -> list[str]:
    """Return the names of planned cells that are not in the table with all their seeds."""
    sizes = frame.groupby("cell").size()
    return [cell.name for cell in planned if sizes.get(cell.name, 0) != len(seeds_of(cell))]


def print_tables(path: Path = TABLE) -> None:
    """Print all tables as Markdown."""
    frame = read_table(path)
    failing = against(frame, PARTIAL_128, LAGGED, measure="failing")
    lines = ["## Speed: the declared tests", "", *got_there_table(frame)]
    lines += ["## Speed with other sources of bounds", "", *speed_table(frame)]
    lines += ["## Failed runs", ""]
    if len(failing):
        verdicts = [f"{name}: {'yes' if holds else 'no'}" for name, holds in failing_verdicts(failing).items()]
        lines += [
            f"Declared test, {len(FAILING_SEEDS)} seeds: {signed(failing)}. {'; '.join(verdicts).capitalize()}.",
            "",
        ]
    lines += failing_table(frame)
    lines += [
        "Partial rollout 128 at 0.016, the other sources of bounds (description):",
        "",
        *failing_beside_table(frame),
    ]
    lines += ["## How far the bounds are from the update's own", "", *lag_table(frame)]
    for place in PLACES:
        lines += [f"## {place.name}", "", *means_table(frame, place, [EXACT, LAGGED, *BESIDE])]
    lines += ["## retry task, partial rollout, the test of failing", ""]
    lines += means_table(frame, PARTIAL_128, [EXACT, LAGGED, *BESIDE])
    described = described_table(frame)
    if len(described) > 3:
        lines += ["## Description: the hard task and the larger model", "", *described]
        for place, exact in DESCRIBED:
            lines += [f"### {place.name}", "", *means_table(frame, place, [exact, PREVIOUS_BATCH + exact])]
    print("\n".join(lines + follow_up_lines()))
