# SPDX-License-Identifier: Apache-2.0
"""One pass over a dump: the sums from which ``facts`` follow. One update is in memory at a time.

The size of a token's gradient is ``r * |A|``, that of the loss without clipping with respect to the token's log-prob. A
sum is added here where the page has a new question; nothing here decides what a reader is told.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bapo import BAPOConfig, ClipStatistics, collect_clip_statistics, empty_clip_statistics
from bapo.clip_statistics import UNBOUNDED_RATIO
from recipe.bapo.records.tokens import read_dump
from recipe.bapo.report.methods import Method, Tokens, clipped

CHUNK = 1 << 14  # tokens at a time: they fit a CPU's cache
# How stale tokens are is told by what these bounds clip, whatever the run's own.
PPO_CLIP = partial(clipped, low=0.8, high=1.2)


@dataclass
class Measured:
    """What one pass over a dump finds; sums over tokens, by sign with A > 0 first.

    Attributes:
        statistics: of every update, in the order of the dump.
        sums: by name those over all tokens (group ``all``, label 0), over the tokens of an update's number in its
            rollout batch (``update``) and of an age of the weights in versions (``age``), where the dump says them.
        largest_negative: largest ratio of a token with A < 0; 0 without one.
        without_gradient: ``(methods, 2)``: the number of tokens to which a method gives no gradient.
        gradient_left: ``(methods, 2)``: the sum of |gradient| that a method leaves.
    """

    statistics: list[ClipStatistics]
    sums: dict[str, dict[int, Counter]]
    largest_negative: float
    without_gradient: Tensor
    gradient_left: Tensor


def measure(folder: Path, config: BAPOConfig, clip_ratio_c: float, methods: list[Method]) -> Measured:
    """Read a dump once.

    Args:
        folder, clip_ratio_c: of the dump, and the run's dual clip.
        config: the ranges of the bounds and the token weight, which are those of every search in ``methods``.
        methods: the losses whose gradients are measured.

    Raises:
        ValueError: as ``read_dump``, or no token counts.
    """
    without_gradient, gradient_left = torch.zeros(2, len(methods), 2, dtype=torch.float64)
    measured = Measured([], defaultdict(lambda: defaultdict(Counter)), 0.0, without_gradient, gradient_left)
    for micro_batches in read_dump(folder):
        chunks = list(_chunks_of(micro_batches))
        if not chunks:  # every response is masked: such an update changes nothing
            continue
        stats = empty_clip_statistics(config)
        for tokens, _ in chunks:
            rows = [plane[None] for plane in (tokens.old_log_prob, tokens.log_prob, tokens.advantages)]
            stats += collect_clip_statistics(*rows, torch.ones_like(rows[0]), config, clip_ratio_c)
        measured.statistics.append(stats)
        position = int(micro_batches[0].get("update", torch.zeros(1)))
        losses = [method.in_update(stats, position) for method in methods]
        for tokens, labels in chunks:
            _add_sums(measured, tokens, labels, losses)
    if not measured.statistics:
        raise ValueError(f"{folder} holds no response token: look at the masks of what was dumped.")
    return measured


def _chunks_of(micro_batches: list[dict[str, Tensor]]) -> Iterator[tuple[Tokens, dict[str, Tensor]]]:
    """Pieces of the micro-batches, and the labels of their tokens by group (``Measured.sums``)."""
    for tensors in micro_batches:
        old, log_prob = tensors["old_log_prob"], tensors["log_prob"]
        of_response = torch.full_like(old, torch.nan)
        if "lengths" in tensors:
            lengths = tensors["lengths"].long()
            of_response = torch.segment_reduce(log_prob - old, "mean", lengths=lengths).repeat_interleave(lengths)
        labels = {"all": torch.zeros(1)}
        if "update" in tensors:
            labels["update"] = tensors["update"] + 1  # a dump counts from 0, a reader from 1
        if "version" in tensors and "trainer_version" in tensors:
            labels["age"] = tensors["trainer_version"] - tensors["version"]
        labels = {group: label.expand(len(old)) for group, label in labels.items()}
        for first in range(0, len(old), CHUNK):
            part = slice(first, first + CHUNK)
            tokens = Tokens(old[part], log_prob[part], tensors["advantages"][part], of_response[part])
            yield tokens, {group: label[part] for group, label in labels.items()}


def _add_sums(
    measured: Measured, tokens: Tokens, labels: dict[str, Tensor], losses: list[Callable[[Tokens], Tensor]]
) -> None:
    ratio, advantages = tokens.ratio.double(), tokens.advantages.double()
    positive, negative = signs = torch.stack([advantages > 0, advantages < 0]).double()
    size, above = ratio * advantages.abs(), negative * (ratio > UNBOUNDED_RATIO)
    factors = torch.stack([loss(tokens) for loss in (PPO_CLIP, *losses)])
    without = (factors == 0).double()
    columns = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "positive": positive,
        "negative": negative,
        "clipped_by_grpo": without[0] * (positive + negative),
        "negative_above_3": above,
        "positive_gradient": positive * size,
        "negative_gradient": negative * size,
        "gradient_above_3": above * size,
    }
    for group, label in labels.items():
        for value in label.unique().tolist():
            sums = torch.stack(list(columns.values())) @ (label == value).double()
            measured.sums[group][int(value)].update(dict(zip(columns, sums.tolist(), strict=True)))
    measured.largest_negative = max(measured.largest_negative, (ratio * negative).max().item())
    measured.without_gradient += without[1:] @ signs.T
    measured.gradient_left += factors[1:].double() @ (signs * advantages.abs()).T
