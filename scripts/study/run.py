# SPDX-License-Identifier: Apache-2.0
"""Run the third study, or a part of it. A study that was stopped continues with the next missing cell.

bash scripts/study/run.sh                 run the missing cells, gather them and print the tables
bash scripts/study/run.sh gather          move finished cells into docs/results/third_study.parquet; others may run on
bash scripts/study/run.sh tables          only print the tables, from the parquet file
bash scripts/study/run.sh list            list the planned cells, and which are missing
bash scripts/study/run.sh again CELL ..   run cells again and compare them with the table
"""

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pandas as pd

from scripts.study.plan import ROOT, SEEDS, TABLE, cells
from scripts.study.train import Cell, Trainer

DONE = ROOT / "runs" / "study" / "cells"  # has a file for each finished cell that is not in the table yet
CODE = ("bapo", "scripts/study")
SEEDS_AT_A_TIME = 40  # runs in one batched model; with 160 a run takes twice as long, because no tensor fits the cache
SeedsOf = Callable[[Cell], list[int]]


def code_hash() -> str:
    """Return git's tree hashes of the code that makes the numbers, with ``+changes`` if files are not committed."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    trees = " ".join(tree[:12] for tree in git("rev-parse", *(f"HEAD:{folder}" for folder in CODE)))
    return trees + ("+changes" if git("status", "--porcelain", "--", *CODE) else "")


def train_cell(cell: Cell, seeds: list[int], donor: pd.DataFrame | None = None) -> list[dict]:
    """Run one cell in this process and return its rows. It uses one thread, so that sums are the same every time.

    Args:
        donor: rows of its donor cell, with ``seed`` and ``search_steps``.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a collapsed policy has many denormal numbers, which are slow
    if cell.task == "larger_model":
        from scripts.study.loop import rows_of

        return rows_of(cell, seeds)
    rows = []
    for first in range(0, len(seeds), SEEDS_AT_A_TIME):
        part = seeds[first : first + SEEDS_AT_A_TIME]
        steps = None
        if donor is not None:
            steps = torch.tensor([list(steps) for steps in donor.set_index("seed").loc[part, "search_steps"]])
        trainer = Trainer(cell, part, steps)
        trainer.train()
        rows += trainer.rows()
    return rows


def run_and_keep(cell: Cell, seeds: list[int], code: str, table: Path, folder: Path) -> float:
    """Run one cell and write its rows, all or none. Returns the CPU seconds per run."""
    began = time.process_time()
    rows = train_cell(cell, seeds, rows_of_cell(cell.donor, table, folder) if cell.donor else None)
    seconds = (time.process_time() - began) / len(seeds)
    unfinished = folder / f"{cell.name}.unfinished"
    unfinished.write_text("".join(json.dumps(row | {"code": code, "seconds": seconds}) + "\n" for row in rows))
    os.replace(unfinished, folder / f"{cell.name}.jsonl")
    return seconds


def rows_of_cell(cell: Cell, table: Path, folder: Path) -> pd.DataFrame:
    """Read the rows of a finished cell, from its file or from the table."""
    path = folder / f"{cell.name}.jsonl"
    if path.exists():
        return pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    return pd.read_parquet(table, filters=[("cell", "==", cell.name)])


def finished(table: Path = TABLE, folder: Path = DONE) -> set[str]:
    """Return the names of the cells that are in the table or in a file."""
    names = {path.name.removesuffix(".jsonl") for path in folder.glob("*.jsonl")}
    return names | (set(pd.read_parquet(table, columns=["cell"])["cell"]) if table.exists() else set())


def seeds_of(cell: Cell) -> list[int]:
    """Return the seeds of a cell of the third study."""
    return SEEDS[cell.task]


