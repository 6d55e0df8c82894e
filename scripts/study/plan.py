# SPDX-License-Identifier: Apache-2.0
"""What the study runs: tasks, methods, stalenesses, seeds, and where a finished run is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
TASK = ROOT / "runs" / "study" / "task"
METHODS = ["grpo", "clip_higher", "authors_code", "widest", "bapo", "bapo_gradient"]
ADDED, ADDED_STALENESS = ["bapo@0.38", "bapo_gradient@0.38"], [8, 32]  # with a lower target; see docs/results.md
LOOP = {"prompts": 16, "samples": 8, "learning_rate": 5e-4, "updates": 320}
LOOP_STALENESS, LOOP_SEEDS = [1, 8, 32], [1, 2, 3, 4, 5]
STACK_METHODS, STACK_SEEDS = ["grpo", "bapo", "bapo_gradient"], [1, 2, 3]
STACK = {"prompts": 16, "samples": 8, "learning_rate": 5e-4, "staleness": 16, "steps": 16}
WINDOW = 8  # updates; the series of a run are means over so many, but for the gradient norm


def run_path(part: str, method: str, staleness: int, seed: int) -> Path:
    """Where a finished run is."""
    return RESULTS / part / f"{method}-staleness{staleness}-seed{seed}.json"


def loop_runs() -> list[tuple[str, int, int]]:
    """The planned runs of the loop: method, staleness and seed."""
    methods = {s: METHODS + (ADDED if s in ADDED_STALENESS else []) for s in LOOP_STALENESS}
    return [(m, s, seed) for seed in LOOP_SEEDS for s in reversed(LOOP_STALENESS) for m in methods[s]]
