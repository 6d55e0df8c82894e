# SPDX-License-Identifier: Apache-2.0
"""What the report says of a run, as numbers: from the sums in its record. Shares are between 0 and 1.

All of it is exact: a token is in a bucket of its ratio, and every candidate of a bound is an edge of a bucket. Only
what ``bound_scope=micro_batch`` clips is not: it is a mean over micro-batches, because each has bounds of its own.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipStatistics
from bapo.config import CHOICES, Range
from bapo.search import end_on_path, measure_search_path, reaches_target
from recipe.bapo.hook import verdict
from recipe.bapo.hook.record import Start, Updates, read_start
from recipe.bapo.hook.verdict import Verdict, judge
from recipe.bapo.hook.verdict_inputs import verdict_inputs
from recipe.bapo.report.columns import Table, join

CONTRIBUTIONS = CHOICES["contribution"]
TARGETS = [k / 100 for k in range(10, 91)]  # that are searched for, besides the run's own
BOUNDS = [(0.8, 1.2), (0.8, 3.0), (0.6, 1.2), (0.9, 3.0)]  # that are measured, besides those of the run's loss
TAILS = {"above": (1.2, 1.5, 2.0, 3.0), "below": (0.9, 0.8, 0.7, 0.6)}  # ratios, of A > 0 and of A < 0
NAMES_OF_A_START = ("utc", "host", "bapo", "verl")  # what may differ between two starts of one run


@dataclass(frozen=True)
class Run:
    """A run: one start of its training process, or several if it was resumed.

    Attributes:
        starts: the first lines of the records, in order.
        recorded: all updates, in order. Its columns are the values and numbers of the record by name, and those of
            ``_measure``.
    """

    starts: list[Start]
    recorded: Table

    @property
    def config(self) -> BAPOConfig:
        """The options of the search."""
        return self.starts[0].config

    @property
    def about(self) -> dict:
        """The first line of its first record."""
        return self.starts[0].about

    @property
    def applied(self) -> bool:
        """Whether the run's loss uses BAPO's bounds."""
        return bool(self.about.get("applied"))

    @property
    def own_clip(self) -> dict | None:
        """The limits of another loss that the run trains with (see ``OwnClip``), if that clips."""
        return None if self.applied else self.about.get("own_clip")

    @property
    def valid(self) -> Tensor:
        """Which updates were measured, ``(updates,)`` bool: all log-probs and advantages were finite, and collected."""
        return ~self.recorded["met_at_start"].isnan()

    @cached_property
    def updates(self) -> Table:
        """The valid updates that have a token with an advantage. All figures are about these."""
        return self.recorded.rows(self.valid & (self.recorded["tokens"].sum(1) > 0))

    @cached_property
    def verdict(self) -> Verdict:
        """What was measured, in a sentence."""
        return judge(_numbers(self.recorded), self.config, self.about, "this run")

    def by_step(self, most: int) -> tuple[str, list[tuple[int, int, Table]]]:
        """Group the updates by the largest unit of training that the record knows. Returns its name too."""
        unit, labels = steps_of(self.updates)
        return unit, self.updates.groups(labels, most)

    def by_position(self, most: int) -> list[tuple[int, int, Table]]:
        """Group the updates by their position on a rollout batch, from 1, as far as the record knows it."""
        known = self.updates.rows(~self.updates["update"].isnan())
        known = known.rows(known["update"].argsort(stable=True))
        return known.groups(_labels(known["update"], 1), most)


def steps_of(updates: Table) -> tuple[str, list[int]]:
    """Return the name of the largest unit of training that the record knows of all updates, and each one's number."""
    for key, name, first in (("step", "training step", 0), ("call", "training call", 1)):
        if not updates[key].isnan().any():
            return name, _labels(updates[key], first)
    return "update", list(range(1, len(updates) + 1))


