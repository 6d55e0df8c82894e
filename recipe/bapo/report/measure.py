# SPDX-License-Identifier: Apache-2.0
"""Read a dump once and collect the sums from which ``facts`` computes the report. One update is in memory at a time.

The size of a token's gradient means ``r * |A|``: the gradient of the loss without clipping, with respect to the token's
log-prob. Add a sum here when the page needs a new number. What the report tells its reader is decided in ``facts`` and
``verdict``.
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

CHUNK = 1 << 14  # tokens to process at a time; these fit a CPU's cache
# The report judges staleness by what these bounds clip, whatever bounds the run used.
PPO_CLIP = partial(clipped, low=0.8, high=1.2)


@dataclass
class Measured:
    """The result of one pass over a dump.

    Attributes:
        statistics: the statistics of every update, in the order of the dump.
        sums: token sums by group, label and name. The group ``all`` has the label 0. The other groups exist if the
            dump has what they need: ``update`` is labelled by the number of the update within its rollout batch, from
            1, and ``age`` by the age of the weights that sampled the token, in versions.
        largest_negative: the largest ratio of a token with A < 0; 0 if there is none.
        without_gradient: ``(methods, 2)``, A > 0 before A < 0: the number of tokens to which a method gives no
            gradient.
        gradient_left: ``(methods, 2)``, A > 0 before A < 0: the sum of |gradient| that a method leaves.
    """

    statistics: list[ClipStatistics]
    sums: dict[str, dict[int, Counter]]
    largest_negative: float
    without_gradient: Tensor
    gradient_left: Tensor


def measure(folder: Path, config: BAPOConfig, clip_ratio_c: float, methods: list[Method]) -> Measured:
    """Read a dump once.

    Args:
        folder: the folder of the dump.
        config: the ranges of the bounds and the token weight. Every search in ``methods`` must have the same.
        clip_ratio_c: the run's dual clip.
        methods: the losses whose gradients are measured.

    Raises:
        ValueError: as in ``read_dump``, or the dump has no response token.
    """
    without_gradient, gradient_left = torch.zeros(2, len(methods), 2, dtype=torch.float64)
    measured = Measured([], defaultdict(lambda: defaultdict(Counter)), 0.0, without_gradient, gradient_left)
    for micro_batches in read_dump(folder):
        chunks = list(_chunks_of(micro_batches))
        if not chunks:  # all responses are masked, so the update changes nothing
            continue
        stats = empty_clip_statistics(config)
        for tokens, _ in chunks:
            stats += collect_clip_statistics(
                tokens.old_log_prob[None],
                tokens.log_prob[None],
                tokens.advantages[None],
                torch.ones_like(tokens.log_prob[None]),
                config,
                clip_ratio_c,
            )
        measured.statistics.append(stats)
        position = int(micro_batches[0].get("update", torch.zeros(1)))
        losses = [method.in_update(stats, position) for method in methods]
        for tokens, labels in chunks:
            _add_sums(measured, tokens, labels, losses)
    if not measured.statistics:
        raise ValueError(f"{folder} holds no response token: look at the masks of what was dumped.")
    return measured


def _chunks_of(micro_batches: list[dict[str, Tensor]]) -> Iterator[tuple[Tokens, dict[str, Tensor]]]:
    """Yield the micro-batches in chunks, with the label of each token by group (see ``Measured.sums``)."""
    for tensors in micro_batches:
        old, log_prob = tensors["old_log_prob"], tensors["log_prob"]
        of_response = torch.full_like(old, torch.nan)
        if "lengths" in tensors:
            lengths = tensors["lengths"].long()
            of_response = torch.segment_reduce(log_prob - old, "mean", lengths=lengths).repeat_interleave(lengths)
        labels = {"all": torch.zeros(1)}
        if "update" in tensors:
            labels["update"] = tensors["update"] + 1  # a dump counts from 0, the report from 1
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
    """Add a chunk's sums to ``measured``. ``losses`` return the factors of its tokens by method (see ``methods``)."""
    ratio, advantages = tokens.ratio.double(), tokens.advantages.double()
    positive, negative = signs = torch.stack([advantages > 0, advantages < 0]).double()
    size, above = ratio * advantages.abs(), negative * (ratio > UNBOUNDED_RATIO)
    factors = torch.stack([PPO_CLIP(tokens), *(loss(tokens) for loss in losses)])
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
