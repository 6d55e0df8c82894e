"""The processes of a run on this node, and what they would leave behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import ray

LONGEST = 30  # characters of a folder in which Ray's and vLLM's sockets still find room for their names


def processes() -> dict[int, str]:
    """The titles of this job's processes on this node by their ids; zombies count as gone."""
    if not ray.is_initialized():  # what follows would start it
        return {}
    raylet = os.environ.get("RAY_RAYLET_PID") or str(_raylet_of_this_process())
    return _with_environment(f"RAY_RAYLET_PID={raylet}", f"RAY_JOB_ID={ray.get_runtime_context().get_job_id()}")


def joins_a_cluster(config) -> bool:
    """Whether the run uses a Ray that is up already; otherwise it starts one of its own."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local") or config.trainer.nnodes > 1


def servers_of_other_runs() -> dict[int, str]:
    """vLLM's processes on this node of runs that started a Ray of their own, as we are about to do.

    Ray then numbers both jobs alike, and verl names the socket over which it sends weights to vLLM after that number.
    """
    found = _with_environment("RAY_JOB_ID=01000000")
    return {pid: title for pid, title in found.items() if title.startswith("VLLM::")}


def _with_environment(*marks):
    wanted, found = {mark.encode() for mark in marks}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
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


def leftovers() -> set[Path]:
    """What this job would leave on this node: named shared memory, and verl's sockets in ``/tmp``."""
    if not ray.is_initialized():
        return set()
    job = ray.get_runtime_context().get_job_id()
    return shared_memory(processes()) | set(Path("/tmp").glob(f"rl-colocate-zmq-{job}-*.sock"))


def kill_children(scratch: Path) -> None:
    """Kill what was started with ``scratch`` as its ``TMPDIR``: Ray's agents outlive their raylet by ten seconds."""
    for pid in _with_environment(f"TMPDIR={scratch}"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def make_scratch() -> Path:
    """A folder for Ray's session and, as ``TMPDIR``, for what this process's children would leave in ``/tmp``."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="bapo-", dir=parent if len(parent) <= LONGEST else "/tmp"))
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None  # None: look at the environment again
    return folder


def remove_scratch(folder: Path, keep_logs_in: Path | None) -> None:
    """Remove it; Ray's logs of a run that failed are kept."""
    os.environ["TMPDIR"], tempfile.tempdir = str(folder.parent), None
    logs = folder / "ray" / "session_latest" / "logs"
    if keep_logs_in is not None and logs.exists():
        with suppress(OSError):  # a full disk, say
            shutil.copytree(logs, keep_logs_in, dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
    shutil.rmtree(folder, ignore_errors=True)
