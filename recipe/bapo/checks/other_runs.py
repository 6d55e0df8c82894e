# SPDX-License-Identifier: Apache-2.0
"""The check that this run gets a machine or a Ray cluster to itself; ``recipe.bapo.launch.locks`` does the work."""

from __future__ import annotations

import os

from recipe.bapo.launch.locks import WAYS_OUT, check_ray_address, claim_machine, joins_a_cluster, servers_of_other_runs


def check_other_runs(config) -> str:
    """A Ray cluster that answers, or no run beside us whose vLLM servers might get our weights."""
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    claim, others = claim_machine(), servers_of_other_runs()
    if claim is not None:
        os.close(claim)
    if claim is None or others:
        which = "".join(f" (process {pid}, {title})" for pid, title in sorted(others.items())[:1])
        raise ValueError(
            f"another run is on this machine{which}, and verl would send both runs' weights over one socket in /tmp: "
            f"{WAYS_OUT}"
        )
    return "none on this machine"
