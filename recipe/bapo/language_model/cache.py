# SPDX-License-Identifier: Apache-2.0
"""Keep for later runs what one run has made, in a folder whose name has a hash of the code and settings that made it.

The folder is complete or absent: it is filled in a temporary folder beside its final place, and renamed once everything
is written. An interrupted process removes the temporary folder; what a killed process left is removed by the next one.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

MADE_BY = ("task.py", "source.py", "warm_up.py", "__main__.py")  # the code that decides what is in the folder
UNFINISHED = "unfinished-"


def folder_of(settings: dict) -> Path:
    """Return where the present code keeps what it makes with some settings, whether it exists or not."""
    code = [(Path(__file__).with_name(name)).read_text() for name in MADE_BY]
    key = hashlib.sha256(json.dumps([code, settings]).encode()).hexdigest()[:12]
    return Path(os.environ.get("BAPO_CACHE") or ".cache").absolute() / f"language_model-{key}"


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill the folder unless it exists. Of two processes that start at once, one waits for the other."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        for left in folder.parent.glob(f"{UNFINISHED}*"):  # left by a killed process, because we hold the lock
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            unfinished = Path(scratch) / folder.name
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
