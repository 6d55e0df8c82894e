# SPDX-License-Identifier: Apache-2.0
"""Ask Ray what it waits for before training starts, in the process that is connected to it.

If a machine has fewer CPUs than verl asks Ray for, Ray waits forever and verl reports nothing. This module sends each
change to the watchdog in the parent process, which decides when to print it and when to end the run.
"""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

INTERVAL = 10.0  # seconds between two requests to Ray


def follow(started: Path, report: Callable[[list[str], str], None]) -> None:
    """Ask Ray repeatedly in a thread until the file ``started`` exists, and report each change.

    Args:
        started: the run's metrics file, which exists once the first step or validation has ended.
        report: called with the demands that Ray cannot place yet, a phrase each, and with the free resources.
    """
    threading.Thread(target=_follow, args=(started, report), daemon=True).start()


def _follow(started, report):
    import ray  # imported here, because the launcher imports this package and runs without Ray

    before, pause, failed = [], threading.Event(), False
    while not pause.wait(INTERVAL):
        is_started = started.exists()
        try:
            now = [] if is_started else pending(ray.get_runtime_context().get_job_id())
            if now != before:
                report(now, free())
        except Exception as error:  # the answers come from Ray's dashboard, which may be down or not up yet
            if not failed:
                print(f"Could not ask Ray what it waits for: {error}")
            failed = True
        else:
            before = now
        if is_started:
            return


def pending(job: str) -> list[str]:
    """List what the job ``job`` has asked Ray for and Ray cannot place yet, a phrase each."""
    from ray.util.state import list_placement_groups, list_tasks

    groups = list_placement_groups(filters=[("state", "=", "PENDING"), ("creator_job_id", "=", job)], detail=True)
    # A waiting actor shows up as the task that creates it. Once Ray has placed that task, the actor is no longer
    # listed, even while its constructor still runs.
    tasks = list_tasks(filters=[("state", "=", "PENDING_NODE_ASSIGNMENT"), ("job_id", "=", job)], detail=True)
    wanted = []
    for group in groups:
        bundles = Counter(_amounts(bundle["unit_resources"]) for bundle in group.bundles or ())
        parts = " and ".join(f"{count} x ({amounts})" for amounts, count in bundles.items())
        wanted.append(f"a placement group {group.name} of {parts}".replace("  ", " "))
    named = Counter(
        (task.name.removesuffix(".__init__"), _amounts(task.required_resources or {}))
        for task in tasks
        if task.type != "ACTOR_TASK"  # a method call, which waits for its actor; the actor is listed itself
    )
    wanted += [f"{count} x {name} ({amounts})" for (name, amounts), count in named.items()]
    return sorted(wanted)


def free() -> str:
    """Say how many of the Ray cluster's CPUs and GPUs are free."""
    import ray

    total, left = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{left.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"
