# SPDX-License-Identifier: Apache-2.0
"""One pass over a dump: sums by update and histograms, from which ``facts`` follow. Memory: an update and a few MB.

The size of a token's gradient is ``r*|A|``, what the loss without clipping has with respect to the token's log-prob.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipStatistics, collect_clip_statistics, diagnose, read_values, search_clip_bounds
from bapo.ratio import log_ratio_of
from recipe.bapo.records.tokens import read_dump

WEIGHTS = ("rollout_prob", "uniform")
DEFINITIONS = [(c, w) for c in ("value", "gradient") for w in WEIGHTS]
CHUNK = 1 << 14  # tokens at a time: they fit a CPU's cache
NEGATIVE, POSITIVE = 0, 1  # first index of sums by sign
EDGES = (0.8, 0.9, 1.0, 1.2, 1.28, 2.0, 3.0, 10.0)  # of the ratio; bucket b: r is above b of them
COUNT, WA, WAR = range(3)  # of each bucket: tokens, sum of |A|, sum of r*|A|
BOXES = (0.5, 0.8, 0.9, 1.1, 1.2, 2.0, 3.0)  # ratio bins of the box plots
M2PO_THRESHOLD, M2PO_STEP, LOG_LIMIT = 0.04, 1e-3, 20.0  # M2PO's cut is found to a step of |log r|
ENTROPY_LIMIT = 15.0  # nats, above that of any vocabulary


@dataclass
class Update:
    """Sums over the tokens of one update.

    Attributes:
        number: of the update within its rollout batch, from 0; None where the dump does not say.
        by_ratio: ``(2, len(EDGES) + 1, 3)``: by sign and bucket of the ratio ``COUNT``, ``WA``, ``WAR``.
        tokens, zero: all tokens, those with A = 0.
        ratio, ratio_squared, log_squared: sums of r, r^2 and (log r)^2 over all tokens.
        largest_negative: largest ratio of a token with A < 0; 0 without one.
        m2po: ``(2, 2)``: by sign ``COUNT`` and r*|A| of the tokens that M2PO masks.
        statistics: by token weight.
        own: the same over the grids of the run's own bounds; None where the dump does not say them.
        corrected: those of the uniform weight with the weights of verl's rollout correction on the advantages; None
            where the dump has none.
    """

    number: int | None
    by_ratio: Tensor
    tokens: float
    zero: float
    ratio: float
    ratio_squared: float
    log_squared: float
    largest_negative: float
    m2po: Tensor
    statistics: dict[str, ClipStatistics]
    own: dict[str, ClipStatistics] | None
    corrected: ClipStatistics | None

    @property
    def effective_sample_size(self) -> float:
        """(sum r)^2 / (tokens * sum r^2), a share of the tokens."""
        return self.ratio**2 / (self.tokens * self.ratio_squared) if self.tokens else 0.0


@dataclass
class Quantiles:
    """A histogram for each sign and ratio bin that keeps each bin's mean: repeated values come back exactly."""

    limit: float
    bins: int = 1000
    sums: Tensor = field(init=False)  # (2, sign * ratio bins * bins): tokens, sum of values

    def __post_init__(self):
        self.sums = torch.zeros(2, 2 * (len(BOXES) + 1) * self.bins, dtype=torch.float64)

    def add(self, values: Tensor, group: Tensor) -> None:
        """Add values ``(tokens,)``, each to its group, sign * ratio bins + ratio bin."""
        values = values.double()
        index = (values / self.limit * self.bins).long().clamp(0, self.bins - 1)
        self.sums.index_add_(1, group * self.bins + index, torch.stack([torch.ones_like(values), values]))

    def of(self, sign: int, box: int) -> tuple[int, list[float] | None]:
        """Number of tokens, and their 5th, 25th, 50th, 75th and 95th percentile; None of no tokens."""
        counts, values = self.sums.view(2, 2, len(BOXES) + 1, self.bins)[:, sign, box]
        tokens = int(counts.sum())
        if not tokens:
            return 0, None
        # The q-th percentile is the smallest value that a share q of the tokens does not exceed.
        wanted = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64) * tokens
        at = torch.searchsorted(counts.cumsum(0), wanted - 1e-9)
        return tokens, (values[at] / counts[at]).tolist()


