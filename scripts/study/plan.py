# SPDX-License-Identifier: Apache-2.0
"""What the second study runs: seeds, methods, grids, and the cells of its maps. docs/results.md says why.

A cell is all seeds of one method at one staleness and learning rate; ``Cell`` says what its fields mean.
"""

from __future__ import annotations

from pathlib import Path

from scripts.study.train import Cell

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
TABLE = RESULTS / "second_study.parquet"
SEEDS = list(range(1, 21))  # pilots used 1000 and above, which are not used again
UPDATES = {"chain": 256, "reversal": 128}  # optimizer updates; of the longer responses fewer

METHODS = {  # the name in tables and pictures, by the name in configs/method
    "grpo": "GRPO [0.8, 1.2]",
    "clip_higher": "clip-higher [0.8, 1.28]",
    "low_only": "[0.9, 1.2]",
    "figure7_low": "[0.5, 1.2]",
    "figure7_high": "[0.8, 1.5]",
    "high_only": "[0.8, 3.0]",
    "widest": "[0.9, 3.0]",
    "bapo@0.4": "BAPO 0.4",
    "bapo@0.5": "BAPO 0.5",
    "bapo_gradient@0.4": "BAPO gradient 0.4",
    "authors_code": "authors' code",
    "topr": "TOPR",
    "balance": "balance, no clips",
}
ABLATION = {  # of map B, beside bapo@0.4, bapo@0.5 and bapo_gradient@0.4
    "bapo@0.35": "BAPO 0.35",
    "bapo@0.45": "BAPO 0.45",
    "bapo_gradient@0.35": "BAPO gradient 0.35",
    "bapo_gradient@0.45": "BAPO gradient 0.45",
    "bapo_gradient@0.5": "BAPO gradient 0.5",
    "paper_octothinker@0.4": "BAPO 0.4 in 0.8..0.9, 1.2..2.0",
    "bapo@0.4,ratio_lower_start=0.8,ratio_lower_max=0.8": "BAPO 0.4 in 0.8, 1.2..3.0",
    "bapo@0.4,ratio_upper_max=1.2": "BAPO 0.4 in 0.6..0.9, 1.2",
}
CLIPS = [(None, None), (None, 3.0), (1.0, None), (1.0, 3.0)]  # of the gradient's norm, and dual clip

# The learning rate at which GRPO fails in a quarter of the pilot's seeds at the largest staleness, and below it.
RATES = {("A", "sgd"): [0.5, 1.0, 2.0], ("A", "adamw"): [4e-3, 8e-3, 1.6e-2]}
RATES |= {("B", "adamw"): [4e-3, 1.6e-2, 3.2e-2], ("C", "adamw"): [4e-3, 1.6e-2, 3.2e-2]}
STALENESS = {"sgd": [8, 32, 128], "adamw": [32, 128]}
EPOCHS, DELAYS = [1, 4, 16], [8, 32, 128]


def cells() -> list[Cell]:
    """All cells in the order in which they run: the controls, what the primary tests need, map A's others last."""
    everything = [*controls(), *map_a(), *map_b(), *map_c(), *never_ending(), *ablation(), *partial_rollout()]

    def place(cell):
        primary = cell.method in ("grpo", "bapo@0.4", "widest")
        return cell.map != "control", not primary, not primary and cell.map == "A"

    return list(dict.fromkeys(sorted(everything, key=place)))


def cell(map, method, source, staleness, optimizer, rate, norm_clip, dual_clip, task="chain") -> Cell:
    """A cell of the planned length."""
    return Cell(map, task, source, staleness, optimizer, rate, norm_clip, dual_clip, method, UPDATES[task])


def controls() -> list[Cell]:
    """Staleness 1: GRPO wherever a map is judged by it, and every method once, all to the same bits.

    The dual clip does nothing there, and maps B and C have map A's control at their own learning rates.
    """
    judged = {
        (c.task, c.optimizer, c.learning_rate, c.norm_clip) for c in [*map_a(), *map_b(), *map_c(), *never_ending()]
    }
    found = [
        cell("control", "grpo", "block", 1, optimizer, rate, norm_clip, None, task)
        for task, optimizer, rate, norm_clip in sorted(judged, key=str)
    ]
    return found + [cell("control", method, "block", 1, "adamw", 4e-3, 1.0, None) for method in METHODS]


def map_a() -> list[Cell]:
    """Protection: each sample used once; every dual clip with every clip of the norm."""
    return [
        cell("A", method, "block", staleness, optimizer, rate, norm_clip, dual_clip)
        for optimizer in ("sgd", "adamw")
        for norm_clip, dual_clip in CLIPS
        for rate in RATES["A", optimizer]
        for staleness in STALENESS[optimizer]
        for method in METHODS
    ]


def map_b() -> list[Cell]:
    """Epochs: the paper's own source of staleness, with and without dual clip."""
    return [
        cell("B", method, "epochs", number, "adamw", rate, 1.0, dual_clip)
        for dual_clip in (None, 3.0)
        for rate in RATES["B", "adamw"]
        for number in EPOCHS
        for method in METHODS
    ]


def map_c() -> list[Cell]:
    """Delay: a queue of updates, the ratio against the sampler."""
    return [
        cell("C", method, "delay", updates, "adamw", rate, 1.0, None)
        for rate in RATES["C", "adamw"]
        for updates in DELAYS
        for method in METHODS
    ]


def never_ending() -> list[Cell]:
    """Map A's protections with the task whose failure is a response without an end."""
    return [
        cell("A", method, "block", 32, "sgd", rate, norm_clip, dual_clip, task="reversal")
        for norm_clip, dual_clip in CLIPS
        for rate in RATES["A", "sgd"][:2]
        for method in METHODS
    ]


def ablation() -> list[Cell]:
    """Targets and ranges of BAPO, in map B where reuse is high."""
    return [
        cell("ablation", method, "epochs", 16, "adamw", rate, 1.0, dual_clip)
        for dual_clip in (None, 3.0)
        for rate in RATES["B", "adamw"][1:]
        for method in ABLATION
    ]


def partial_rollout() -> list[Cell]:
    """Responses of mixed age: partial rollout."""
    return [
        cell("partial", method, "partial", updates, "adamw", rate, 1.0, None)
        for rate in RATES["C", "adamw"][:2]
        for updates in DELAYS[1:]
        for method in METHODS
    ]
