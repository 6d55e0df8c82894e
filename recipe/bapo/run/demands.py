# SPDX-License-Identifier: Apache-2.0
"""In the training process: tell the parent that Ray is up and, until a step has ended, what Ray cannot place.

If Ray has fewer CPUs or GPUs than verl asks it for, Ray waits for ever and verl reports nothing. A Ray that the run
starts itself is told to count enough CPUs; the nodes of a cluster count their own. Ray's own ``ray status`` leaves out
an actor that waits for a CPU which another actor holds (tried with Ray 2.60: "no resource demands"), so we ask for what
Ray lists as pending.
"""

import threading
import time
from collections import Counter
from pathlib import Path

from recipe.bapo.run.messages import send

INTERVAL = 30.0  # seconds between two requests to Ray


def follow(metrics: Path) -> threading.Thread:
    """Wait for Ray in a thread, tell the parent the id of this job, and ask Ray until a step has ended.

    What two requests in a row found pending is printed.

    Args:
        metrics: the run's metrics file, which has a line once the first step or validation has ended.
    """
    thread = threading.Thread(target=_follow, args=(metrics,), daemon=True)
    thread.start()
    return thread


def _follow(metrics):
    import ray

    while not ray.is_initialized():  # verl starts it, and calls nothing of ours when it has
        time.sleep(0.2)
    send("ray", ray.get_runtime_context().get_job_id())
    before: list[str] = []
    shown: list[str] = []
    while True:
        time.sleep(INTERVAL)
        if metrics.exists() and metrics.stat().st_size:
            return
        try:
            now = pending(ray.get_runtime_context().get_job_id())
            if now and now == before and now != shown:
                send(
                    "info",
                    f"Warning: no step has ended, and Ray cannot place {'; '.join(now)} (free: {free()}). Give the run "
                    "more, or let it ask for less: docs/troubleshooting.md, 'Ray waits for CPUs or GPUs'.",
                )
                shown = now
            before = now
        except Exception as error:  # the answers come from Ray's dashboard, which may be down or not up yet
            print(f"Could not ask Ray what it waits for: {error}")


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
