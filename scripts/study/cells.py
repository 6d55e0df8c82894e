# SPDX-License-Identifier: Apache-2.0
"""Write one row for each cell of the studies on small networks to docs/results/small_networks.csv.

.venv/bin/python -m scripts.study.cells

A cell is all seeds of one method at one task, source of staleness, learning rate and dual clip. Its outcome is the
geometric mean of the updates to the target reward, with the 95 % percentile bootstrap interval over its seeds. A run
that fails or never reaches the target counts with all its updates. In the second study, whose definition of a failed
run was withdrawn, only runs that never reach the target do, and ``failed`` is empty.
"""

import numpy as np
import pandas as pd

from scripts.study import analysis, previous_batch, previous_batch_tables
from scripts.study.plan import RESULTS

KEYS = ["task", "source", "staleness", "optimizer", "learning_rate", "norm_clip", "dual_clip", "method"]


def second_study() -> pd.DataFrame:
    """Read the second study's runs and give their columns the names of the later studies."""
    frame = pd.read_parquet(RESULTS / "second_study.parquet").rename(columns={"updates_to_08": "updates_to_target"})
    frame["log_updates"] = np.log(frame["updates_to_target"].fillna(frame["updates"]).astype(float))
    return frame


def cell_rows(study: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Make a row for each cell."""
    frame = frame.assign(optimizer=frame.get("optimizer", "adamw"), norm_clip=frame.get("norm_clip", 1.0))
    rows = []
    for key, runs in frame.fillna({"dual_clip": 0, "norm_clip": 0}).groupby(KEYS, sort=False):
        low, high = np.exp(analysis.interval(runs["log_updates"].to_numpy()))
        rows.append(
            {"study": study, **dict(zip(KEYS, key, strict=True)), "seeds": len(runs)}
            | {"updates_to_target": np.exp(runs["log_updates"].mean()), "interval_low": low, "interval_high": high}
            | {"failed": runs["failed"].sum() if "failed" in runs else None}
            | {name: runs[name].mean() for name in ("mean_reward", "final_reward", "entropy")}
        )
    return pd.DataFrame(rows)


def main():
    """Write the table."""
    lagged = [previous_batch_tables.read_table(path) for path in (previous_batch.TABLE, previous_batch.FOLLOW_UP_TABLE)]
    lagged = [frame[frame["source"] != "fresh"] for frame in lagged]  # the controls are the third study's
    tables = [
        cell_rows("second", second_study()),
        cell_rows("third", analysis.read_table()),
        cell_rows("previous_batch", lagged[0]),
        cell_rows("previous_batch, follow-up", lagged[1]),
    ]
    table = pd.concat(tables, ignore_index=True).round(
        {"updates_to_target": 1, "interval_low": 1, "interval_high": 1, "mean_reward": 4}
        | {"final_reward": 4, "entropy": 3}
    )
    table.to_csv(RESULTS / "small_networks.csv", index=False)
    print(f"{len(table)} cells: {RESULTS / 'small_networks.csv'}")


if __name__ == "__main__":
    main()
