# SPDX-License-Identifier: Apache-2.0
"""The end of a run: all its processes are ended, and what they leave outside its folder is removed.

The parent of a run relies on it for this machine, ``main_bapo`` for the nodes of a cluster. The prefixes and places are
verl's and vLLM's: look at them with each new version. ``tests/stack/test_faults.py`` finds what is left.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SOCKETS = Path("/tmp")  # where verl puts the sockets over which weights go to vLLM, whatever TMPDIR is
# psm_: of Python's, which vLLM makes; verl_weights_: verl's.
SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|verl_weights_)\S+$", re.MULTILINE)


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, whatever session it is in."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of Linux's <sys/prctl.h>


def end_with_parent() -> None:
    """In a new child: have the kernel send it SIGINT if this process is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG


def descendants() -> dict[int, str]:
    """The command lines of the processes that this one has started, those that they have started, and so on, by id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found[process.pid] = " ".join(process.cmdline()).strip()
    return found


def kill_descendants(timeout: float = 10.0) -> None:
    """Kill the processes below this one, and wait ``timeout`` seconds at most until none is left.

    ``adopt_orphans`` has to have been called before. Python's resource trackers are spared for half of that time: each
    ends by itself once the processes that it serves are gone, and removes the shared memory and the semaphores that
    they have left.
    """
    began = time.monotonic()
    with suppress(ChildProcessError):  # there is no child left
        while time.monotonic() < began + timeout:
            spare_trackers = time.monotonic() < began + timeout / 2
            for pid, command in descendants().items():
                if not (spare_trackers and "multiprocessing.resource_tracker" in command):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.02)


def vllm_processes(job: str) -> dict[int, str]:
    """The titles, by process id, of the vLLM processes on this machine that belong to the job ``job`` of Ray."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            title = " ".join(process.cmdline()).strip()
            if title.startswith("VLLM::") and process.environ().get("VERL_RAY_JOB_ID") == job:
                found[process.pid] = title
    return found


def weight_sockets(job: str) -> set[Path]:
    """The sockets over which weights are on their way from a job's workers to vLLM on this node, now."""
    return set(SOCKETS.glob(f"rl-colocate-zmq-{job}-*.sock"))


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory of a run's that these processes have mapped and that nobody has removed."""
    mapped: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            # psutil's memory_maps() measures every page, which takes seconds.
            mapped.update(map(Path, SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())))
    return mapped


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def remove_on_every_node() -> None:
    """Remove what this job would leave on the nodes of its Ray, waiting 15 seconds at most."""
    import ray  # the launcher, which needs the functions above, runs without Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(Exception):  # a node is gone, say, or Ray is
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        task = ray.remote(num_cpus=0)(_remove_on_this_node)
        placed = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
        ray.wait([one.remote() for one in placed], num_returns=len(placed), timeout=15)


def _remove_on_this_node():
    import ray

    job, pids = ray.get_runtime_context().get_job_id(), []
    for process in psutil.Process().parent().children(recursive=True):  # of the node's raylet, which has other jobs too
        with suppress(psutil.Error):  # it has ended
            if process.environ().get("RAY_JOB_ID") == job:
                pids.append(process.pid)
    remove(shared_memory(pids) | weight_sockets(job))
