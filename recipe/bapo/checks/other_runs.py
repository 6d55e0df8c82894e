# SPDX-License-Identifier: Apache-2.0
"""Other runs on this machine, which would get this run's weights."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

import psutil
import ray

from recipe.bapo.records.leftovers import SOCKETS

WAYS_OUT = f"wait for its end, or give each run a {SOCKETS} of its own: scripts/apart.sh, or a container."
FIRST_JOB = "01000000"  # the number of the first job of every Ray


def joins_a_cluster(config) -> bool:
    """Whether the run uses a Ray that is up already; otherwise it starts one of its own."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local") or config.trainer.nnodes > 1


def check_other_runs(config) -> str:
    """No run beside us whose vLLM servers might get our weights."""
    if joins_a_cluster(config):
        return "this run is a job of a Ray cluster"
    claim, others = claim_machine(), servers_of_other_runs()
    if claim is None or others:
        which = f" (process {min(others)}, {others[min(others)]})" if others else ""
        raise ValueError(
            f"another run is on this machine{which}, and verl would send both runs' weights over one socket in "
            f"{SOCKETS}: {WAYS_OUT}"
        )
    os.close(claim)
    return "none on this machine"


def claim_machine() -> int | None:
    """Claim this machine for a run with a Ray of its own, until the descriptor is closed; None: another run has it.

    Ray numbers the jobs of two such runs alike, and verl names the socket in ``/tmp`` over which it sends weights to
    vLLM after that number: each run might get the other's weights. The claim is a lock on that folder, which leaves no
    file, goes with the process, and means what it should between containers that share the folder or do not.
    """
    claim = os.open(SOCKETS, os.O_RDONLY)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(claim)
        return None
    return claim


class _Claim:
    """An actor that does nothing but have a name."""


def claim_cluster(patience: float = 20):
    """Claim a Ray cluster for this job, until the returned handle or the job ends.

    verl's TransferQueue has one controller a cluster, by name: a second job would connect to it, put its samples to
    those of the first and train on both. A job that has just ended keeps the names for some seconds.

    Args:
        patience: seconds to wait for an earlier job.

    Raises:
        ValueError: another verl run is on the cluster.
    """
    until = time.monotonic() + patience
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


def servers_of_other_runs() -> dict[int, str]:
    """vLLM's processes on this node that are served by verl under the job number that ours would have."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            title = " ".join(process.cmdline()).strip()
            if title.startswith("VLLM::") and process.environ().get("VERL_RAY_JOB_ID") == FIRST_JOB:
                found[process.pid] = title
    return found
