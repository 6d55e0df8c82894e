# SPDX-License-Identifier: Apache-2.0
"""Records of runs on random tokens."""

from dataclasses import asdict
from typing import NamedTuple

import torch

from bapo import (
    BAPOConfig,
    ClipStatistics,
    TokenSums,
    collect_clip_statistics,
    diagnose,
    read_scalars,
    search_clip_bounds,
)
from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.record import Record, read_start

OWN_CLIP = OwnClip("clip", 0.8, 1.2, 3.0)


class Update(NamedTuple):
    """An update in a record: what ``recipe.bapo.hook.record.Updates`` has of one update."""

    numbers: dict
    values: dict
    stats: ClipStatistics


def read_updates(path):
    """Return the updates in a record one by one."""
    start = read_start(path)
    return [
        Update(numbers, values, ClipStatistics(TokenSums(*(part[k] for part in some.stats.sums)), some.stats.config))
        for some in (start.updates() if start else ())
        for k, (numbers, values) in enumerate(zip(some.numbers, some.values, strict=True))
    ]


def make_tokens(seed, rows=8, columns=12, spread=0.5):
    """Make old log-probs, log-probs, advantages and mask, ``(rows, columns)``."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=generator)
    log_prob = old + spread * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, columns)
    return old, log_prob, advantages, torch.rand(rows, columns, generator=generator) > 0.3


def measure(batch, config, own_clip=OWN_CLIP):
    """Return statistics and values of an update, as the monitor does."""
    stats = collect_clip_statistics(*batch, config, clip_ratio_c=3.0, own_clip=own_clip)
    bounds = search_clip_bounds(stats, config)
    own = {"entropy_covariance": stats.own_entropy_sums.covariance} if own_clip else {}
    values = read_scalars(vars(bounds) | vars(diagnose(stats, bounds)) | own)
    invalid = values.pop("invalid_log_probs") + values.pop("invalid_advantages")
    return stats, {"invalid_tokens": invalid} if invalid else values | {"invalid_tokens": 0.0}


def write_start(folder, steps, seed=0, config=None, own_clip=OWN_CLIP, applied=False, updates=2, costs=(), **about):
    """Record a start of a process that makes these steps, on random tokens. Returns the file and the batches.

    ``costs`` has a pair for each update of a step: ``extra_forward`` and ``redone``.
    """
    config = config or BAPOConfig()
    own = None if own_clip is None else asdict(own_clip)
    known = {"applied": applied, "loss_mode": "bapo" if applied else "vanilla", "own_clip": own, **about}
    record, batches = Record(folder, config, known), []
    for call, step in enumerate(steps):
        for update in range(updates):
            batches.append(make_tokens(1000 * seed + 10 * call + update, spread=0.5 * update))
            stats, values = measure(batches[-1], config, own_clip)
            if costs:
                values |= dict(zip(("extra_forward", "redone"), costs[update], strict=True))
            record.write(stats, values, call=call, update=update, step=step)
    return record.path, batches
