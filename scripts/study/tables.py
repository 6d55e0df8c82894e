# SPDX-License-Identifier: Apache-2.0
"""Make the tables of the study on the language model, by the rules of docs/dev/plan_language_model.md."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet
from scipy import stats

from scripts.study.plan import CONTROLS, NOT_COMPARED, ROWS, STAGE_A, STAGE_B, Run, is_complete

REWARD_COLUMN = "held-out reward by rollout batch"
METHOD_NAMES = {"grpo": "GRPO [0.8, 1.2]", "high_only": "[0.8, 3.0]", "bapo": "BAPO", "gspo": "GSPO"}
CLIPPED = {sign: f"clipped by [0.8, 1.2], A {sign} 0" for sign in "><"}
RUN_COLUMNS = ("run", "precision", "updates", *CLIPPED.values(), "entropy, first and last", REWARD_COLUMN)


def table_row(rows: pd.DataFrame) -> dict[str, str]:
    """Compute the plan's figures of a run.

    All but ``updates``, the entropy and the held-out reward are means over the updates after the first on each rollout
    batch. Updates without advantages are left out, because they clip nothing and have nothing to search. ``met at
    the start``, ``met by moving`` and ``saturated`` are shares of these updates: BAPO's search would have met the
    target at [0.6, 1.2], met it by moving the bounds, or been saturated.
    """
    later = with_advantages(rows[rows["place"] > 0])
    outcomes = search_outcomes(later)
    held_out, means = rows["held_out_reward"].dropna(), later.mean(numeric_only=True)
    settings = {"precision": "float32"} | rows.iloc[0].to_dict()  # the first runs have no column for the precision
    run = Run(**{name: settings[name] for name in Run.__dataclass_fields__})
    return {
        "run": f"`{run.name}`",
        "precision": run.precision,
        "updates": str(len(rows)),
        CLIPPED[">"]: f"{means['clipfrac_positive']:.2%}",
        CLIPPED["<"]: f"{means['clipfrac_negative']:.2%}",
        "rho at [0.6, 1.2]": f"{means['bapo_positive_contribution_start']:.3f}",
        "met at the start": f"{outcomes['met']:.2f}",
        "met by moving": f"{outcomes['moved']:.2f}",
        "saturated": f"{outcomes['saturated']:.2f}",
        "effective sample size": f"{means['effective_sample_size']:.3f}",
        "tokens, right and wrong": f"{means['length_positive']:.0f}, {means['length_negative']:.0f}",
        "entropy, first and last": f"{rows['entropy'].iloc[0]:.2f}, {rows['entropy'].iloc[-1]:.2f}",
        REWARD_COLUMN: ", ".join(f"{reward:.2f}" for reward in held_out),
    }


def runs_of_whole_seeds(folder: Path = ROWS, runs: list[Run] = STAGE_B) -> list[Run]:
    """Return the runs of stage (b) whose seed is complete with all methods.

    Raises:
        ValueError: if the runs of a seed started from different weights. The same warm-up may differ on two machines.
    """
    missing = {run.seed for run in runs if not is_complete(run, folder / f"{run.name}.parquet")}
    found = [run for run in runs if run.seed not in missing]
    for seed in {run.seed for run in found}:
        paths = [folder / f"{run.name}.parquet" for run in found if run.seed == seed]
        if len({(pyarrow.parquet.read_schema(path).metadata or {}).get(b"weights") for path in paths}) > 1:
            raise ValueError(f"The runs of seed {seed} started from different weights: make them again on one machine.")
    return found


def comparison(folder: Path = ROWS, runs: list[Run] = STAGE_B) -> pd.DataFrame:
    """Compare the methods of stage (b): a row for each method, over the seeds for which all methods are complete.

    ``reward``, the plan's outcome, is the mean of the held-out rewards after each rollout batch. ``difference`` is from
    GRPO with the same seed, ``half_width`` that of its 95 % interval by Student's t. Shares are means over the updates
    with advantages after the first on each rollout batch.
    """
    found = []
    for run in runs_of_whole_seeds(folder, runs):
        rows = pd.read_parquet(folder / f"{run.name}.parquet")
        later, held_out = with_advantages(rows[rows["place"] > 0]), rows["held_out_reward"].dropna()
        found.append(
            {
                "method": run.method,
                "seed": run.seed,
                "reward": held_out.mean(),
                "final_reward": held_out.iloc[-1],
                "entropy": rows["entropy"].iloc[-16:].mean(),
                "failed": held_out.iloc[-1] < max(rows["held_out_before"].iloc[0], held_out.max() / 2),
                **later[["without_gradient_positive", "without_gradient_negative"]].mean(),
                **search_outcomes(later),
            }
        )
    table = pd.DataFrame(found)
    if table.empty:
        return table
    rewards = table.pivot(index="seed", columns="method", values="reward")
    differences = rewards.sub(rewards["grpo"], axis=0)
    means = table.drop(columns=["seed", "failed"]).groupby("method", sort=False).mean()
    means["difference"], means["failed"] = differences.mean(), table.groupby("method")["failed"].sum()
    means["half_width"] = differences.sem() * stats.t.ppf(0.975, len(rewards) - 1)
    return means.assign(seeds=len(rewards))


def search_outcomes(updates: pd.DataFrame) -> dict[str, float]:
    """Compute the shares of updates in which BAPO's search finds the target met, meets it by moving, or misses it."""
    missed, met = updates["bapo_saturated"] > 0, (updates["bapo_search_steps"] == 0) & (updates["bapo_saturated"] == 0)
    return {"met": met.mean(), "moved": (~met & ~missed).mean(), "saturated": missed.mean()}


