# SPDX-License-Identifier: Apache-2.0
"""Other runs on this machine, which would get this run's weights."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

import psutil

from recipe.bapo.records.leftovers import SOCKETS

WAYS_OUT = (
    "wait for its end, submit both to one cluster (scripts/cluster/ray.sh head), or start each in a container with a "
    f"{SOCKETS} of its own."
)
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


def servers_of_other_runs() -> dict[int, str]:
    """vLLM's processes on this node that are served by verl under the job number that ours would have."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            title = " ".join(process.cmdline()).strip()
            if title.startswith("VLLM::") and process.environ().get("VERL_RAY_JOB_ID") == FIRST_JOB:
                found[process.pid] = title
    return found
