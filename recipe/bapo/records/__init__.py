# SPDX-License-Identifier: Apache-2.0
"""What a run writes in its folder and reads back, and the names of the files in the folder itself.

Other people's scripts read ``metrics.jsonl``. Every package of the recipe may import this one, which imports none of
them.
"""

import os
from pathlib import Path

METRICS = "metrics.jsonl"  # a line per step, by verl's file logger; recipe.bapo.records.metrics
LOG = "train.log"  # everything that verl, Ray and vLLM print
CONFIG = "config.yaml"  # the whole config that was used
ANSWERS = "validation"  # folder of the answers at each validation, where trainer.validation_data_dir names it
PICTURE = "dynamics.png"
STACKS = "stacks.txt"  # what each process of a run was doing that was ended because it would hang
RAY_LOGS = "ray_logs"  # folder of Ray's own logs of a run that failed


def keep_earlier(path: Path) -> Path:
    """``path``, free to be written: what an earlier start wrote there is kept as ``<name>.1.<ending>`` and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [other.suffixes[0][1:] for other in path.parent.glob(f"{path.stem}.*{path.suffix}")]
        last = max((int(number) for number in numbers if number.isdigit()), default=0)
        path.rename(path.with_suffix(f".{last + 1}{path.suffix}"))
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint in ``folder``, as verl finds it; None if there is none.

    Raises:
        ValueError: the checkpoint is named but not there; verl would silently start anew.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    number = tracker.read_text().strip()
    checkpoint = folder / f"global_step_{number}"
    if not checkpoint.is_dir():
        raise ValueError(
            f"{tracker} names the checkpoint {number!r}, which is not in {sorted(os.listdir(folder))}: write the "
            "number of a complete one into it, or remove it to start anew."
        )
    return checkpoint