def with_advantages(updates: pd.DataFrame) -> pd.DataFrame:
    """Return the updates with advantages. If all answers are right, or all wrong, rho is recorded as 0."""
    return updates[updates["bapo_positive_contribution_start"] > 0]


def print_tables(folder: Path = ROWS) -> None:
    """Print the runs of stage (a), the comparison of stage (b), and each run but those of stage (a), as Markdown."""
    print_markdown(transposed(rows_of(STAGE_A, folder)))
    compared = comparison(folder).reset_index()
    if len(compared):
        print()
        print_markdown([comparison_row(row) for row in compared.itertuples()])
    print()
    each = rows_of(STAGE_B + NOT_COMPARED + CONTROLS, folder)
    print_markdown([{name: row[name] for name in RUN_COLUMNS} for row in each])


def rows_of(runs: list[Run], folder: Path) -> list[dict[str, str]]:
    """Return the row of each complete run."""
    paths = {run: folder / f"{run.name}.parquet" for run in runs}
    return [table_row(pd.read_parquet(path)) for run, path in paths.items() if is_complete(run, path)]


def transposed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Turn a wide table of a few runs: a row for each figure, and a column for each run."""
    return [{"run": figure} | {row["run"]: row[figure] for row in rows} for figure in list(rows[0])[1:]] if rows else []


def comparison_row(row) -> dict[str, str]:
    """Format a row of the comparison. One seed has no interval, and GRPO no difference from itself."""
    interval = f" +- {row.half_width:.3f}" if row.seeds > 1 else ""
    difference = "" if row.method == "grpo" else f"{row.difference:+.3f}{interval}"
    return {
        "method": METHOD_NAMES[row.method],
        "held-out reward, mean over training": f"{row.reward:.3f}",
        "minus GRPO's": difference,
        "at the end": f"{row.final_reward:.2f}",
        "entropy at the end": f"{row.entropy:.3f}",
        "failed": f"{row.failed} of {row.seeds}",
        "without gradient, A > 0": f"{row.without_gradient_positive:.1%}",
        "without gradient, A < 0": f"{row.without_gradient_negative:.1%}",
        "met at the start, by moving, saturated": f"{row.met:.2f}, {row.moved:.2f}, {row.saturated:.2f}",
    }


def print_markdown(rows: list[dict[str, str]]) -> None:
    """Print rows with the same keys as a table."""
    if rows:
        print(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
