# SPDX-License-Identifier: Apache-2.0
"""Asks Ray what it waits for before training starts, in the process that has connected to it.

Where a machine has fewer CPUs than verl asks Ray for, Ray waits for ever and verl says nothing. The watchdog in the
parent process gets each change by ``send`` and decides when it is worth a line, and when the run ends.
"""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

INTERVAL = 10.0  # seconds between two questions to Ray


def follow(started: Path, report: Callable[[list[str], str], None]) -> None:
    """Ask Ray in a thread of its own until the file ``started`` exists, and report each change.

    Args:
        started: the run's metrics file, which is there once the first step or validation has ended.
        report: called with the demands that Ray cannot place yet, a phrase each, and with what is free.
    """
    threading.Thread(target=_follow, args=(started, report), daemon=True).start()


def _follow(started, report):
    import ray  # the launcher, which imports this package, runs without Ray

    before, pause, failed = [], threading.Event(), False
    while not pause.wait(INTERVAL):
        is_started = started.exists()
        try:
            now = [] if is_started else pending(ray.get_runtime_context().get_job_id())
            if now != before:
                report(now, free())
        except Exception as error:  # Ray's dashboard, which answers, is not up yet or turned off, or Ray is going down
            if not failed:
                print(f"Ray does not say yet what it waits for: {error}")
            failed = True
        else:
            before = now
        if is_started:
            return


def pending(job: str) -> list[str]:
    """What the job ``job`` has asked Ray for and Ray has no place for yet, a phrase each."""
    from ray.util.state import list_placement_groups, list_tasks

    groups = list_placement_groups(filters=[("state", "=", "PENDING"), ("creator_job_id", "=", job)], detail=True)
    # Of an actor this is the task that creates it, so an actor that is busy in its constructor is not among them.
    tasks = list_tasks(filters=[("state", "=", "PENDING_NODE_ASSIGNMENT"), ("job_id", "=", job)], detail=True)
    wanted = []
    for group in groups:
        bundles = Counter(_amounts(bundle["unit_resources"]) for bundle in group.bundles)
        parts = " and ".join(f"{count} x ({amounts})" for amounts, count in bundles.items())
        wanted.append(f"a placement group {group.name} of {parts}".replace("  ", " "))
    named = Counter(
        (task.name.removesuffix(".__init__"), _amounts(task.required_resources))
        for task in tasks
        if task.type != "ACTOR_TASK"  # a call of a method: it waits for its actor, which is listed itself
    )
    wanted += [f"{count} x {name} ({amounts})" for (name, amounts), count in named.items()]
    return sorted(wanted)


def free() -> str:
    """How many of the Ray cluster's CPUs and GPUs are free."""
    import ray

    total, left = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{left.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"
