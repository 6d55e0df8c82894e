# SPDX-License-Identifier: Apache-2.0
"""Keeps two runs from mixing their weights or their samples, and a run from a Ray cluster that is not there.

verl names its sockets after Ray's job number and its queue after nothing, so that two runs on a machine or a cluster
would silently train on each other's data. The checks look before the start, ``main_bapo`` claims the machine
and its task runner the cluster: whoever changes a claim has to keep that of two runs that start at once one gets it.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress

from recipe.bapo.launch.cleanup import SOCKETS, vllm_processes

FIRST_JOB = "01000000"  # the number of the first job of every Ray


def joins_a_cluster(config) -> bool:
    """Whether the run uses a Ray that is up already; otherwise it starts one of its own."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local") or config.trainer.nnodes > 1


def check_ray_address(address: str) -> None:
    """Connect to a Ray address; Ray itself would silently try for two minutes.

    Args:
        address: as in ``RAY_ADDRESS``: ``HOST:PORT``, also with a scheme; what names no host is left to Ray.

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
            f"RAY_ADDRESS={address} does not answer ({error}): start Ray there (scripts/cluster/ray.sh head), give the "
            "HOST:PORT of a Ray that is up, or unset RAY_ADDRESS to train on this machine alone."
        ) from error


def claim_machine() -> int:
    """Claim this machine for a run with a Ray of its own, until the returned descriptor is closed.

    Ray numbers the jobs of two such runs alike, and verl names the socket in ``/tmp`` over which it sends weights to
    vLLM after that number: each run might get the other's weights. The claim is a lock on that folder, which leaves no
    file, goes with the process, and holds between containers exactly if they share the folder. A run of verl's own
    entry point claims nothing, but its vLLM servers are seen.

    Raises:
        ValueError: another run is on the machine.
    """
    claim = os.open(SOCKETS, os.O_RDONLY)
    servers = vllm_processes(FIRST_JOB)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not servers:
            return claim
    except OSError:  # another run has the lock
        pass
    os.close(claim)
    which = "".join(f" (process {pid}, {title})" for pid, title in list(servers.items())[:1])
    raise ValueError(
        f"another run is on this machine{which}, and verl would send both runs' weights over one socket in {SOCKETS}: "
        "wait for its end, or give each run a /tmp of its own: scripts/apart.sh, or a container."
    )


class _Claim:
    """An actor that does nothing but have a name."""


def claim_cluster():
    """Claim a Ray cluster for this job, until the returned handle or the job ends.

    verl's TransferQueue has one controller a cluster, by name: a second job would connect to it, put its samples to
    those of the first and train on both.

    Raises:
        ValueError: another verl run is on the cluster.
    """
    import ray  # the checks, which need the functions above, can do without

    until = time.monotonic() + 20  # a job that has just ended keeps the names for some seconds
    while True:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:  # there is none
            with suppress(ValueError):  # the name is taken
                return ray.remote(num_cpus=0)(_Claim).options(name="bapo", namespace="transfer_queue").remote()
        if time.monotonic() > until:
            raise ValueError(
                "another verl run is on this Ray cluster, and verl would mix the samples of both: its TransferQueue "
                "has one queue a cluster. Wait for that run's end, or give each run a cluster of its own."
            )
        time.sleep(1)
