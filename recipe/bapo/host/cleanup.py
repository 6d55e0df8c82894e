# SPDX-License-Identifier: Apache-2.0
"""End all processes of a run, and remove the files that they leave outside its folder.

The parent of a run does this on its machine, and the training process and the task runner on every node of Ray. verl
and vLLM choose the names and folders of these files, so check them with each new version.
``tests/stack/test_faults.py`` fails if something is left behind.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SOCKETS = Path("/tmp")  # verl sends weights to vLLM over sockets in this folder, whatever TMPDIR is
SHARED_MEMORY = Path("/dev/shm")


def adopt_orphans() -> None:
    """Adopt, from now on, every descendant whose parent ends, whatever session it is in."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of Linux's <sys/prctl.h>


def end_with_parent() -> None:
    """Have the kernel send this process SIGINT when its parent ends. Call this in a new child."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG


def descendants() -> dict[int, str]:
    """Return the command lines of all descendants of this process, by process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # raised if it has ended
            found[process.pid] = " ".join(process.cmdline()).strip()
    return found


def kill_descendants(timeout: float = 10.0) -> None:
    """Kill all descendants of this process, and wait until none is left, but at most ``timeout`` seconds.

    Call ``adopt_orphans`` first. Python's resource trackers are spared for half of that time. Each of them ends by
    itself once its processes are gone, and removes the shared memory and the semaphores that they left.
    """
    began = time.monotonic()
    with suppress(ChildProcessError):  # raised when no child is left
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
    """Return the titles of the vLLM processes on this machine that belong to Ray's job ``job``, by process id."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # raised if it has ended, or belongs to another user
            title = " ".join(process.cmdline()).strip()
            if title.startswith("VLLM::") and process.environ().get("VERL_RAY_JOB_ID") == job:
                found[process.pid] = title
    return found


def weight_sockets(job: str) -> set[Path]:
    """Find the sockets over which a job's workers are sending weights to vLLM on this node."""
    return set(SOCKETS.glob(f"rl-colocate-zmq-{job}-*.sock"))


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Find the named shared memory of a run that these processes have mapped and that nobody has removed."""
    # psm_: Python's names, for the shared memory that vLLM makes. verl_weights_: verl's.
    named = re.compile(rf"{re.escape(str(SHARED_MEMORY))}/(?:psm_|verl_weights_)\S+$", re.MULTILINE)
    mapped: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # raised if it has ended
            # psutil's memory_maps() measures every page, which takes seconds.
            mapped.update(map(Path, named.findall(Path(f"/proc/{pid}/maps").read_text())))
    return mapped


def weights() -> set[Path]:
    """List verl's shared memory for weights on this machine."""
    return set(SHARED_MEMORY.glob("verl_weights_*"))


def unmapped_weights(earlier: set[Path]) -> set[Path]:
    """Find verl's shared memory for weights that no process has mapped.

    A worker leaves it if it is killed before a vLLM process has mapped it, too. Call this when the run's processes have
    ended, and not on a cluster, where it could belong to another job.

    Args:
        earlier: what ``weights`` listed before the run; these are of other runs. verl never gives a name twice.
    """
    found = weights() - earlier
    return found - shared_memory(psutil.pids()) if found else found


def remove(paths: Iterable[Path]) -> None:
    """Remove these files, as far as they still exist."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def on_every_node(function: Callable, *arguments: Any) -> list:
    """Call a function on every node of Ray. Returns the answers that came within 15 seconds and are no errors."""
    import ray  # imported here, because the parent needs the functions above and runs without Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    task = ray.remote(num_cpus=0)(function)
    placed = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    done, _ = ray.wait([one.remote(*arguments) for one in placed], num_returns=len(placed), timeout=15)
    answers = []
    for one in done:
        with suppress(ray.exceptions.RayError):  # for example, the node is gone, or does not have this package
            answers.append(ray.get(one))
    return answers


def remove_on_every_node() -> None:
    """Remove the files that this job would leave on the nodes of Ray."""
    with suppress(Exception):  # for example, Ray is gone
        on_every_node(_remove_on_this_node)


def _remove_on_this_node():
    import ray

    job, pids = ray.get_runtime_context().get_job_id(), []
    # The parent is the node's raylet. It runs other jobs, too, so check the job of each process.
    for process in psutil.Process().parent().children(recursive=True):
        with suppress(psutil.Error):  # raised if it has ended
            if process.environ().get("RAY_JOB_ID") == job:
                pids.append(process.pid)
    remove(shared_memory(pids) | weight_sockets(job))
