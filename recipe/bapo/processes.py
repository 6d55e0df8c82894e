"""The processes of a run on this node, and what they would leave behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import ray

LONGEST = 30  # characters of a folder in which Ray's and vLLM's sockets still find room for their names


def processes() -> dict[int, str]:
    """The titles of this job's processes on this node by their ids; zombies count as gone."""
    raylet = os.environ.get("RAY_RAYLET_PID") or str(_raylet_of_this_process())
    marks = {f"RAY_RAYLET_PID={raylet}".encode(), f"RAY_JOB_ID={ray.get_runtime_context().get_job_id()}".encode()}
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if title:
                    found[int(folder.name)] = title
        except OSError:
            continue  # it has ended, or is another user's
    return found


def _raylet_of_this_process():
    node = ray._private.worker._global_node
    return node.all_processes["raylet"][0].process.pid if node is not None and "raylet" in node.all_processes else None


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory that these processes have mapped and that is still there."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    return {Path(name) for name in found if not name.endswith("(deleted)")}


def make_scratch() -> Path:
    """A folder for Ray's session, and for the sockets and locks that vLLM and verl would leave in ``/tmp``."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="bapo-", dir=parent if len(parent) <= LONGEST else "/tmp"))


def remove_scratch(folder: Path, keep_logs_in: Path | None) -> None:
    """Remove it; Ray's logs of a run that failed are kept."""
    logs = folder / "ray" / "session_latest" / "logs"
    if keep_logs_in is not None and logs.exists():
        shutil.copytree(logs, keep_logs_in, dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
    shutil.rmtree(folder, ignore_errors=True)
