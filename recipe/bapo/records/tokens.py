# SPDX-License-Identifier: Apache-2.0
"""The token dump: what the loss was called with, one safetensors file for each micro-batch and rank.

``write_dump`` is the one function that a trainer calls, ours or another (docs/clip_report.md has an example);
``read_dump`` yields a dump update by update, whoever wrote it. Scripts of other people read the names of the tensors
and of the metadata, so these names stay. To add a tensor, give ``write_dump`` an argument for it and add its name to
``OPTIONAL``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TENSORS = ("old_log_prob", "log_prob", "advantages")  # of each response token
OPTIONAL = ("entropy", "version", "rollout_is_weights")  # of each response token as well, where the run knows them

_written: dict[Path, int] = {}  # files of this process by folder


def write_dump(
    folder: str | Path,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    about: Mapping | None = None,
    entropy: Tensor | None = None,
    version: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    update: int | None = None,
    trainer_version: int | None = None,
) -> None:
    """Add a micro-batch's response tokens to a dump: 12 bytes a token, and 4 more for each optional tensor.

    Args:
        folder: of the dump, the same on all ranks; a process starts with one that holds no file of its rank.
        old_log_prob, log_prob, advantages, response_mask: what the loss is called with, ``(B, T)``.
        about: ``dp_size`` and ``global_batch_size``, the responses of one update over all ranks, by which a reader
            knows which micro-batches made an update; all ranks dump equally many. Without them the first call of every
            rank is an update, the second, and so on. By verl's names the run's ``loss_mode`` and what it is called
            with, for the report's row on the run itself: ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``
            (missing: no dual clip); of BAPO ``bound_scope`` and ``switches``, as JSON. What is None is left out.
        entropy, version, rollout_is_weights: of each token, ``(B, T)``: the policy's entropy in nats, the version of
            the weights that sampled it, verl's rollout correction; None: not known.
        update, trainer_version: number of the update within its rollout batch, from 0, and version of the weights
            before the first of these updates; None: not known.

    Raises:
        ValueError: the folder holds an earlier dump.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if folder not in _written:
        refuse_earlier(folder, f"rank{rank}-*.safetensors")
    number = _written[folder] = _written.get(folder, -1) + 1
    mask = response_mask.bool()
    planes = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "entropy": entropy,
        "version": version,
        "rollout_is_weights": rollout_is_weights,
    }
    tensors = {name: plane.detach()[mask].float().cpu() for name, plane in planes.items() if plane is not None}
    tensors["lengths"] = mask.sum(1, dtype=torch.int32).cpu()
    numbers = {"update": update, "trainer_version": trainer_version}
    tensors |= {name: torch.tensor([number]) for name, number in numbers.items() if number is not None}
    metadata = {key: str(value) for key, value in (about or {}).items() if value is not None}
    path = folder / f"rank{rank}-{number:06d}.safetensors"
    unfinished = path.with_suffix(".unfinished")  # the report may read while the run writes
    save_file(tensors, unfinished, metadata={"sequences": str(len(old_log_prob)), **metadata})
    unfinished.replace(path)


def refuse_earlier(folder: Path, pattern: str = "*.safetensors") -> None:
    """Raise a ValueError if the folder holds a dump: two runs in one would be read as one."""
    if any(folder.glob(pattern)):
        raise ValueError(f"token_dump_dir={folder} holds an earlier dump: remove it, or name another folder.")


def about_dump(folder: str | Path) -> dict[str, str]:
    """The metadata of a dump's first file; empty for a file that ``write_dump`` did not write.

    Raises:
        ValueError: as ``read_dump``.
    """
    return _read(_paths_of(folder)[0])[1]


def read_dump(folder: str | Path) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of all ranks update by update, as dicts of flat tensors.

    Only one update is in memory at a time. A file without the metadata of ``write_dump`` counts as one update.

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
    """For each update: this rank's micro-batches, the responses they hold, and the responses all ranks should hold."""
    update: list[dict[str, Tensor]] = []
    responses = 0
    for path in paths:
        tensors, metadata = _read(path)
        update.append(tensors)
        responses += int(metadata.get("sequences", 0))
        wanted = int(metadata.get("global_batch_size", 0))
        # An update whose dump was cut off has fewer responses and is left out.
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
    per_token = [*TENSORS, *(name for name in OPTIONAL if name in tensors)]
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
