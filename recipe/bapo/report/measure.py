# SPDX-License-Identifier: Apache-2.0
"""One pass over a dump: of every update the sums from which ``facts`` follow. One update is in memory at a time.

The size of a token's gradient is ``r * |A|``, that of the loss without clipping with respect to the token's log-prob. A
sum is added here where the page has a new question; nothing here decides what a reader is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
UNBOUNDED = ABOVE.index(3.0)
GRPO = Bounds(0.8, 1.2)  # how stale tokens are is told by what these bounds clip, whatever the run's own
# The columns of the tables by update and by age: sums over tokens.
COLUMNS = ("tokens", "clipped_by_grpo", "negative", "negative_above_3", "gradient", "gradient_above_3")


@dataclass
class Update:
    """Sums over the tokens of one update, float64.

    Attributes:
        number: of the update within its rollout batch, from 0; None where the dump does not say.
        tokens: number of all tokens.
        log_squared: of (log r)^2 over all tokens.
        largest_negative: largest ratio of a token with A < 0; 0 without one.
        by_sign: ``(2, 2)``: by sign the number of tokens and r*|A|.
        above: ``(len(ABOVE), 2)``: the same of tokens with A < 0 and a ratio above each of these.
        columns: ``(len(COLUMNS),)``.
        without_gradient: ``(methods, 2)``: by sign the number of tokens to which a method gives no gradient.
        gradient_left: ``(methods, 2)``: by sign the sum of |gradient| that a method leaves.
        statistics: by the ranges and the token weight, as ``key_of`` says.
        corrected: those of the uniform weight with the weights of verl's rollout correction on the advantages; None
            where the dump has none.
    """

    number: int | None
    tokens: int
    log_squared: Tensor
    largest_negative: float
    by_sign: Tensor
    above: Tensor
    columns: Tensor
    without_gradient: Tensor
    gradient_left: Tensor
    statistics: dict[tuple, ClipStatistics]
    corrected: ClipStatistics | None


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
    after_file: Callable[[], None] = lambda: None,
) -> Measured:
    """Read a dump once.

    Args:
        folder: of the dump.
        config: the ranges of the bounds.
        clip_ratio_c: the run's dual clip; None: none.
        methods: by name the losses whose gradients are measured. A ``BAPOConfig`` becomes the bounds that its search
            finds in each update, and ``M2PO`` its mask of each update.
        after_file: called after each file that was read.

    Raises:
        ValueError: as ``read_dump``.
    """
    methods = methods or {}
    ranges = [replace(config, token_weight=weight) for weight in ("rollout_prob", "uniform")]
    searches = [method for method in methods.values() if isinstance(method, BAPOConfig)]
    distinct = {key_of(of): of for of in [*ranges, *searches]}
    updates: list[Update] = []
    by_age: dict[int, Tensor] = {}
    for micro_batches in read_dump(folder, after_file):
        chunks = list(_chunks_of(micro_batches))
        statistics = {key: _collect(chunks, of, clip_ratio_c) for key, of in distinct.items()}
        corrected = None
        if "rollout_is_weights" in micro_batches[0]:
            corrected = _collect(chunks, ranges[1], clip_ratio_c, corrected=True)
        losses = [_in_update(method, statistics, chunks, clip_ratio_c) for method in methods.values()]
        number = micro_batches[0].get("update")
        updates.append(
            Update(
                number=None if number is None else int(number),
                statistics=statistics,
                corrected=corrected,
                **_sums_of(chunks, losses, by_age),
            )
        )
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


def _sums_of(chunks, losses, by_age) -> dict:
    """The other fields of ``Update``; adds to ``by_age``."""
    zeros = partial(torch.zeros, dtype=torch.float64)
    sums = {
        "log_squared": zeros(()),
        "by_sign": zeros(2, 2),
        "above": zeros(len(ABOVE), 2),
        "columns": zeros(len(COLUMNS)),
        "without_gradient": zeros(len(losses), 2),
        "gradient_left": zeros(len(losses), 2),
    }
    largest = 0.0
    for chunk, _, ages in chunks:
        tokens = replace(chunk)  # a copy, because Tokens keep what the losses work out of them
        ratio, advantages = tokens.ratio.double(), tokens.advantages.double()
        size = ratio * advantages.abs()
        signs = torch.stack([advantages > 0, advantages < 0]).double()
        counted, negative = signs.sum(0), signs[NEGATIVE]
        above = negative * (ratio > torch.tensor(ABOVE, dtype=torch.float64)[:, None])
        factors = torch.stack([loss.factor(tokens) for loss in (GRPO, *losses)])
        without = (factors == 0).double()
        unbounded = above[UNBOUNDED]
        columns = torch.stack([counted, counted * without[0], negative, unbounded, size, size * unbounded])

        largest = max(largest, (ratio * negative).max().item())
        sums["log_squared"] += tokens.log_ratio.double().square().sum()
        sums["by_sign"] += signs @ torch.stack([counted, size], dim=1)
        sums["above"] += above @ torch.stack([counted, size], dim=1)
        sums["columns"] += columns.sum(1)
        sums["without_gradient"] += without[1:] @ signs.T
        sums["gradient_left"] += factors[1:].double() @ (signs * advantages.abs()).T
        if ages is not None:
            for age in ages.unique().tolist():
                by_age[age] = by_age.get(age, 0) + columns[:, ages == age].sum(1)
    tokens_of_all = sum(len(tokens.advantages) for tokens, _, _ in chunks)
    return {"tokens": tokens_of_all, "largest_negative": largest, **sums}


def search(statistics: list[ClipStatistics], config: BAPOConfig) -> dict[str, list[float]]:
    """The values of ``bapo.read_values`` for every update."""
    bounds = [search_clip_bounds(update, config) for update in statistics]
    values = [read_values(found, diagnose(update, found)) for update, found in zip(statistics, bounds, strict=True)]
    return {key: [value[key] for value in values] for key in values[0]}
