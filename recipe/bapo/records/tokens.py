# SPDX-License-Identifier: Apache-2.0
"""What the loss saw, token by token, for ``recipe.bapo.report``: one safetensors file per micro-batch and rank.

``write_dump`` is the one function that a trainer calls, ours and any other (docs/clip_report.md has an example). The
names of tensors and metadata are read by others and stay; ``recipe.bapo.report.dump`` reads them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

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
    """Add a micro-batch's response tokens to a dump, 12 bytes each and 4 for each further tensor, by way of the host.

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
