# SPDX-License-Identifier: Apache-2.0
"""What a run's processes leave outside its folder if they are killed: shared memory, and verl's sockets in ``/tmp``.

Python's resource trackers remove most of the shared memory (``process_tree.end_below``). Ray kills some of them with
its workers: the watchdog therefore notes what vLLM's servers hold, and at the end of training a task on every node, and
at the end of the run the supervisor on its own, remove what the job's processes hold. Names and places are verl's and
vLLM's: look at them with each new version.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SOCKETS = Path("/tmp")  # where verl puts the sockets over which weights go to vLLM, whatever TMPDIR is
SHARED_MEMORY = ("psm_", "verl_weights_")  # prefixes of Python's SharedMemory, which vLLM uses, and of verl's


def weight_sockets(job: str) -> set[Path]:
    """The sockets over which weights are on their way from a job's workers to vLLM on this node, now."""
    return set(SOCKETS.glob(f"rl-colocate-zmq-{job}-*.sock"))


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory of vLLM's and verl's that these processes have mapped and that is still there."""
    mapped = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            # psutil's memory_maps() measures every page, which takes seconds.
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    ours = {path for path in mapped if path.parent == Path("/dev/shm") and path.name.startswith(SHARED_MEMORY)}
    return {path for path in ours if path.exists()}


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def remove_on_every_node(timeout: float = 30.0) -> None:
    """Remove what this job would leave on the nodes of its Ray, waiting ``timeout`` seconds at most."""
    import ray  # the launcher, which needs the functions above, runs without Ray
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
    remove(shared_memory(pids) | weight_sockets(job))
