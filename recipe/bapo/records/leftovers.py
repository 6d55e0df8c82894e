# SPDX-License-Identifier: Apache-2.0
"""What a run's processes leave outside its folder if they are killed: shared memory, and verl's sockets in ``/tmp``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SOCKETS = Path("/tmp")  # where verl puts the sockets over which weights go to vLLM, whatever TMPDIR is
SHARED_MEMORY = ("psm_", "verl_weights_")  # what Python's SharedMemory, as vLLM uses it, and verl name theirs


def leftovers(job: str | None, pids: Iterable[int]) -> set[Path]:
    """What a run would leave on this node.

    Args:
        job: its number in Ray; None: Ray was not up.
        pids: its processes on this node.
    """
    sockets = weight_sockets(job) if job else set()
    return shared_memory(pids) | orphaned_weights(sockets) | sockets


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory of vLLM's and verl's that these processes have mapped and that is still there."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()  # psutil's memory_maps() measures every page, in seconds
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}
    ours = {path for path in found if path.parent == Path("/dev/shm") and path.name.startswith(SHARED_MEMORY)}
    return {path for path in ours if path.exists()}


def weight_sockets(job: str) -> set[Path]:
    """The sockets over which weights are on their way from a job's workers to vLLM on this node, now."""
    return set(SOCKETS.glob(f"rl-colocate-zmq-{job}-*.sock"))


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


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def remove_on_every_node(timeout: float = 10.0) -> None:
    """Remove what this job would leave on the nodes of its cluster, waiting ``timeout`` seconds at most."""
    import ray  # the launcher needs what is above before there is a Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(Exception):  # a node is gone, say, or Ray is
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        task = ray.remote(num_cpus=0)(_remove_on_this_node)
        placed = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
        ray.wait([one.remote() for one in placed], num_returns=len(placed), timeout=timeout)


def _remove_on_this_node():
    import ray

    job, pids = ray.get_runtime_context().get_job_id(), []
    for process in psutil.Process().parent().children(recursive=True):  # of the node's raylet, which has other jobs too
        with suppress(psutil.Error):  # it has ended
            if process.environ().get("RAY_JOB_ID") == job:
                pids.append(process.pid)
    remove(leftovers(job, pids))
