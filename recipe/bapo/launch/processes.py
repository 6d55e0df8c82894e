"""The processes of a run on this node, and what they would leave behind."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.bapo.checks.other_runs import SOCKETS

LONGEST = 25  # characters of a folder in which the path of Ray's sockets stays below Unix's limit of 107
SHARED_MEMORY = ("psm_", "verl_weights_")  # what Python's SharedMemory, as vLLM uses it, and verl name theirs


def processes() -> dict[int, str]:
    """The titles of this job's processes on this node by their ids; zombies count as gone."""
    if not ray.is_initialized():  # what follows would start it
        return {}
    raylet = _raylet(ray._private.worker._global_node.raylet_socket_name)
    return _with_environment(f"RAY_RAYLET_PID={raylet}", f"RAY_JOB_ID={ray.get_runtime_context().get_job_id()}")


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


@lru_cache
def _raylet(socket_name):
    """The id of the raylet that listens there: ours, or the cluster's on this node."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"--raylet_socket_name={socket_name}".encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return folder.name
    raise RuntimeError(f"no raylet of this node listens on {socket_name}")


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory of vLLM's and verl's that these processes have mapped and that is still there."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}
    ours = {path for path in found if path.parent == Path("/dev/shm") and path.name.startswith(SHARED_MEMORY)}
    return {path for path in ours if path.exists()}


def weight_sockets() -> set[Path]:
    """The sockets over which weights are on their way from this job's workers to vLLM on this node, now."""
    if not ray.is_initialized():
        return set()
    return set(SOCKETS.glob(f"rl-colocate-zmq-{ray.get_runtime_context().get_job_id()}-*.sock"))


def orphaned_weights(sockets: Iterable[Path]) -> set[Path]:
    """verl's shared memory for weights on their way over these sockets that no process holds.

    Its worker was killed before vLLM had opened it, so that nobody's maps name it.
    """
    began = min((status.st_mtime for status in _status_of(sockets).values()), default=math.inf)
    weights = _status_of(Path("/dev/shm").glob("verl_weights_*"))
    since = {path for path, status in weights.items() if status.st_ctime >= began and status.st_uid == os.getuid()}
    return since - shared_memory(psutil.pids()) if since else since


def _status_of(paths):
    found = {}
    for path in paths:
        with suppress(OSError):  # it is gone
            found[path] = path.stat()
    return found


def leftovers() -> set[Path]:
    """What this job would leave on this node: named shared memory, and verl's sockets in ``/tmp``."""
    sockets = weight_sockets()
    return shared_memory(processes()) | orphaned_weights(sockets) | sockets


def remove_leftovers_elsewhere(timeout: float = 10.0) -> None:
    """Remove what this job would leave on the other nodes of its cluster, waiting ``timeout`` seconds at most."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    task = ray.remote(num_cpus=0)(remove_leftovers)
    placed = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in others]
    if placed:
        ray.wait([one.remote() for one in placed], num_returns=len(placed), timeout=timeout)


def remove_leftovers() -> None:
    """Remove what this job would leave on this node."""
    remove(leftovers())


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def descendants() -> list[psutil.Process]:
    """The processes that this one has started, and those that they have."""
    return psutil.Process().children(recursive=True)


def kill_children(scratch: Path, known: Iterable[psutil.Process] = (), patience: float = 10.0) -> None:
    """Kill what this process has started, and wait ``patience`` seconds at most for it to be gone.

    Args:
        scratch: the ``TMPDIR`` of all of them. Those that are being started while we look are found by it later; the
            title that Ray's agents take may overwrite it.
        known: those that were there before Ray was shut down: its agents outlive it by seconds.
    """
    until, empty = time.monotonic() + patience, 0
    while empty < 5 and time.monotonic() < until:
        found = {process.pid for process in known if _lives(process)} | set(_with_environment(f"TMPDIR={scratch}"))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        empty = 0 if found else empty + 1
        time.sleep(0.1)


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
