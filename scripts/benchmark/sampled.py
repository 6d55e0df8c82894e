# SPDX-License-Identifier: Apache-2.0
"""Would statistics of a part of the mini-batch's sequences choose the same bounds?

    .venv/bin/python -m scripts.benchmark.sampled DUMP [--merge 8]

For every update of the dumps (``actor.policy_loss.token_dump_dir``) the bounds are searched from all its sequences and
from a random half, quarter and eighth of them; the table says in which share of the updates both bounds agree, to one
step of their grids, by measure and target. ``--merge N`` takes N updates for one, as larger mini-batches would be.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch

from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.records.tokens import about_dump, read_dump

PARTS = (2, 4, 8)
MEASURES = (("value", "rollout_prob"), ("value", "uniform"), ("gradient", "rollout_prob"), ("gradient", "uniform"))


def sequences_of(update: list[dict]) -> list[tuple[torch.Tensor, ...]]:
    """Old log-probs, log-probs and advantages of every sequence of an update."""
    names = ("old_log_prob", "log_prob", "advantages")
    return [
        parts
        for tokens in update
        for parts in zip(*(tokens[name].split(tokens["lengths"].tolist()) for name in names), strict=True)
    ]


def bounds_of(
    sequences: list[tuple[torch.Tensor, ...]], config: BAPOConfig, clip_ratio_c: float
) -> tuple[float, float]:
    """The bounds that a search over these sequences finds."""
    rows = [torch.cat(parts)[None] for parts in zip(*sequences, strict=True)]
    bounds, _ = find_clip_bounds(*rows, torch.ones_like(rows[0]), config, clip_ratio_c=clip_ratio_c)
    return bounds.low.item(), bounds.high.item()


def agree(bounds: tuple[float, float], others: tuple[float, float], config: BAPOConfig) -> bool:
    """Whether both bounds are within one step of each other."""
    steps = (config.ratio_lower_step, config.ratio_upper_step)
    return all(abs(a - b) <= step + 1e-9 for a, b, step in zip(bounds, others, steps, strict=True))


def agreement(folder: Path, targets: list[float], merge: int = 1) -> dict[tuple, dict[int, float]]:
    """By measure, weight and target: for each part the share of the updates that agree."""
    clip_ratio_c = float(about_dump(folder)["clip_ratio_c"])
    generator = torch.Generator().manual_seed(1)
    configs = {
        (*measure, target): BAPOConfig(
            contribution=measure[0], token_weight=measure[1], positive_contribution_target=target
        )
        for measure in MEASURES
        for target in targets
    }
    agreed = {name: dict.fromkeys(PARTS, 0) for name in configs}
    updates = 0
    of_updates = map(sequences_of, read_dump(folder))
    while merged := list(islice(of_updates, merge)):
        updates += 1
        sequences = [sequence for update in merged for sequence in update]
        order = torch.randperm(len(sequences), generator=generator).tolist()
        for name, config in configs.items():
            whole = bounds_of(sequences, config, clip_ratio_c)
            for part in PARTS:
                sample = [sequences[index] for index in order[: len(sequences) // part]]
                agreed[name][part] += agree(whole, bounds_of(sample, config, clip_ratio_c), config)
    return {name: {part: count / updates for part, count in counts.items()} for name, counts in agreed.items()}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--targets", nargs="+", type=float, default=[0.35, 0.4, 0.45, 0.5])
    parser.add_argument("--merge", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    print("| measure, weight | target | half | quarter | eighth |\n|---|---|---|---|---|")
    for (measure, weight, target), shares in agreement(arguments.dump, arguments.targets, arguments.merge).items():
        cells = " | ".join(f"{shares[part]:.2f}" for part in PARTS)
        print(f"| {measure}, {weight} | {target:g} | {cells} |")


if __name__ == "__main__":
    main()
