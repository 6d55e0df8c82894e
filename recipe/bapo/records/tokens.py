# SPDX-License-Identifier: Apache-2.0
"""Write and read token dumps: the loss's arguments, in one safetensors file for each micro-batch and rank.

A trainer, ours or another, calls only ``write_dump`` (docs/clip_report.md has an example). ``read_dump`` yields any
dump update by update. Users' scripts rely on the names of tensors and metadata, so these names stay. To add a tensor,
give ``write_dump`` an argument for it and add its name to ``OPTIONAL``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TENSORS = ("old_log_prob", "log_prob", "advantages")  # one value for each response token
OPTIONAL = ("entropy", "version", "rollout_is_weights")  # the same, if the run knows them

_written: dict[Path, int] = {}  # by folder, the number of the last file that this process wrote


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
        folder: of the dump, the same on all ranks. It must not hold a file of this rank when the process starts.
        old_log_prob, log_prob, advantages, response_mask: the loss's arguments, ``(B, T)``.
        about: metadata; entries that are None are left out. ``dp_size`` and ``global_batch_size`` (the responses of one
            update over all ranks) tell a reader which micro-batches belong to one update; all ranks must dump the same
            number of responses. Without them the n-th calls of all ranks together count as one update.
            ``loss_mode`` and the loss's settings, under verl's names, give the report its row on the run itself:
            ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c`` (missing: no dual clip). For BAPO also
            ``bound_scope``, and ``switches``: the options as JSON.
        entropy, version, rollout_is_weights: for each token, ``(B, T)``: the policy's entropy in nats, the version of
            the weights that sampled it, verl's rollout correction. None: not known.
        update: number of the update within its rollout batch, from 0. None: not known.
        trainer_version: version of the weights before the first update on this rollout batch. None: not known.

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
    unfinished = path.with_suffix(".unfinished")  # so that a report that runs meanwhile skips it
    save_file(tensors, unfinished, metadata={"sequences": str(len(old_log_prob)), **metadata})
    unfinished.replace(path)


def refuse_earlier(folder: Path, pattern: str = "*.safetensors") -> None:
    """Raise a ValueError if the folder holds a dump, because two dumps in one folder would be read as one."""
    if any(folder.glob(pattern)):
        raise ValueError(f"token_dump_dir={folder} holds an earlier dump: remove it, or name another folder.")


def about_dump(folder: str | Path) -> dict[str, str]:
    """Return the metadata of a dump's first file. A file that ``write_dump`` did not write may have none.

    Raises:
        ValueError: as in ``read_dump``.
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
                f"{folder} holds {responses} sequences of update {updates}, but this update has {wanted}: put the "
                f"files of all ranks there (found: {', '.join(sorted(ranks))}). Each rank has to dump the same number "
                "of sequences."
            )
        updates += 1
        yield [micro_batch for micro_batches, _, _ in parts for micro_batch in micro_batches]
    if not updates:
        raise ValueError(f"{folder} holds no complete update yet: let the run finish one.")


def _paths_of(folder):
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors file: let a run dump its tokens there (docs/clip_report.md).")
    return paths


def _updates_of_rank(paths: list[Path]) -> Iterator[tuple[list[dict[str, Tensor]], int, int]]:
    """Yield for each update this rank's micro-batches, the number of their responses, and ``global_batch_size``.

    The last is the number of responses that all ranks should have together; 0: not known.
    """
    update: list[dict[str, Tensor]] = []
    responses = 0
    for path in paths:
        tensors, metadata = _read(path)
        update.append(tensors)
        responses += int(metadata.get("sequences", 0))
        wanted = int(metadata.get("global_batch_size", 0))
        # An update whose dump was cut off has fewer responses, so it is never yielded.
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
        raise ValueError(
            f"{path} needs the tensors {', '.join(TENSORS)}, and all tensors of its tokens in the same shape, but has "
            f"{shapes}."
        )
    tensors |= {name: tensors[name].float() for name in per_token}
    if "lengths" in tensors and tensors["lengths"].sum() != len(tensors["log_prob"]):
        raise ValueError(
            f"{path}: lengths add up to {tensors['lengths'].sum()}, not {len(tensors['log_prob'])} tokens."
        )
    unusable = [name for name in per_token if not torch.isfinite(tensors[name]).all()]
    if unusable:
        raise ValueError(f"{path} has non-finite values in {', '.join(unusable)}.")
    log_probs = torch.cat([tensors["old_log_prob"], tensors["log_prob"]])
    if log_probs.numel() and log_probs.min() >= 0 and log_probs.max() > 0:
        raise ValueError(
            f"{path}: no log-prob is below 0, and the largest is {log_probs.max():.3g}: was the sign dropped?"
        )
    return tensors, metadata
