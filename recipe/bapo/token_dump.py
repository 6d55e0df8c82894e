"""What the loss saw, token by token, for ``recipe.bapo.replay``: one safetensors file per call of the loss and rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TENSORS = ("old_log_prob", "log_prob", "advantages")


def write_dump(
    folder: str | Path,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    batch_info: dict,
) -> None:
    """Add a micro-batch to a dump: its response tokens alone, 12 bytes each. This copies to the host.

    Args:
        folder: of the dump.
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``.
        batch_info: verl's ``global_batch_info``, from which a reader knows which micro-batches made an update.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = folder / f"rank{rank}-{len(list(folder.glob(f'rank{rank}-*.safetensors'))):06d}.safetensors"
    mask = response_mask.bool()
    tensors = {
        name: tensor.detach()[mask].float().cpu().contiguous()
        for name, tensor in zip(TENSORS, (old_log_prob, log_prob, advantages), strict=True)
    }
    known = {key: str(batch_info[key]) for key in ("dp_size", "global_batch_size") if batch_info.get(key) is not None}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"sequences": str(len(old_log_prob)), **known})
    os.replace(unfinished, path)


def read_dump(folder: str | Path) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of all ranks, as dicts of flat tensors, update by update.

    Files of another origin need the three tensors of equal shape and, where they hold padding, ``response_mask``; a
    file without our metadata is an update of its own.

    Raises:
        ValueError: the folder holds no dump, or a file is unreadable, lacks a tensor or has unequal shapes.
    """
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"{folder} holds no .safetensors file: set actor_rollout_ref.actor.policy_loss.token_dump_dir."
        )
    ranks: dict[str, list[Path]] = {}
    for path in paths:
        ranks.setdefault(path.stem.partition("-")[0] if path.stem.startswith("rank") else "", []).append(path)
    for parts in zip(*(_updates_of_rank(of_rank) for of_rank in ranks.values()), strict=False):
        yield [micro_batch for part in parts for micro_batch in part]


def _updates_of_rank(paths: list[Path]) -> Iterator[list[dict[str, Tensor]]]:
    update: list[dict[str, Tensor]] = []
    sequences = 0
    for path in paths:
        tensors, metadata = _read(path)
        update.append(tensors)
        sequences += int(metadata.get("sequences", 0))
        # The share of this rank; an update that was cut off has fewer and is left out.
        if sequences * int(metadata.get("dp_size", 1)) >= int(metadata.get("global_batch_size", 0)):
            yield update
            update, sequences = [], 0


def _read(path):
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    missing = [name for name in TENSORS if name not in tensors]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it holds {', '.join(tensors) or 'nothing'}.")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in (*TENSORS, "response_mask")}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{path}: the shapes differ: {shapes}.")
    mask = tensors["response_mask"].bool() if "response_mask" in tensors else slice(None)
    return {name: tensors[name][mask].flatten() for name in TENSORS}, metadata
