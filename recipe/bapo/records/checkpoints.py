# SPDX-License-Identifier: Apache-2.0
"""Where verl keeps a run's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def latest_checkpoint(folder: Path) -> Path | None:
    """The last complete one in ``folder``, as verl finds it.

    Raises:
        ValueError: it is named but not there; verl would start anew without a word.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    number = tracker.read_text().strip()
    found = folder / f"global_step_{number}"
    if not number.isdigit() or not found.is_dir():
        raise ValueError(
            f"{tracker} names the checkpoint {number!r}, which is not in {sorted(os.listdir(folder))}: write the "
            "number of a complete one into it, or remove it to start anew."
        )
    return found
