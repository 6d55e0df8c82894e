# SPDX-License-Identifier: Apache-2.0
"""Where verl keeps a run's checkpoints.

The layout is verl's (``latest_checkpointed_iteration.txt``, ``global_step_N``). The launcher names the last checkpoint
after a failure, and the checks look into it before a run goes on.
"""

from __future__ import annotations

import os
from pathlib import Path


def latest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint in ``folder``, as verl finds it; None if there is none.

    Raises:
        ValueError: the checkpoint is named but not there; verl would start anew without a word.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    number = tracker.read_text().strip()
    checkpoint = folder / f"global_step_{number}"
    if not number.isdigit() or not checkpoint.is_dir():
        raise ValueError(
            f"{tracker} names the checkpoint {number!r}, which is not in {sorted(os.listdir(folder))}: write the "
            "number of a complete one into it, or remove it to start anew."
        )
    return checkpoint
