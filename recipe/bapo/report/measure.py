# SPDX-License-Identifier: Apache-2.0
"""One pass over a dump: of every update the sums from which ``facts`` follow. One update is in memory at a time.

The size of a token's gradient is ``r * |A|``, that of the loss without clipping with respect to the token's log-prob. A
sum is added here where the page has a new question; nothing here decides what a reader is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipStatistics, collect_clip_statistics, diagnose, read_values, search_clip_bounds
from recipe.bapo.records.tokens import read_dump
from recipe.bapo.report.methods import M2PO, Bounds, Loss, Tokens

DEFINITIONS = [(c, w) for c in ("value", "gradient") for w in ("rollout_prob", "uniform")]
CHUNK = 1 << 14  # tokens at a time: they fit a CPU's cache
POSITIVE, NEGATIVE = 0, 1  # first index of sums by sign
ABOVE = (1.0, 2.0, 3.0, 10.0)  # ratios on the unbounded side
GRPO = Bounds(0.8, 1.2)  # how stale tokens are is told by what these bounds clip, whatever the run's own
# Sums over tokens, of an update and of an age: numbers of tokens, and r*|A| of those with a sign and above a ratio.
COLUMNS = (
    "clipped_by_grpo",
    *("positive", "negative", "positive_gradient", "negative_gradient"),
    *(f"negative_above_{ratio:g}" for ratio in ABOVE),
    *(f"gradient_above_{ratio:g}" for ratio in ABOVE),
)


@dataclass
class Update:
    """What is measured of one update; sums over tokens, float64.

    Attributes:
        number: of the update within its rollout batch, from 0; None where the dump does not say.
        statistics: by the ranges and the token weight, as ``key_of`` says.
        corrected: those of the uniform weight with the weights of verl's rollout correction on the advantages; None
            where the dump has none.
        columns: ``(len(COLUMNS),)``.
        without_gradient: ``(methods, 2)``: by sign the number of tokens to which a method gives no gradient.
        gradient_left: ``(methods, 2)``: by sign the sum of |gradient| that a method leaves.
        tokens, log_squared: number of all tokens, and (log r)^2 over them.
        largest_negative: largest ratio of a token with A < 0; 0 without one.
    """

    number: int | None
    statistics: dict[tuple, ClipStatistics]
    corrected: ClipStatistics | None
    columns: Tensor
    without_gradient: Tensor
    gradient_left: Tensor
    tokens: int = 0
    log_squared: float = 0.0
    largest_negative: float = 0.0


@dataclass
class Measured:
    """What one pass over a dump finds.

    Attributes:
        updates: in the order of the dump.
        by_age: ``Update.columns`` by the weights' age in versions; empty where the dump does not say.
        statistics: for each definition those of every update over the ranges of ``measure``'s config.
    """

    updates: list[Update]
    by_age: dict[int, Tensor]
    statistics: dict[tuple[str, str], list[ClipStatistics]]


def key_of(config: BAPOConfig) -> tuple:
    """The switches that enter statistics: the ranges and the token weight."""
    return config.lower, config.upper, config.token_weight


def measure(
    folder: Path,
    config: BAPOConfig,
    clip_ratio_c: float | None,
    methods: dict[str, Loss | BAPOConfig | type[M2PO]] | None = None,
    watch: Callable[[Iterable], Iterable] = iter,
) -> Measured:
    """Read a dump once.

    Args:
        folder: of the dump.
        config: the ranges of the bounds.
        clip_ratio_c: the run's dual clip; None: none.
        methods: by name the losses whose gradients are measured. A ``BAPOConfig`` becomes the bounds that its search
            finds in each update, and ``M2PO`` its mask of each update.
        watch: passes the updates on as they are read, for a progress bar.

    Raises:
        ValueError: as ``read_dump``.
    """
    methods = methods or {}
    ranges = [replace(config, token_weight=weight) for weight in ("rollout_prob", "uniform")]
    searches = [method for method in methods.values() if isinstance(method, BAPOConfig)]
    distinct = {key_of(of): of for of in [*ranges, *searches]}
    updates: list[Update] = []
    by_age: dict[int, Tensor] = {}
    for micro_batches in watch(read_dump(folder)):
        chunks = list(_chunks_of(micro_batches))
        statistics = {key: _collect(chunks, of, clip_ratio_c) for key, of in distinct.items()}
        corrected = None
        if "rollout_is_weights" in micro_batches[0]:
            corrected = _collect(chunks, ranges[1], clip_ratio_c, corrected=True)
        losses = [_in_update(method, statistics, chunks, clip_ratio_c) for method in methods.values()]
        number = int(micro_batches[0]["update"]) if "update" in micro_batches[0] else None
        columns = torch.zeros(len(COLUMNS), dtype=torch.float64)
        without_gradient, gradient_left = torch.zeros(2, len(losses), 2, dtype=torch.float64)
        update = Update(number, statistics, corrected, columns, without_gradient, gradient_left)
        _add_sums(update, chunks, losses, by_age)
        updates.append(update)
    by_weight = {of.token_weight: [update.statistics[key_of(of)] for update in updates] for of in ranges}
    return Measured(updates, by_age, {(c, w): by_weight[w] for c, w in DEFINITIONS})


class _Chunk(NamedTuple):
    """A piece of a micro-batch: its tokens, and where the dump has them rollout correction's weights and the ages."""

    tokens: Tokens
    corrections: Tensor | None
    ages: Tensor | None