def read_runs(path: Path) -> list[Run]:
    """Read the runs of a record or of a folder with records.

    A start of a process resumes an earlier run if both have the same first line (but for time, host and versions), both
    know the trainer's step, and it begins at a later step than that run. Its updates then replace those that the run
    had made from that step on.

    Raises:
        ValueError: there is no record, or one has no complete update or is not readable.
    """
    files = sorted(path.glob("record-*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no record-*.jsonl: train with record_dir={path.resolve()} (docs/monitor.md).")
    runs: list[Run] = []
    for start in filter(None, map(read_start, files)):
        tables = [_measure(updates, start) for updates in start.updates()]
        if not tables:
            continue
        recorded = join(tables)
        place = next((k for k in reversed(range(len(runs))) if _resumes(start, recorded, runs[k])), None)
        if place is None:
            runs.append(Run([start], recorded))
        else:
            before = runs[place].recorded
            kept = before.rows(before["step"] < recorded["step"][0])
            runs[place] = Run([*runs[place].starts, start], join([kept, recorded]))
    if not runs:
        raise ValueError(f"{path} holds no complete update yet: let the run finish one.")
    return runs


def clipped_by_loss(run: Run, updates: Table) -> tuple[float, float] | None:
    """Return the share of the tokens with A > 0 and with A < 0 that the run's loss clipped (or capped) in some updates.

    None if it has no limits that are known here.
    """
    return clipped_by_bounds(updates) if run.applied else verdict.clipped_by_own_loss(_numbers(updates))


def clipped_by_bounds(updates: Table) -> tuple[float, float]:
    """Return the same shares for the bounds that BAPO's search found."""
    return verdict.clipped_by_bounds(_numbers(updates))


def ends_of_search(run: Run, contribution: str) -> dict[float, tuple[float, float, float]]:
    """Return for each target the share of the updates in which it is met at the start, met by moving, saturated.

    The search is over all tokens of an update, with the run's ranges and token weight.
    """
    ends = run.updates[f"ends_{contribution}"]
    shares = (torch.stack([(ends == end).sum(0) for end in range(3)], dim=1).double() / len(ends)).tolist()
    return {target: tuple(row) for target, row in zip(_targets(run.config), shares, strict=True)}


@dataclass(frozen=True)
class FixedBounds:
    """What two fixed bounds do to the tokens of a run.

    Attributes:
        positive, negative: the share of the tokens with A > 0 at or above the upper bound, and of those with A < 0 at
            or below the lower bound.
        rho: the median of rho over the updates, by ``contribution``.
    """

    positive: float
    negative: float
    rho: dict[str, float]


def fixed_bounds(run: Run, low: float, high: float) -> FixedBounds | None:
    """Return what two bounds do, of ``BOUNDS`` or the run's loss; None if one is no candidate of the run's search."""
    if f"clipped_by_{low}_{high}" not in run.updates.columns:
        return None
    shares = _shares(run.updates[f"clipped_by_{low}_{high}"].sum(0), run.updates["tokens"].sum(0))
    rho = run.updates[f"rho_of_{low}_{high}"].T.tolist()
    return FixedBounds(*shares, dict(zip(CONTRIBUTIONS, map(median, rho), strict=True)))


def tail(run: Run, side: str) -> dict[float, float]:
    """Return how many tokens have a ratio beyond each of ``TAILS`` that the record knows, as a share of their sign.

    Args:
        run: the run.
        side: ``above``: tokens with A > 0 at or above the ratio; ``below``: tokens with A < 0 at or below it.
    """
    tokens = run.updates["tokens"].sum(0)[int(side == "below")].item()
    known = [ratio for ratio in TAILS[side] if f"{side}_{ratio}" in run.updates.columns]
    return {ratio: run.updates[f"{side}_{ratio}"].sum().item() / max(1, tokens) for ratio in known}


def _measure(updates: Updates, start: Start) -> Table:
    """Make the table of some updates. Its columns of the sums, with A > 0 first where there are two signs:

    - ``tokens``: numbers of tokens, ``(updates, 2)``.
    - ``ends_<contribution>``: how the search for each target ends, ``(updates, targets)``: 0 met at the start, 1 met by
      moving, 2 saturated.
    - ``clipped_by_<low>_<high>``: number of tokens that these bounds clip, ``(updates, 2)``.
    - ``rho_of_<low>_<high>``: rho at these bounds, ``(updates, contributions)``.
    - ``<side>_<ratio>``: number of tokens beyond a ratio (see ``tail``), ``(updates,)``.
    - ``gradient`` and ``unbounded_gradient`` of the sums, and those of ``verdict_inputs``, ``(updates,)``.
    """
    stats = updates.stats
    figures = {"tokens": torch.stack(stats.tokens_by_sign, dim=1)}
    figures |= {name: getattr(stats.sums, name) for name in ("gradient", "unbounded_gradient")}
    figures |= _tails(stats)
    figures |= {f"ends_{contribution}": _ends(stats, contribution) for contribution in CONTRIBUTIONS}
    own = start.about.get("own_clip")
    contributions = [stats.contributions(contribution) for contribution in CONTRIBUTIONS]
    for low, high in [*BOUNDS, *([(own["low"], own["high"])] if own and own["of"] == "ratio" else [])]:
        figures |= _bounds(stats, contributions, low, high)
    figures |= verdict_inputs(stats, bool(own) and not start.about.get("applied"))
    rows = [values | numbers for values, numbers in zip(updates.values, updates.numbers, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row)
    read = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return Table({name: torch.tensor(column, dtype=torch.float64) for name, column in read.items()} | figures)


def _numbers(updates: Table) -> list[dict[str, float]]:
    """Return the numbers of each update by name."""
    return updates.dicts([name for name, column in updates.columns.items() if column.dim() == 1])


def _ends(stats: ClipStatistics, contribution: str) -> Tensor:
    """Return how the search for each target ends in each update, ``(updates, targets)``."""
    path = measure_search_path(stats, replace(stats.config, contribution=contribution))
    ends = []
    for target in _targets(stats.config):  # all at once would take longer, since the tensors would not fit the cache
        end = end_on_path(reaches_target(path.p, path.n, target))
        ends.append(end.met_by_moving.byte() + 2 * end.saturated.byte())
    return torch.stack(ends, dim=1)


def _bounds(
    stats: ClipStatistics, contributions: list[tuple[Tensor, Tensor]], low: float, high: float
) -> dict[str, Tensor]:
    """Return what two bounds clip and their rho; nothing if one is no candidate of the search."""
    at_low, at_high = _index(stats.config.lower, low), _index(stats.config.upper, high)
    if at_low is None or at_high is None:
        return {}
    counts = stats.clipped_tokens(stats.config.lower.grid()[at_low], stats.config.upper.grid()[at_high])
    rho = []
    for of_high, of_low in contributions:
        p, n = of_high[:, at_high], of_low[:, at_low]
        rho.append(torch.where(p + n > 0, p / (p + n), 0.0))
    return {f"clipped_by_{low}_{high}": torch.stack(counts, dim=1), f"rho_of_{low}_{high}": torch.stack(rho, dim=1)}


def _tails(stats: ClipStatistics) -> dict[str, Tensor]:
    lower, upper = stats.config.lower, stats.config.upper
    found: dict[str, Tensor] = {}
    for above, below in zip(*TAILS.values(), strict=True):
        at_high, at_low = _index(upper, above), _index(lower, below)
        counts = stats.clipped_tokens(lower.grid()[at_low or 0], upper.grid()[at_high or 0])
        found |= {f"above_{above}": counts[0]} if at_high is not None else {}
        found |= {f"below_{below}": counts[1]} if at_low is not None else {}
    return found


def _resumes(start: Start, recorded: Table, run: Run) -> bool:
    def same(about):
        return {name: value for name, value in about.items() if name not in NAMES_OF_A_START}

    steps, steps_before = recorded["step"], run.recorded["step"]
    know_steps = not (steps.isnan().any() or steps_before.isnan().any())
    return know_steps and same(start.about) == same(run.about) and bool(steps[0] > steps_before[0])


def _targets(config: BAPOConfig) -> list[float]:
    return sorted({*TARGETS, config.positive_contribution_target})


def _labels(numbers: Tensor, first: int) -> list[int]:
    return (numbers.long() + first).tolist()


def _index(candidates: Range, bound: float) -> int | None:
    """Return the number of a bound among the candidates; None if it is not one of them."""
    distance, place = (candidates.grid() - bound).abs().min(0)
    return int(place) if distance < 1e-9 else None


def _shares(counts: Tensor, tokens: Tensor) -> tuple[float, float]:
    positive, negative = (counts / tokens.clamp(min=1)).tolist()
    return positive, negative
