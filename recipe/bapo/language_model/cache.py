# SPDX-License-Identifier: Apache-2.0
"""Keep for later runs what one run has made, in a folder whose name has a hash of the code that made it.

The folder is complete or absent: it is filled in a temporary folder beside its final place, and renamed once everything
is written. An interrupted process removes the temporary folder; what a killed process left is removed by the next one.
Once a folder is made, those that other code made of the same kind and settings are removed.
"""

import ast
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

MADE_BY = ("task.py", "source.py", "warm_up.py", "__main__.py")  # the code that decides what is in the folder
UNFINISHED = "unfinished-"


def folder_of(name: str, settings: dict) -> Path:
    """Return where the present code keeps what it makes with some settings, whether it exists or not."""
    code = [without_comments((Path(__file__).with_name(file)).read_text()) for file in MADE_BY]
    kind = f"{name}_{_hash(settings)}" if settings else name
    return Path(os.environ.get("BAPO_CACHE") or ".cache").absolute() / f"{kind}-{_hash(code)}"


def _hash(content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def without_comments(code: str) -> str:
    """Return Python code without its comments, docstrings and layout."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill the folder unless it exists, and remove its predecessors.

    Of two processes that start at once, one waits for the other.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Waiting for another start, which is making {folder}.", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        if folder.exists():
            return
        for left in folder.parent.glob(f"{UNFINISHED}*"):  # by a killed process, because we hold the lock
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            unfinished = Path(scratch) / folder.name
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
        for earlier in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
            if earlier != folder:
                shutil.rmtree(earlier)
    finally:
        lock.release()
