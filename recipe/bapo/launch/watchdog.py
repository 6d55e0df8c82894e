# SPDX-License-Identifier: Apache-2.0
"""Finds why a run would hang: a process has died, weights do not reach vLLM, or no step has ended for too long.

verl waits for an answer from a server or a worker that is gone or has failed, in some cases for ever. A further reason
is one more method in ``find_reason``; ``tests/stack/test_faults.py`` injects the faults that each of them finds. The
limits are the section ``watchdog`` of the config.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from recipe.bapo.launch import process_tree
from recipe.bapo.launch.cleanup import shared_memory, weight_sockets
from recipe.bapo.records import LOG, METRICS, STACKS

INTERVAL = 2.0  # seconds between two checks
ENDED_ON_PURPOSE = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")  # Ray's reasons for an actor's end


class Watchdog:
    """Checks a run's processes and its progress; ``reason`` is what it has found.

    Args:
        run_dir: the run's folder; a step has ended when ``metrics.jsonl`` in it grows.
        max_silence_s: seconds without a step, the start-up included, after which the run is ended; None: no limit.
        max_sync_s: seconds that the weights may take to vLLM on this node.
        max_exit_s: seconds that the training process has to end once training is done.
        grace_s: seconds that the trainer has to report a death itself, with more detail.
    """

    def __init__(
        self, run_dir: Path, max_silence_s: float | None, max_sync_s: float, max_exit_s: float, grace_s: float
    ):
        self.run_dir, self.max_silence_s, self.max_sync_s = run_dir, max_silence_s, max_sync_s
        self.max_exit_s, self.grace_s = max_exit_s, grace_s
        self.began = time.time()
        self.trained_at: float | None = None  # by the monotonic clock
        self.last_check = -INTERVAL  # by the monotonic clock
        self.reason: str | None = None
        self.last_error: str | None = None  # what kept it from checking
        self.job = self.node = None  # the ids of the job and of this node in Ray, once Ray is up
        self.actors: list = []
        self.servers: dict[int, str] = {}  # processes that vLLM starts beside Ray's, by id
        self.shared_memory: set[Path] = set()  # what these processes held, which nobody holds if their server is killed

    def connect_ray(self, job: str, node: str, environment: dict[str, str]) -> None:
        """Ray is up: ``environment`` is what its client needs to reach it."""
        self.job, self.node = job, node
        os.environ.update(environment, no_proxy="*")

    def training_is_done(self) -> None:
        """From now on only the end of the training process is waited for."""
        self.trained_at = time.monotonic()

    def should_end(self) -> bool:
        """Check now and then. True once the trainer has had ``grace_s`` to report by itself what was found, or
        ``max_exit_s`` to end after training."""
        now = time.monotonic()
        if self.trained_at is not None:
            return now - self.trained_at >= self.max_exit_s
        if self.reason is None and now - self.last_check >= INTERVAL:
            self.reason, self.last_check = self.find_reason(), now
        return self.reason is not None and now - self.last_check >= self.grace_s

    def final_check(self) -> None:
        """Look for what the trainer, which has failed, did not say."""
        self.reason = self.reason or self.find_reason()

    def find_reason(self) -> str | None:
        """What is wrong, if anything."""
        for check in (self.silence, self.dead_actor, self.dead_server, self.stuck_weights):
            try:
                reason = check()
            except Exception as error:  # Ray does not answer
                if str(error) != self.last_error:  # the same error need not be logged every two seconds
                    with suppress(OSError), open(self.run_dir / LOG, "a") as log:
                        print(f"watchdog: {type(error).__name__}: {error}", file=log)
                self.last_error = str(error)
                continue
            if reason is not None:
                return reason
        return None

    def silence(self) -> str | None:
        """Since the metrics file last grew, or the run began."""
        path = self.run_dir / METRICS
        silence = time.time() - max(self.began, path.stat().st_mtime if path.exists() else 0.0)
        if self.max_silence_s is None or silence <= self.max_silence_s:
            return None
        return (
            f"no step ended in {silence:.0f} s (watchdog.max_silence_s={self.max_silence_s:g}); what each "
            f"process was doing: {self.run_dir / STACKS}"
        )

    def dead_actor(self) -> str | None:
        """A Ray actor of the run, on any node, that died and was not ended on purpose."""
        if self.job is None:
            return None
        from ray.util.state import list_actors  # its import takes a second, for which training need not wait

        self.actors = list_actors(filters=[("job_id", "=", self.job)], detail=True, limit=10_000, timeout=5)
        for actor in self.actors:
            death = (actor.death_cause or {}).get("actor_died_error_context")
            if death and death["reason"] not in ENDED_ON_PURPOSE:
                where = f"process {death['pid']} on {death['node_ip_address']}"
                return f"the worker {death['class_name'] or actor.class_name} ({where}) has died"
        return None

    def dead_server(self) -> str | None:
        """An engine process of vLLM on this node that was there before."""
        there = {pid: title for pid, title in self.processes().items() if title.startswith("VLLM::")}
        gone = [f"{title} (process {pid})" for pid, title in self.servers.items() if pid not in there]
        if there.keys() - self.servers.keys():
            self.shared_memory |= shared_memory(there)
        self.servers.update(there)
        return f"{gone[0]} of a vLLM server has died" if gone else None

    def stuck_weights(self) -> str | None:
        """A synchronisation of the weights that goes on for too long: verl removes the socket at its end."""
        for path in weight_sockets(self.job) if self.job else ():
            try:
                began = path.stat().st_mtime
            except OSError:
                continue  # it has ended
            took = time.time() - began
            if began > self.began and took > self.max_sync_s:  # older ones are of a run that was killed
                return f"the weights did not reach vLLM in {took:.0f} s (watchdog.max_sync_s={self.max_sync_s:g})"
        return None

    def processes(self) -> dict[int, str]:
        """The titles of the run's processes on this node by their ids; on a cluster they are not below this one."""
        processes = {process.pid: process for process in process_tree.below()}
        for actor in self.actors:
            if actor.state == "ALIVE" and actor.node_id == self.node and actor.pid not in processes:
                with suppress(psutil.Error):  # it has ended
                    root = psutil.Process(actor.pid)
                    processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
        titles = {}
        for pid, process in processes.items():
            with suppress(psutil.Error):
                titles[pid] = " ".join(process.cmdline()).strip()
        return {pid: title for pid, title in titles.items() if title}

    def write_stacks(self, driver: int) -> None:
        """The stack of every process of the run on this node, ``driver`` first, one file each, by py-spy."""
        spy = Path(sys.executable).with_name("py-spy")
        workers = {pid: title for pid, title in self.processes().items() if title.startswith(("ray::", "VLLM::"))}
        with suppress(OSError):  # the disk is full, say
            (self.run_dir / STACKS).mkdir(exist_ok=True)
            for pid, title in {driver: "driver", **workers}.items():
                name = "".join(c if c.isalnum() else "_" for c in title.split(" ")[0].removeprefix("ray::"))[:40]
                with open(self.run_dir / STACKS / f"{name}-{pid}.txt", "w") as out:
                    try:
                        subprocess.run([spy, "dump", "--pid", str(pid)], stdout=out, stderr=out, timeout=10)
                    except (OSError, subprocess.TimeoutExpired) as error:
                        print(f"no stack: {error}", file=out)
