# SPDX-License-Identifier: Apache-2.0
"""Reads a dump of tokens update by update, whoever wrote it; ``recipe.bapo.records.tokens`` writes ours.

A new tensor is added to ``PLANES``, where it may be missing.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

TENSORS = ("old_log_prob", "log_prob", "advantages")
PLANES = ("entropy", "version", "rollout_is_weights")  # of each token too, where there are any


def about_dump(folder: str | Path) -> dict[str, str]:
    """What the first file of a dump says about its run; empty for files of another origin.

    Raises:
        ValueError: as ``read_dump``.
    """
    return _read(_paths_of(folder)[0])[1]


def read_dump(folder: str | Path) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of all ranks, as dicts of flat tensors, update by update: one update is in memory.

    A file without our metadata is an update of its own.

    Raises:
        ValueError: the folder holds no dump or no whole update, a rank's files are missing, ranks dumped unequal
            numbers of responses, or a file is unreadable, lacks a tensor, or has unequal shapes or non-finite values.
    """
    ranks: dict[str, list[Path]] = {}
    for path in _paths_of(folder):
        ranks.setdefault(path.stem.partition("-")[0] if path.stem.startswith("rank") else "", []).append(path)
    updates = 0
    for parts in zip(*map(_updates_of_rank, ranks.values()), strict=False):
        wanted = parts[0][2]
        responses = sum(responses for _, responses, _ in parts)
        if responses != wanted and wanted:
            raise ValueError(
                f"{folder} holds {responses} sequences of update {updates}, which has {wanted}: bring the files of all "
                f"ranks together (here: {', '.join(sorted(ranks))}), of which each has to dump equally many."
            )
        updates += 1
        yield [micro_batch for micro_batches, _, _ in parts for micro_batch in micro_batches]
    if not updates:
        raise ValueError(f"{folder} holds no whole update yet: let the run make one.")


def _paths_of(folder):
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors file: let a run dump its tokens there (docs/clip_report.md).")
    return paths


def _updates_of_rank(paths: list[Path]) -> Iterator[tuple[list[dict[str, Tensor]], int, int]]:
    """Of each update this rank's micro-batches, how many responses they hold and how many all ranks should."""
    update: list[dict[str, Tensor]] = []
    responses = 0
    for path in paths:
        tensors, metadata = _read(path)
        update.append(tensors)
        responses += int(metadata.get("sequences", 0))
        wanted = int(metadata.get("global_batch_size", 0))
        # An update that was cut off has fewer and is left out.
        if responses * int(metadata.get("dp_size", 1)) >= wanted:
            yield update, responses, wanted
            update, responses = [], 0


def _read(path):
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    per_token = [*TENSORS, *(name for name in PLANES if name in tensors)]
    shapes = {name: tuple(tensors[name].shape) if name in tensors else None for name in per_token}
    if None in shapes.values() or len(set(shapes.values())) > 1:
        raise ValueError(f"{path} needs {', '.join(TENSORS)}, in one shape with what else a token has: {shapes}.")
    tensors |= {name: tensors[name].float() for name in per_token}
    if "lengths" in tensors and tensors["lengths"].sum() != len(tensors["log_prob"]):
        raise ValueError(
            f"{path}: lengths add up to {tensors['lengths'].sum()}, not {len(tensors['log_prob'])} tokens."
        )
    unusable = [name for name in per_token if not torch.isfinite(tensors[name]).all()]
    if unusable:
        raise ValueError(f"Non-finite values in {', '.join(unusable)} of {path}.")
    return tensors, metadata
