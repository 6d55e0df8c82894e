# SPDX-License-Identifier: Apache-2.0
"""What the report says of a run, as numbers: from the sums in its record. Shares are between 0 and 1.

All of it is exact: a token is in a bucket of its ratio, and every candidate of a bound is an edge of a bucket. Only
what ``bound_scope=micro_batch`` clips is not: it is a mean over micro-batches, because each has bounds of its own.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bapo import BAPOConfig
from bapo.config import CHOICES, Range
from bapo.search import measure_search_path, reaches_target
from recipe.bapo.record import Start, Update, read_record

CONTRIBUTIONS = CHOICES["contribution"]
NAMES_OF_A_PROCESS = ("utc", "host")  # what differs between two starts of one run


@dataclass(frozen=True)
class Run:
    """A run: one start of its training process, or several if it was resumed.

    Attributes:
        starts: the records, in order.
        recorded: all updates, in order.
    """

    starts: list[Start]
    recorded: list[Update]

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
        """The limits of another loss that the run trains with (see ``OwnClip``), if that clips by the ratio."""
        return None if self.applied else self.about.get("own_clip")

    @cached_property
    def invalid(self) -> list[Update]:
        """The updates that are not valid. Their sums mean nothing."""
        return [update for update in self.recorded if not is_valid(update)]

    @cached_property
    def updates(self) -> list[Update]:
        """The other updates, as far as they have a token with an advantage. All figures are about these."""
        return [update for update in self.recorded if is_valid(update) and sum(update.stats.tokens_by_sign) > 0]

    def by_step(self, updates: list[Update]) -> tuple[str, dict[int, list[Update]]]:
        """Return the name of the largest unit of training that the record knows, and some updates by its number."""
        for key, name, first in (("step", "training step", 0), ("call", "training call", 1)):
            if all(key in update.numbers for update in updates):
                return name, _group(updates, [int(update.numbers[key]) + first for update in updates])
        return "update", _group(updates, list(range(1, len(updates) + 1)))

    def by_position(self) -> dict[int, list[Update]]:
        """Return the updates by their position on a rollout batch, from 1, as far as the record knows it."""
        known = [update for update in self.updates if "update" in update.numbers]
        return dict(sorted(_group(known, [int(update.numbers["update"]) + 1 for update in known]).items()))


def read_runs(path: Path) -> list[Run]:
    """Read the runs of a record or of a folder with records.

    A start of a process resumes an earlier run if both have the same first line (but for the time and the host), both
    know the trainer's step, and it begins at a later step than that run. Its updates then replace those that the run
    had made from that step on.

    Raises:
        ValueError: there is no record, or one has no complete update or is not readable.
    """
    files = sorted(path.glob("record-*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no record-*.jsonl: train with record_dir={path.resolve()} (docs/monitor.md).")
    runs: list[Run] = []
    for start in filter(lambda start: start.updates, map(read_record, files)):
        place = next((k for k in reversed(range(len(runs))) if _resumes(start, runs[k])), None)
        if place is None:
            runs.append(Run([start], start.updates))
        else:
            first = start.updates[0].numbers["step"]
            kept = [update for update in runs[place].recorded if update.numbers["step"] < first]
            runs[place] = Run([*runs[place].starts, start], kept + start.updates)
    if not runs:
        raise ValueError(f"{path} holds no complete update yet: let the run finish one.")
    return runs


def clipped(run: Run, updates: list[Update], by_bapo: bool) -> tuple[float, float] | None:
    """Return the share of the tokens with A > 0 and with A < 0 that these updates clipped (or capped).

    Args:
        run: of these updates.
        updates: some of its updates.
        by_bapo: count what BAPO's bounds clip, also where the run's loss does not use them. Otherwise what the loss of
            the run clips: None if that does not clip by the ratio.
    """
    tokens = torch.stack([torch.stack(update.stats.tokens_by_sign) for update in updates])
    if by_bapo or run.applied:
        shares = [[update.values[f"clipfrac_{sign}"] for sign in ("positive", "negative")] for update in updates]
        counts = tokens * torch.tensor(shares, dtype=torch.float64)
    elif run.own_clip is not None:
        sums = [update.stats.sums for update in updates]
        counts = torch.stack([torch.stack([s.own_clipped_positive, s.own_clipped_negative]) for s in sums])
    else:
        return None
    return _shares(counts.sum(0), tokens.sum(0))


def ends_of_search(run: Run, contribution: str, targets: list[float]) -> dict[float, tuple[float, float, float]]:
    """Return for each target the share of the updates in which it is met at the start, met by moving, saturated.

    The search is over all tokens of an update, with the run's ranges and token weight.
    """
    config, column = replace(run.config, contribution=contribution), torch.tensor(targets, dtype=torch.float64)[:, None]
    ends = []
    for update in run.updates:
        path = measure_search_path(update.stats, config)
        reached = reaches_target(path.p, path.n, column)
        at_start, ever = reached[:, 0], reached.any(1)
        ends.append(torch.stack([at_start, ever & ~at_start, ~ever], dim=1))
    shares = torch.stack(ends).double().mean(0).tolist()
    return {target: tuple(row) for target, row in zip(targets, shares, strict=True)}


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
    """Measure two bounds; None if one of them is not a candidate of the run's search."""
    at_low, at_high = _index(run.config.lower, low), _index(run.config.upper, high)
    if at_low is None or at_high is None:
        return None
    first, *others = [update.stats for update in run.updates]
    total = sum(others, start=first)
    counts = total.clipped_tokens(run.config.lower.grid()[at_low], run.config.upper.grid()[at_high])
    rho = {}
    for contribution in CONTRIBUTIONS:
        both = [update.stats.contributions(contribution) for update in run.updates]
        pairs = [(p[at_high].item(), n[at_low].item()) for p, n in both]
        rho[contribution] = median(p / (p + n) if p + n > 0 else 0.0 for p, n in pairs)
    return FixedBounds(*_shares(torch.stack(counts), torch.stack(total.tokens_by_sign)), rho)


def values(updates: list[Update], name: str) -> list[float]:
    """Return a logged value of each update."""
    return [update.values[name] for update in updates]


def is_valid(update: Update) -> bool:
    """Whether an update was measured: log-probs and advantages were finite, and no micro-batch was missed."""
    return "met_at_start" in update.values


def _resumes(start: Start, run: Run) -> bool:
    def same(about):
        return {name: value for name, value in about.items() if name not in NAMES_OF_A_PROCESS}

    know_steps = all("step" in update.numbers for update in run.recorded + start.updates)
    return (
        know_steps
        and same(start.about) == same(run.about)
        and start.updates[0].numbers["step"] > run.recorded[0].numbers["step"]
    )


def _group(updates: list[Update], labels: list[int]) -> dict[int, list[Update]]:
    groups: dict[int, list[Update]] = {}
    for update, label in zip(updates, labels, strict=True):
        groups.setdefault(label, []).append(update)
    return groups


def _index(candidates: Range, bound: float) -> int | None:
    """Return the number of a bound among the candidates; None if it is not one of them."""
    distance, place = (candidates.grid() - bound).abs().min(0)
    return int(place) if distance < 1e-9 else None


def _shares(counts: Tensor, tokens: Tensor) -> tuple[float, float]:
    positive, negative = (counts / tokens.clamp(min=1)).tolist()
    return positive, negative
