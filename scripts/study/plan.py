# SPDX-License-Identifier: Apache-2.0
"""The planned runs of the study on the language model; docs/dev/plan_language_model.md says why."""

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

ROWS = Path("docs/results/language_model")  # a file for each run
# Mini-batches of a rollout batch, and epochs on it. Both make 16 updates on each rollout batch.
SOURCES = {"epochs": (4, 4), "batches": (16, 1)}


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        method: the name of a file in configs/method, or ``gspo`` for verl's loss.
        source: a key of ``SOURCES``.
        learning_rate: learning rate of AdamW, constant.
        seed: seed of the prompts and of the sampling.
        rollouts: number of rollout batches; each has 16 updates.
        precision: ``float32``, or ``bfloat16`` for autocast, as in verl: the parameters stay in float32, matrices are
            multiplied in bfloat16.
    """

    method: str
    source: str
    learning_rate: str
    seed: int
    rollouts: int = 6
    precision: str = "bfloat16"

    @property
    def name(self) -> str:
        """The name of the run on the command line."""
        return f"{self.method}-{self.source}-{self.learning_rate}-seed{self.seed}"


# Stage (a): measure how much is clipped, and how often rho is below the target, at each source of staleness.
STAGE_A = [Run("grpo", "epochs", "1e-5", 1, precision="float32"), Run("grpo", "batches", "1e-5", 1)]
# Stage (b): compare methods. All methods of a seed come before the next seed, so that whole blocks can be compared.
METHODS = ("grpo", "high_only", "bapo", "gspo")
IN_FLOAT32 = (12, 13, 14)  # seeds made on a machine without processor instructions for bfloat16
STAGE_B = [
    Run(method, "epochs", "1e-5", seed, rollouts=4, precision="float32" if seed in IN_FLOAT32 else "bfloat16")
    for seed in range(12, 18)
    for method in METHODS
]
# Runs of stage (b) that are not compared: of its first version (seed 2), and of a machine that was lost (seed 11).
NOT_COMPARED = [
    Run("grpo", "epochs", "1e-5", 2, rollouts=4, precision="float32"),
    Run("high_only", "epochs", "1e-5", 2, rollouts=2, precision="float32"),
    Run("grpo", "epochs", "1e-5", 11, rollouts=4),
    Run("high_only", "epochs", "1e-5", 11, rollouts=4),
]
# GRPO at twice the learning rate, with seeds of stage (b).
CONTROLS = [replace(run, learning_rate="2e-5") for run in STAGE_B if run.method == "grpo" and run.seed in (12, 13)]
PLANNED = STAGE_A + STAGE_B + NOT_COMPARED + CONTROLS


def runs_named(names: list[str]) -> list[Run]:
    """Return the planned runs with these names. No name: the runs of both stages."""
    planned = {run.name: run for run in PLANNED}
    for name in names:
        if name not in planned:
            raise SystemExit(f"Error: no run {name} is planned: choose from {', '.join(planned)}.")
    return [planned[name] for name in names] or STAGE_A + STAGE_B


def is_complete(run: Run, path: Path) -> bool:
    """Whether the file has the rows of all rollout batches."""
    return path.exists() and pd.read_parquet(path, columns=["rollout"])["rollout"].max() + 1 == run.rollouts