def run_missing(
    planned: list[Cell], workers: int, table: Path = TABLE, folder: Path = DONE, seeds: SeedsOf = seeds_of
) -> None:
    """Run the missing cells, ``workers`` at a time. A cell with a donor starts once its donor is finished."""
    import scripts.study.loop  # noqa: F401  # before the fork: a later edit must not reach the workers

    folder.mkdir(parents=True, exist_ok=True)
    there, code, began = finished(table, folder), code_hash(), time.time()
    todo = [cell for cell in planned if cell.name not in there]
    total = len(todo)
    print(f"{len(planned) - total} of {len(planned)} cells are there, {total} to run.", flush=True)
    with ProcessPoolExecutor(workers) as pool:
        running = {}
        try:
            while todo or running:
                ready = [cell for cell in todo if cell.donor is None or cell.donor.name in there]
                for cell in ready[: workers - len(running)]:
                    todo.remove(cell)
                    running[pool.submit(run_and_keep, cell, seeds(cell), code, table, folder)] = cell
                done = next(as_completed(running))
                seconds, name = done.result(), running.pop(done).name
                there.add(name)
                number = total - len(todo) - len(running)
                left = (time.time() - began) / number * (total - number)
                print(f"{number}/{total}  {left / 3600:.1f} h left  {seconds:.2f} s a run  {name}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # start no further cell; those that are running still end first
            raise


def gather(planned: list[Cell], table: Path = TABLE, folder: Path = DONE) -> None:
    """Move the rows of all files into the table, in the order of the plan. Cells that are not planned come last."""
    files = sorted(folder.glob("*.jsonl"))
    parts = [pd.read_parquet(table)] if table.exists() else []
    # Files of cells that are in the table already were left by an earlier call that was killed.
    there = {name for part in parts for name in part["cell"]}
    new = [path for path in files if path.name.removesuffix(".jsonl") not in there]
    rows = [compact(json.loads(line)) for path in new for line in path.read_text().splitlines()]
    frame = pd.concat([*parts, pd.DataFrame(rows)], ignore_index=True)
    if frame.empty:
        return
    order = {cell.name: place for place, cell in enumerate(planned)}
    frame = frame.astype({"dual_clip": float})  # None becomes NaN
    frame = frame.iloc[frame["cell"].map(order).fillna(len(order)).argsort(kind="stable")].reset_index(drop=True)
    for name in frame.select_dtypes("float64").columns.difference(["learning_rate", "dual_clip"]):
        frame[name] = frame[name].astype("float32")
    unfinished = table.with_suffix(".unfinished")
    frame.to_parquet(unfinished, compression="zstd", compression_level=19, index=False)
    os.replace(unfinished, table)
    for path in files:
        path.unlink()
    print(f"{len(frame)} runs in {table}: {table.stat().st_size / 1e6:.1f} MB", flush=True)


def compact(row: dict) -> dict:
    """Round the series of a row to three significant digits. Single values and integers stay exact."""

    def rounded(value):
        return float(f"{value:.3g}") if isinstance(value, float) and math.isfinite(value) else value

    return {key: list(map(rounded, value)) if isinstance(value, list) else value for key, value in row.items()}


def run_again(again: list[Cell], table: Path = TABLE, folder: Path = DONE) -> bool:
    """Run cells again. Returns whether weights and final rewards of all runs are those in the file or the table."""
    all_same = True
    for cell in again:
        there = rows_of_cell(cell, table, folder).set_index("seed")
        donor = rows_of_cell(cell.donor, table, folder) if cell.donor else None
        rows = pd.DataFrame(train_cell(cell, list(there.index), donor)).set_index("seed")
        same = [
            int((there[name] == rows[name].astype(there[name].dtype)).sum()) for name in ("weights", "final_reward")
        ]
        all_same &= same == [len(there)] * 2
        print(f"{cell.name}: of {len(there)} seeds {same[0]} have the same weights, {same[1]} the same final reward")
    return all_same


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=["all", "gather", "tables", "list", "again"])
    parser.add_argument("cells", nargs="*", help="for `again`: names of cells")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of cells to run at a time")
    arguments = parser.parse_args()
    if arguments.part == "all":
        run_missing(cells(), arguments.workers)
    if arguments.part in ("all", "gather"):
        gather(cells())
    if arguments.part in ("all", "tables"):
        from scripts.study.analysis import print_tables

        print_tables()
    if arguments.part == "list":
        there = finished()
        for cell in cells():
            print("there  " if cell.name in there else "missing", cell.name)
    if arguments.part == "again":
        planned = {cell.name: cell for cell in cells()}
        unknown = [name for name in arguments.cells if name not in planned]
        if unknown or not arguments.cells:
            parser.error(f"`again` needs names that `list` prints{', not ' + ', '.join(unknown) if unknown else ''}")
        if not run_again([planned[name] for name in arguments.cells]):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
