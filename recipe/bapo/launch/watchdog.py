"""Ends a run that would hang: a process has died, weights do not reach vLLM, or no step has ended for too long.

verl waits for an answer from a server or a worker that is gone or has failed, in some cases for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import ray
from ray._private import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from recipe.bapo.launch.processes import processes, shared_memory, weight_sockets
from recipe.bapo.records import METRICS, STACKS

INTERVAL = 2.0  # seconds between two looks
ENDED_ON_PURPOSE = (
    ActorDiedErrorContext.RAY_KILL,
    ActorDiedErrorContext.OUT_OF_SCOPE,
    ActorDiedErrorContext.REF_DELETED,
    ActorDiedErrorContext.OWNER_DIED,
)


class Watchdog(threading.Thread):
    """Looks at a run's processes and its progress until ``done`` is set.

    What it finds is in ``reason``; it then writes every process's stack to ``<run_dir>/stacks`` and ends the main
    thread's waiting with SIGTERM, which Ray turns into ``SystemExit``.

    Args:
        run_dir: the run's folder; a step has ended when ``metrics.jsonl`` in it grows.
        max_silence_s: seconds without a step, the start-up included, after which the run is ended; None: no limit.
        max_sync_s: seconds that the weights may take to vLLM on this node.
        grace_s: seconds that the trainer has to report a death itself, with more detail.
    """

    def __init__(self, run_dir: Path, max_silence_s: float | None, max_sync_s: float, grace_s: float):
        super().__init__(daemon=True)
        self.run_dir, self.max_silence_s = run_dir, max_silence_s
        self.max_sync_s, self.grace_s = max_sync_s, grace_s
        self.done = threading.Event()
        self.reason: str | None = None
        self.began = time.time()
        self.servers: dict[int, str] = {}  # processes that vLLM starts beside Ray's, by id
        self.shared_memory: set[Path] = set()  # what the run's processes on this node hold, or held when they died

    def run(self):
        """Look until told to stop, or until there is a reason to end the run."""
        while not self.done.wait(INTERVAL):
            try:
                reason = self.find_reason()
            except Exception as error:  # Ray is not up yet, or is going down
                with suppress(OSError):
                    print(f"watchdog: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            if reason is not None:
                self.reason = reason
                if not self.done.wait(self.grace_s):
                    with suppress(OSError):  # a full disk, say
                        write_stacks(self.run_dir / STACKS)
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def last_look(self) -> str | None:
        """The reason, if there is one, when the trainer has failed of itself and said less."""
        if self.reason is None:
            with suppress(Exception):  # Ray may be gone
                self.reason = self.find_reason()
        return self.reason

    def find_reason(self) -> str | None:
        """What is wrong, if anything."""
        if self.max_silence_s is not None:
            silence = time.time() - self.last_step()
            if silence > self.max_silence_s:
                return (
                    f"no step ended in {silence:.0f} s (watchdog.max_silence_s={self.max_silence_s:g}); what each "
                    f"process was doing: {self.run_dir / STACKS}"
                )
        if not ray.is_initialized():
            return None
        return dead_actor() or self.dead_server() or self.stuck_weights()

    def last_step(self) -> float:
        """When the metrics file last grew, or the run began."""
        path = self.run_dir / METRICS
        return max(self.began, path.stat().st_mtime if path.exists() else 0.0)

    def dead_server(self) -> str | None:
        """An engine process of vLLM on this node that was there before."""
        there = {pid: title for pid, title in processes().items() if title.startswith("VLLM::")}
        gone = [f"{title} (process {pid})" for pid, title in self.servers.items() if pid not in there]
        if there.keys() - self.servers.keys():
            self.shared_memory |= shared_memory(there)
        self.servers.update(there)
        return f"{gone[0]} of a vLLM server has died" if gone else None

    def stuck_weights(self) -> str | None:
        """A synchronisation of the weights that goes on for too long: verl removes the socket at its end."""
        for path in weight_sockets():
            try:
                began = path.stat().st_mtime
            except OSError:
                continue  # it has ended
            took = time.time() - began
            if began > self.began and took > self.max_sync_s:  # older ones are of a run that was killed
                return f"the weights did not reach vLLM in {took:.0f} s (watchdog.max_sync_s={self.max_sync_s:g})"
        return None


def dead_actor() -> str | None:
    """A Ray actor of this job, on any node, that died and was not ended on purpose."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    for actor in state.actors(job_id=job, actor_state_name="DEAD").values():
        context = actor["DeathCause"].actor_died_error_context
        if not actor["DeathCause"].HasField("actor_died_error_context") or context.reason in ENDED_ON_PURPOSE:
            continue
        where = f"process {context.pid} on {context.node_ip_address}"
        return f"the worker {context.class_name or actor['ActorClassName']} ({where}) has died"
    return None


def write_stacks(folder: Path) -> None:
    """The stack of every process of this job on this node, one file each, by py-spy."""
    folder.mkdir(parents=True, exist_ok=True)
    spy = Path(sys.executable).with_name("py-spy")
    for pid, title in {os.getpid(): "driver", **processes()}.items():
        name = "".join(c if c.isalnum() else "_" for c in title.split(" ")[0].removeprefix("ray::"))[:40]
        with open(folder / f"{name}-{pid}.txt", "w") as out:
            try:
                subprocess.run([spy, "dump", "--pid", str(pid)], stdout=out, stderr=out, timeout=10)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"no stack: {error}", file=out)
