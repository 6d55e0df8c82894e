# SPDX-License-Identifier: Apache-2.0
"""The runs and the declared comparisons of the third study. docs/dev/plan.md has the reasons.

Both were written before the data. A cell is all seeds of one method at one staleness and learning rate.
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.study.train import Cell

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
TABLE = RESULTS / "third_study.parquet"

# The pilots (from 3000 on) and the second study (1 to 20) used other seeds. The number is even, to split into halves.
SEEDS = {
    "chain": list(range(101, 141)),
    "hard_chain": list(range(201, 221)),
    "larger_model": list(range(301, 311)),
}
TASKS = {"chain": "retry task", "hard_chain": "hard retry task", "larger_model": "larger model"}  # names in tables
UPDATES = {"chain": 256, "hard_chain": 256, "larger_model": 320}
RATES = {"chain": [4e-3, 8e-3, 1.6e-2], "hard_chain": [2e-3, 4e-3, 8e-3], "larger_model": [1e-3, 2e-3]}

LABELS = {
    "grpo": "GRPO [0.8, 1.2]",
    "clip_higher": "clip-higher [0.8, 1.28]",
    "high_only": "[0.8, 3.0]",
    "widest": "[0.9, 3.0]",
    **{f"bapo@{target:g}": f"BAPO {target:.2f}" for target in (0.28, 0.35, 0.38, 0.4, 0.45, 0.47, 0.48, 0.5)},
    "other_seed:bapo@0.38": "another seed's bounds of BAPO 0.38",
    "other_seed:bapo@0.4": "another seed's bounds of BAPO 0.40",
    "own_mean:bapo@0.4": "own mean bounds of BAPO 0.40",
    "schedule": "schedule by epoch",
    "topr": "TOPR",
    "m2po": "M2PO",
    "gspo": "GSPO",
    "sapo": "SAPO",
    "cispo": "CISPO",
    "dppo_tv": "DPPO-TV",
    "dppo_kl": "DPPO-KL",
    "vanilla": "GRPO, mean of response means",
    "gspo@clip_ratio_low=0.2,clip_ratio_high=0.2": "GSPO [0.8, 1.2]",
    "cispo@clip_ratio_high=2.0": "CISPO up to 3",
    "dppo_tv@clip_ratio_c=3.0": "DPPO-TV, ratio up to 3",
}
BOUNDS = ["grpo", "high_only", "widest", "bapo@0.4"]
SHIPPED = ["gspo", "sapo", "cispo", "dppo_tv", "dppo_kl"]  # losses that verl ships
CONTROLS = ["other_seed:bapo@0.4", "own_mean:bapo@0.4"]  # bounds that are not from the run's own search
DESCRIBED = ["clip_higher", "bapo@0.35", "bapo@0.45", "vanilla", *(name for name in LABELS if "=" in name)]


@dataclass(frozen=True)
class Place:
    """A source of staleness on a task, with its stalenesses, dual clip (3, or None: off) and learning rates."""

    task: str
    source: str
    stalenesses: tuple[int, ...]
    dual_clip: float | None = 3.0
    rates: tuple[float, ...] = ()  # empty: all rates of the task

    @property
    def name(self) -> str:
        """The name of the place in tables and tests."""
        source = {"epochs": "epochs", "once": "one epoch", "delay": "delay", "partial": "partial rollout"}[self.source]
        return f"{TASKS[self.task]}, {source}" + ("" if self.dual_clip else ", no dual clip")

    def cells(self, methods: list[str]) -> list[Cell]:
        """Return the cells of these methods at every staleness and learning rate, in the order of the methods.

        List a method before those that take bounds from it.
        """
        return [
            Cell(self.task, self.source, staleness, rate, self.dual_clip, method, UPDATES[self.task])
            for method in methods
            for staleness in self.stalenesses
            for rate in self.rates or RATES[self.task]
        ]


EPOCHS = Place("chain", "epochs", (4, 16))
DELAY = Place("chain", "delay", (32, 128))
PARTIAL = Place("chain", "partial", (32, 128))
EPOCHS_FREE = Place("chain", "epochs", (4, 16), None)
DELAY_FREE = Place("chain", "delay", (8, 32, 128), None)
HARD_EPOCHS = Place("hard_chain", "epochs", (4, 16))
HARD_PARTIAL = Place("hard_chain", "partial", (32, 64))
LARGER = Place("larger_model", "epochs", (8,))
PLACES = [EPOCHS, DELAY, PARTIAL, EPOCHS_FREE, DELAY_FREE, HARD_EPOCHS, HARD_PARTIAL, LARGER]

SCHEDULED = ["grpo", "high_only", "bapo@0.4", *CONTROLS, "schedule", *SHIPPED, "topr", "m2po", "widest"]
UNSCHEDULED = [method for method in SCHEDULED if method != "schedule"]
HARD = ["grpo", "clip_higher", "high_only", "bapo@0.28", "bapo@0.38", "other_seed:bapo@0.38", "bapo@0.48"]
HARD += ["topr", "cispo", "dppo_tv"]
LARGE = ["grpo", "high_only", "bapo@0.4", "bapo@0.47", "bapo@0.5", "topr", "cispo", "dppo_tv"]
METHODS = {  # by place
    EPOCHS: [*SCHEDULED, *DESCRIBED],
    DELAY: [*UNSCHEDULED, *DESCRIBED],
    PARTIAL: UNSCHEDULED,
    EPOCHS_FREE: BOUNDS,
    DELAY_FREE: BOUNDS,
    HARD_EPOCHS: HARD,
    HARD_PARTIAL: HARD,
    LARGER: LARGE,
}


def controls() -> list[Cell]:
    """Return the cells of GRPO on fresh data: every ratio is 1 there, so no clip has an effect."""
    return [Cell(task, "fresh", 1, rate, 3.0, "grpo", UPDATES[task]) for task, rates in RATES.items() for rate in rates]


def cells() -> list[Cell]:
    """Return all cells in the order in which they run: the most valuable first, donors before those that need them."""
    fresh = {task: [cell for cell in controls() if cell.task == task] for task in RATES}
    declared = [
        *fresh["chain"],
        *EPOCHS.cells(SCHEDULED),
        *DELAY.cells(UNSCHEDULED),
        *PARTIAL.cells(UNSCHEDULED),
        *fresh["hard_chain"],
        *HARD_EPOCHS.cells(HARD),
        *HARD_PARTIAL.cells(HARD),
        *EPOCHS_FREE.cells(BOUNDS),
        *DELAY_FREE.cells(BOUNDS),
        *fresh["larger_model"],
        *LARGER.cells(LARGE),
    ]
    return declared + [*EPOCHS.cells(DESCRIBED), *DELAY.cells(DESCRIBED)]


@dataclass(frozen=True)
class Comparison:
    """One primary test: ``method`` against ``other`` at a place.

    ``measure`` is ``speed`` (log ratio of the updates to the target reward) or ``failing`` (difference of the shares of
    failed runs). ``claim`` is ``difference`` or ``equivalence`` (within 5 % of the updates).
    """

    place: Place
    method: str
    other: str
    measure: str = "speed"
    claim: str = "difference"


def comparisons() -> list[Comparison]:
    """Return all primary tests. Everything else in the tables is description."""
    chain = [EPOCHS, DELAY, PARTIAL]
    others = ["grpo", "high_only", *SHIPPED, "topr"]
    speed = [Comparison(place, "bapo@0.4", other) for place in chain for other in others]
    worth = [
        Comparison(place, "bapo@0.4", other, claim="equivalence")
        for place in chain
        for other in (*CONTROLS, "high_only")
    ]
    worth += [Comparison(EPOCHS, "bapo@0.4", "schedule", claim=claim) for claim in ("equivalence", "difference")]
    worth += [Comparison(EPOCHS, "schedule", "own_mean:bapo@0.4"), Comparison(EPOCHS, "schedule", "high_only")]
    worth += [Comparison(place, "bapo@0.4", "own_mean:bapo@0.4") for place in chain]
    hard_places = (HARD_EPOCHS, HARD_PARTIAL)
    others = ["grpo", "high_only", "topr", "cispo", "dppo_tv"]
    hard = [Comparison(place, "bapo@0.38", other) for place in hard_places for other in others]
    hard += [Comparison(place, "bapo@0.38", "other_seed:bapo@0.38", claim="equivalence") for place in hard_places]
    larger = [Comparison(LARGER, "bapo@0.47", other) for other in others]
    failing = [
        Comparison(place, "bapo@0.4", other, "failing")
        for place in (*chain, EPOCHS_FREE, DELAY_FREE)
        for other in ("grpo", "high_only")
    ]
    return speed + worth + hard + larger + failing