def _chunks_of(micro_batches: list[dict[str, Tensor]]) -> Iterator[_Chunk]:
    newest = max((int(m["version"].max()) for m in micro_batches if len(m.get("version", ()))), default=0)
    for tensors in micro_batches:
        old, log_prob = tensors["old_log_prob"], tensors["log_prob"]
        if "lengths" in tensors:
            lengths = tensors["lengths"].long()
            of_response = torch.segment_reduce(log_prob - old, "mean", lengths=lengths).repeat_interleave(lengths)
        else:
            of_response = torch.full_like(old, torch.nan)
        ages = None
        if "version" in tensors:
            ages = int(tensors.get("trainer_version", newest)) - tensors["version"].long()
        planes = [old, log_prob, tensors["advantages"], of_response, tensors.get("rollout_is_weights"), ages]
        for first in range(0, len(old), CHUNK):
            part = [None if plane is None else plane[first : first + CHUNK] for plane in planes]
            yield _Chunk(Tokens(*part[:4]), *part[4:])


def _collect(chunks, config, clip_ratio_c, corrected=False) -> ClipStatistics:
    empty = torch.zeros(1, 0)
    statistics = collect_clip_statistics(empty, empty, empty, empty, config, clip_ratio_c)
    for tokens, corrections, _ in chunks:
        advantages = tokens.advantages * corrections if corrected else tokens.advantages
        rows = [plane[None] for plane in (tokens.old_log_prob, tokens.log_prob, advantages)]
        statistics += collect_clip_statistics(*rows, torch.ones_like(rows[0]), config, clip_ratio_c)
    return statistics


def _in_update(method, statistics, chunks, clip_ratio_c) -> Loss:
    """A method as the loss that it is in one update."""
    if method is M2PO:
        return M2PO.of_update(replace(chunk.tokens) for chunk in chunks)
    if isinstance(method, BAPOConfig):
        bounds = search_clip_bounds(statistics[key_of(method)], method)
        return Bounds(bounds.low.item(), bounds.high.item(), clip_ratio_c or math.inf)
    return method


def _add_sums(update, chunks, losses, by_age) -> None:
    """Add the sums over ``chunks`` to those of their update and of their ages."""
    for chunk, _, ages in chunks:
        tokens = replace(chunk)  # a copy, because Tokens keep what the losses work out of them
        ratio, advantages = tokens.ratio.double(), tokens.advantages.double()
        signs = torch.stack([advantages > 0, advantages < 0]).double()
        size = ratio * advantages.abs()
        factors = torch.stack([loss.factor(tokens) for loss in (GRPO, *losses)])
        without = (factors == 0).double()
        above = signs[NEGATIVE] * (ratio > torch.tensor(ABOVE, dtype=torch.float64)[:, None])
        columns = torch.cat([without[:1] * signs.sum(0), signs, signs * size, above, above * size])

        update.tokens += len(ratio)
        update.log_squared += tokens.log_ratio.double().square().sum().item()
        update.largest_negative = max(update.largest_negative, (ratio * signs[NEGATIVE]).max().item())
        update.columns += columns.sum(1)
        update.without_gradient += without[1:] @ signs.T
        update.gradient_left += factors[1:].double() @ (signs * advantages.abs()).T
        if ages is not None:
            for age in ages.unique().tolist():
                by_age[age] = by_age.get(age, 0) + columns[:, ages == age].sum(1)


def search(statistics: list[ClipStatistics], config: BAPOConfig) -> dict[str, list[float]]:
    """The values of ``bapo.read_values`` for every update."""
    bounds = [search_clip_bounds(update, config) for update in statistics]
    values = [read_values(found, diagnose(update, found)) for update, found in zip(statistics, bounds, strict=True)]
    return {key: [value[key] for value in values] for key in values[0]}