@dataclass
class Lengths:
    """Response lengths by the sign of a sequence's summed advantage: the number of sequences of each length."""

    counts: dict[int, dict[int, int]] = field(default_factory=lambda: {NEGATIVE: {}, POSITIVE: {}})
    known: bool = True

    def add(self, lengths: Tensor | None, advantages: Tensor) -> None:
        """Add the sequences of a micro-batch, whose tokens follow one another in ``advantages``."""
        if lengths is None:
            self.known = False
            return
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        total = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, sequence, advantages.double())
        for length, advantage in zip(lengths.tolist(), total.tolist(), strict=True):
            if advantage and length:
                of_sign = self.counts[POSITIVE if advantage > 0 else NEGATIVE]
                of_sign[length] = of_sign.get(length, 0) + 1

    def of(self, sign: int) -> dict | None:
        """Number of sequences, mean, median and largest length; None where the dump does not say or has none."""
        found = sorted(self.counts[sign].items())
        sequences = sum(count for _, count in found)
        if not self.known or not sequences:
            return None
        below = 0
        for median, count in found:  # noqa: B007  the loop ends at the median
            below += count
            if 2 * below >= sequences:
                break
        mean = sum(length * count for length, count in found) / sequences
        return {"sequences": sequences, "mean": mean, "median": median, "largest": found[-1][0]}


@dataclass
class Measured:
    """What one pass over a dump finds.

    Attributes:
        updates: in the order of the dump.
        by_age: sums as ``Update.by_ratio`` by the weights' age in versions; empty where the dump does not say.
        probability, entropy: of the tokens by sign and ratio bin; ``entropy`` is None where the dump has none.
        lengths: of the sequences by sign.
    """

    updates: list[Update]
    by_age: dict[int, Tensor]
    probability: Quantiles
    entropy: Quantiles | None
    lengths: Lengths

    @property
    def statistics(self) -> dict[tuple[str, str], list[ClipStatistics]]:
        """For each definition those of every update; measure and target do not enter them."""
        return {(c, w): [update.statistics[w] for update in self.updates] for c, w in DEFINITIONS}


def measure(
    folder: Path,
    config: BAPOConfig,
    clip_ratio_c: float | None,
    own: BAPOConfig | None = None,
    after_file: Callable[[], None] = lambda: None,
) -> Measured:
    """Read a dump once.

    Args:
        folder: of the dump.
        config: the grids of the bounds.
        clip_ratio_c: the run's dual clip; None: none.
        own: the run's own switches, if they are known.
        after_file: called after each file that was read.

    Raises:
        ValueError: as ``read_dump``.
    """
    found = Measured([], {}, Quantiles(1.0), None, Lengths())
    for micro_batches in read_dump(folder, after_file):
        found.updates.append(_measure_update(micro_batches, config, clip_ratio_c, own, found))
    return found


