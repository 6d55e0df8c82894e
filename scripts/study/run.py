# SPDX-License-Identifier: Apache-2.0
"""Run the second study, or a part of it; a study that was stopped goes on with the next missing cell.

bash scripts/study/run.sh                 run what is missing, then write tables and pictures of docs/results.md
bash scripts/study/run.sh report          tables and pictures alone, from docs/results/second_study.parquet
bash scripts/study/run.sh list            the planned cells and which of them are there
bash scripts/study/run.sh again CELL ..   run cells anew and compare them with the table
bash scripts/study/run.sh anchors         a few cells with the example's model in one process
bash scripts/study/run.sh stack           three cells in the real stack
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pandas as pd

from scripts.study.plan import ROOT, SEEDS, TABLE, cells
from scripts.study.train import Cell, Trainer

DONE = ROOT / "runs" / "study" / "cells"  # a file for each cell that the table does not have yet


def train_cell(cell: Cell, seeds: list[int]) -> list[dict]:
    """The rows of one cell, in this process, on one thread: the same sums on every run."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a policy that has collapsed is full of them, and they are slow
    trainer = Trainer(cell, seeds)
    trainer.train()
    return trainer.rows()


def run_and_keep(cell: Cell, seeds: list[int], folder: Path) -> float:
    """Run one cell and write its rows, complete or not at all. Returns its seconds of CPU time a run."""
    began = time.process_time()
    rows = train_cell(cell, seeds)
    unfinished = folder / f"{cell.name}.unfinished"
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(unfinished, folder / f"{cell.name}.jsonl")
    return (time.process_time() - began) / len(seeds)


def finished(table: Path = TABLE, folder: Path = DONE) -> set[str]:
    """Names of the cells that are in the table or in a file."""
    names = {path.name.removesuffix(".jsonl") for path in folder.glob("*.jsonl")}
    return names | (set(pd.read_parquet(table, columns=["cell"])["cell"]) if table.exists() else set())


def run_missing(planned: list[Cell], seeds: list[int], workers: int, table: Path = TABLE, folder: Path = DONE) -> None:
    """Run what is missing, a cell on each core, and gather all in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    there = finished(table, folder)
    todo = [cell for cell in planned if cell.name not in there]
    print(f"{len(planned) - len(todo)} of {len(planned)} cells are there, {len(todo)} to run.", flush=True)
    began = time.time()
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(run_and_keep, cell, seeds, folder): cell for cell in todo}
        try:
            for number, done in enumerate(as_completed(running), 1):
                seconds, name = done.result(), running[done].name
                left = (time.time() - began) / number * (len(todo) - number)
                print(f"{number}/{len(todo)}  {left / 3600:.1f} h left  {seconds:.2f} s a run  {name}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # an error or Ctrl-C shows at once, not after all other cells
            raise
    gather(planned, table, folder)


def gather(planned: list[Cell], table: Path = TABLE, folder: Path = DONE) -> None:
    """Move the rows of all files into the table, in the order of the plan; what it does not plan comes last."""
    files = sorted(folder.glob("*.jsonl"))
    rows = [compact(json.loads(line)) for path in files for line in path.read_text().splitlines()]
    parts = [pd.read_parquet(table)] if table.exists() else []
    frame = pd.concat([*parts, pd.DataFrame(rows)], ignore_index=True)
    if frame.empty:
        return
    order = {cell.name: place for place, cell in enumerate(planned)}
    frame = frame.astype({"norm_clip": float, "dual_clip": float})  # None is NaN
    frame = frame.iloc[frame["cell"].map(order).fillna(len(order)).argsort(kind="stable")].reset_index(drop=True)
    for name in frame.select_dtypes("float64").columns.difference(["learning_rate", "norm_clip", "dual_clip"]):
        frame[name] = frame[name].astype("float32")
    unfinished = table.with_suffix(".unfinished")
    frame.to_parquet(unfinished, compression="zstd", compression_level=19, index=False)
    os.replace(unfinished, table)
    for path in files:
        path.unlink()
    print(f"{len(frame)} runs in {table}: {table.stat().st_size / 1e6:.1f} MB", flush=True)


def compact(row: dict) -> dict:
    """A row with its series rounded to three significant digits; single figures keep all theirs."""

    def rounded(value):
        return float(f"{value:.3g}") if math.isfinite(value) else value

    return {key: list(map(rounded, value)) if isinstance(value, list) else value for key, value in row.items()}


def run_again(again: list[Cell], table: pd.DataFrame) -> bool:
    """Run cells anew and say whether the table has the same numbers; true if all of them are the same."""
    all_same = True
    for cell in again:
        there = table[table["cell"] == cell.name].set_index("seed")
        rows = pd.DataFrame(train_cell(cell, list(there.index))).set_index("seed")
        same = [
            int((there[name] == rows[name].astype(there[name].dtype)).sum()) for name in ("weights", "final_reward")
        ]
        all_same &= same == [len(there)] * 2
        print(f"{cell.name}: of {len(there)} seeds {same[0]} have the same weights, {same[1]} the same final reward")
    return all_same


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", nargs="?", default="all", choices=["all", "report", "list", "again", "anchors", "stack"]
    )
    parser.add_argument("cells", nargs="*", help="of `again`")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="cells at a time")
    arguments = parser.parse_args()
    if arguments.part == "all":
        run_missing(cells(), SEEDS, arguments.workers)
    if arguments.part in ("all", "report"):
        from scripts.study.report import report

        report()
    if arguments.part == "list":
        there = finished()
        for cell in cells():
            print("there  " if cell.name in there else "missing", cell.name)
    if arguments.part == "again":
        planned = {cell.name: cell for cell in cells()}
        if not run_again([planned[name] for name in arguments.cells], pd.read_parquet(TABLE)):
            raise SystemExit(1)
    if arguments.part in ("anchors", "stack"):
        from scripts.study.anchors import run_anchors, run_stack

        {"anchors": run_anchors, "stack": run_stack}[arguments.part]()


if __name__ == "__main__":
    main()
