# SPDX-License-Identifier: Apache-2.0
"""Keep two runs from mixing their weights or samples, and refuse a Ray address where no Ray answers.

verl puts Ray's job number into the names of its sockets, and always gives its queue the same name. So two runs on a
machine or a cluster would silently train on each other's data. The parent of a run claims its folder before it touches
anything there. Preflight looks for another run, then the training process claims the machine and the task runner claims
the cluster. Of two runs that start at the same moment at most one gets a claim, where the file system has locks.
"""

import fcntl
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from recipe.bapo.host.cleanup import SOCKETS, on_every_node, vllm_processes
from recipe.bapo.host.files import LOCK

FIRST_JOB = "01000000"  # every Ray gives its first job this number


def check_ray_address(address: str) -> None:
    """Check that something listens at a Ray address, because Ray itself would silently retry for two minutes.

    Args:
        address: the value of ``RAY_ADDRESS``: ``HOST:PORT``, perhaps with a scheme. A value that names no host ("",
            "local", "auto") is not checked.

    Raises:
        ValueError: it is not such an address, or nothing listens there.
    """
    if address in ("", "local", "auto"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if not host or not port.isdecimal():
            raise ValueError("it is not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"RAY_ADDRESS={address} does not answer ({error}): start Ray there (ray start --head), give the "
            "HOST:PORT of a Ray that is up, or unset RAY_ADDRESS to train on this machine alone."
        ) from error


def claim_folder(run_dir: Path) -> IO[str]:
    """Claim a run's folder, which is made if it is not there, until the returned file is closed.

    A second start in it would rename the first one's log and metrics, and the first one's watchdog would then see no
    more steps and end it. The claim is a lock on the file ``run.lock`` and not on the folder, because NFS locks only
    what is open for writing. It is released when the process ends. Where files cannot be locked, there is no claim.

    Raises:
        ValueError: another run has the folder.
        OSError: the folder cannot be made or written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    claim = open(run_dir / LOCK, "a")
    if not _lock(claim):
        claim.close()
        raise ValueError("another run has this folder: wait until it has ended, or name another OUTPUT_DIR")
    return claim


def claim_machine() -> int:
    """Claim this machine for a run that starts its own Ray, until the returned descriptor is closed.

    Two such runs have the same job number in their Rays. verl sends weights to vLLM over a socket in ``/tmp`` whose
    name contains that number, so each run might receive the other's weights. The claim is a lock on that folder: it
    leaves no file, it is released when the process ends, and it holds between containers exactly if they share the
    folder. A run that was started with verl's own entry point claims nothing, but we find it by its vLLM servers.

    Raises:
        ValueError: another run is on the machine.
    """
    claim = os.open(SOCKETS, os.O_RDONLY)
    servers = vllm_processes(FIRST_JOB)
    if _lock(claim) and not servers:
        return claim
    os.close(claim)
    raise _other_run("on this machine", servers)


def _lock(file: IO[str] | int) -> bool:
    """Lock an open file or folder. Returns False if another process has it, and True where files cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # for example, Lustre is mounted without flock
        pass
    return True


def _other_run(where: str, servers: Mapping[int, str]) -> ValueError:
    which = "".join(f" (process {pid}, {title})" for pid, title in list(servers.items())[:1])
    return ValueError(
        f"another run is {where}{which}, and verl would send both runs' weights over one socket in {SOCKETS}: wait "
        "until it has ended, or give each run its own /tmp: scripts/apart.sh, or a container."
    )


class _Claim:
    """An actor that only holds a name."""


def claim_cluster():
    """Claim a Ray cluster for this job, until the returned handle or the job ends.

    verl's TransferQueue has one controller in a cluster, found by its name. A second job would connect to it, add its
    samples to those of the first job, and train on both. On its nodes may also be a run with a Ray of its own, in which
    it has the same job number as this job has here.

    Raises:
        ValueError: another verl run is on the cluster, or on one of its nodes.
    """
    import ray  # imported here, because the checks need the functions above and run without Ray

    for servers in on_every_node(vllm_processes, ray.get_runtime_context().get_job_id()):
        if servers:
            raise _other_run("on a node of this Ray cluster", servers)
    until = time.monotonic() + 20  # a job that has just ended keeps the names for some seconds
    while True:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:  # no other run has a controller
            with suppress(ValueError):  # raised if another run has just taken the name
                return ray.remote(num_cpus=0)(_Claim).options(name="bapo", namespace="transfer_queue").remote()
        if time.monotonic() > until:
            raise ValueError(
                "another verl run is on this Ray cluster, and verl would mix the samples of both, because its "
                "TransferQueue has one queue per cluster. Wait until that run has ended, or give each run its own "
                "cluster."
            )
        time.sleep(1)