def _measure_update(micro_batches, config, clip_ratio_c, own, found):
    if own is not None and (own.lower, own.upper) == (config.lower, config.upper):
        own = config  # the same grids
    statistics = {
        grids: {weight: _of_no_tokens(replace(switches, token_weight=weight)) for weight in WEIGHTS}
        for grids, switches in {"config": config, "own": own}.items()
        if switches is not None and (grids == "config" or switches is not config)
    }
    newest = max(
        (int(tokens["version"].max()) for tokens in micro_batches if len(tokens.get("version", ()))), default=0
    )
    by_ratio, sums = _table(), torch.zeros(5, dtype=torch.float64)
    corrected = None
    if "rollout_is_weights" in micro_batches[0]:
        corrected = _of_no_tokens(replace(config, token_weight="uniform"))
    largest, squares = 0.0, torch.zeros(6, int(LOG_LIMIT / M2PO_STEP) + 2, dtype=torch.float64)
    for tokens in micro_batches:
        found.lengths.add(tokens.get("lengths"), tokens["advantages"])
        if "entropy" in tokens:
            found.entropy = found.entropy or Quantiles(ENTROPY_LIMIT)
        planes = [tokens[name] for name in ("old_log_prob", "log_prob", "advantages")]
        others = {name: tokens[name] for name in ("entropy", "version") if name in tokens}
        for first in range(0, len(planes[0]), CHUNK):
            part = slice(first, first + CHUNK)
            old, log_prob, advantages = (plane[part] for plane in planes)
            rows = [values.unsqueeze(0) for values in (old, log_prob, advantages, torch.ones_like(old))]
            for of_grids in statistics.values():
                for weight, sums_so_far in of_grids.items():
                    more = collect_clip_statistics(*rows, sums_so_far.config, clip_ratio_c)
                    of_grids[weight] = sums_so_far + more
            if corrected is not None:
                rows[2] = rows[2] * tokens["rollout_is_weights"][part]
                corrected += collect_clip_statistics(*rows, corrected.config, clip_ratio_c)
            log_ratio = log_ratio_of(old, log_prob)
            ratio, size, log_ratio = log_ratio.exp().double(), advantages.double().abs(), log_ratio.double()
            sign, counted = (advantages > 0).long(), size.sign()
            bucket = torch.bucketize(ratio, torch.tensor(EDGES, dtype=torch.float64)) + sign * (len(EDGES) + 1)
            planted = torch.stack([counted, size, size * ratio])
            by_ratio.index_add_(1, bucket, planted)
            sums += torch.stack(
                [
                    counted.new_tensor(len(ratio)),
                    (1 - counted).sum(),
                    *(x.sum() for x in (ratio, ratio**2, log_ratio**2)),
                ]
            )
            largest = max(largest, torch.where(advantages < 0, ratio, 0).max().item())

            # M2PO looks at tokens that move away from the sampler in the direction of their advantage.
            away = (sign * 2 - 1) * log_ratio > 0
            step = (log_ratio.abs() / M2PO_STEP).long()
            rows_of = torch.stack([counted, log_ratio**2 * counted, size * ratio]) * away
            for of_sign in (NEGATIVE, POSITIVE):
                squares[3 * of_sign : 3 * of_sign + 3].index_add_(1, step, rows_of * (sign == of_sign))

            box = torch.bucketize(ratio, torch.tensor(BOXES, dtype=torch.float64))
            chosen = counted > 0
            group = (sign * (len(BOXES) + 1) + box)[chosen]
            found.probability.add(old[chosen].exp(), group)
            if "entropy" in others:
                found.entropy.add(others["entropy"][part][chosen], group)
            if "version" in others:
                ages = int(tokens.get("trainer_version", newest)) - others["version"][part].long()
                for age in ages.unique().tolist():
                    table = found.by_age.setdefault(age, _table())
                    table.index_add_(1, bucket, planted * (ages == age))
    number = micro_batches[0].get("update")
    return Update(
        number=None if number is None else int(number),
        by_ratio=_by_sign(by_ratio),
        tokens=sums[0].item(),
        zero=sums[1].item(),
        ratio=sums[2].item(),
        ratio_squared=sums[3].item(),
        log_squared=sums[4].item(),
        largest_negative=largest,
        m2po=_masked_by_m2po(squares.view(2, 3, -1)),
        statistics=statistics["config"],
        own=None if own is None else statistics.get("own", statistics["config"]),
        corrected=corrected,
    )


def _of_no_tokens(config):
    return collect_clip_statistics(*[torch.zeros(1, 0)] * 4, config)


def _table():
    return torch.zeros(3, 2 * (len(EDGES) + 1), dtype=torch.float64)


def _by_sign(table):
    return table.view(3, 2, -1).permute(1, 2, 0)


def _masked_by_m2po(squares):
    # The largest (log r)^2 are masked until the mean of the others is at most the threshold.
    counts, values = squares[:, 0].sum(0).cumsum(0), squares[:, 1].sum(0).cumsum(0)
    keeps = (values <= M2PO_THRESHOLD * counts).long()
    kept = int(keeps.cumprod(0).sum())  # the mean grows with every step, so these are the first
    return squares[:, :, kept:].sum(2)[:, [0, 2]]


def search(statistics: list[ClipStatistics], config: BAPOConfig) -> dict[str, list[float]]:
    """The values of ``bapo.read_values`` for every update."""
    bounds = [search_clip_bounds(update, config) for update in statistics]
    values = [read_values(found, diagnose(update, found)) for update, found in zip(statistics, bounds, strict=True)]
    return {key: [value[key] for value in values] for key in values[0]}


def outcomes(found: dict[str, list[float]]) -> tuple[float, float, float]:
    """Shares of the updates in which the search stopped at once, on its way, and never."""
    stopped = [
        (steps > 0, out) for steps, out in zip(found["search_steps"], map(bool, found["saturated"]), strict=True)
    ]
    at_once, on_the_way = stopped.count((False, False)), stopped.count((True, False))
    return at_once / len(stopped), on_the_way / len(stopped), (len(stopped) - at_once - on_the_way) / len(stopped)
