# SPDX-License-Identifier: Apache-2.0
"""Finds why a run would hang: Ray has too few CPUs, vLLM has died, weights do not reach it, or no step ends.

verl waits for an answer from a server that is gone or has failed, in some cases for ever; a worker of Ray's that dies
ends the run without us. A further reason is one more method, called by ``check``; ``tests/stack/test_faults.py``
injects the faults that each of them finds. The limits are the section ``watchdog`` of the config.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from recipe.bapo.launch import cleanup
from recipe.bapo.records import METRICS, STACKS

INTERVAL = 2.0  # seconds between two checks


class Watchdog:
    """Checks a run's processes and its progress; ``reason`` is what it has found.

    Args:
        run_dir: the run's folder; a step has ended when ``metrics.jsonl`` in it grows.
        limits: the section ``watchdog`` of the config, in seconds; its keys are explained in ``bapo_trainer.yaml``.
        on_cluster: whether Ray is a cluster's, whose processes are not below this one.
    """

    def __init__(self, run_dir: Path, limits, on_cluster: bool):
        self.run_dir, self.limits, self.on_cluster = run_dir, limits, on_cluster
        self.began = time.time()
        self.last_check = time.monotonic()
        self.reason: str | None = None
        self.job: str | None = None  # its id in Ray, once Ray is up
        self.demands: list[str] = []  # what Ray has no place for; recipe.bapo.launch.demands
        self.resources = ""  # what of Ray is free
        self.demands_since = 0.0  # when they last changed, by the monotonic clock
        self.demands_told = False
        self.servers: dict[int, str] = {}  # the titles of vLLM's processes that were seen twice, by id
        self.seen: set[int] = set()  # the ids of those that the last check saw
        self.shared_memory: set[Path] = set()  # what they held, which nobody holds any more once they are killed

    def should_end(self) -> bool:
        """Look for a reason every ``INTERVAL`` seconds; True once verl has had ``grace_s`` to say itself what it is."""
        now = time.monotonic()
        if self.reason is None and now - self.last_check >= INTERVAL:
            self.check()
            self.last_check = now
        return self.reason is not None and now - self.last_check >= self.limits.grace_s

    def check(self) -> None:
        """Look for a reason to end the run; the first one stays."""
        self.reason = self.reason or self.silence() or self.unmet_demand() or self.dead_server() or self.stuck_weights()

    def silence(self) -> str | None:
        """The reason if no step has ended for too long, else None."""
        last_step = self.began
        with suppress(OSError):  # there is none yet
            last_step = max(self.began, (self.run_dir / METRICS).stat().st_mtime)
        silence, limit = time.time() - last_step, self.limits.max_silence_s
        if silence <= limit:
            return None
        return (
            f"no step ended in {silence:.0f} s (watchdog.max_silence_s={limit:g}); what each process was doing: "
            f"{self.run_dir / STACKS}"
        )

    def set_demands(self, demands: list[str], resources: str) -> None:
        """Take what Ray has no place for now, and what of it is free; training sends each change."""
        self.demands, self.resources = demands, resources
        self.demands_since, self.demands_told = time.monotonic(), False

    def unmet_demand(self) -> str | None:
        """The reason if Ray has too long had no place for what the run asks for, else None; says so once before that.

        On a cluster another job may give its resources back, so the run is not ended there.
        """
        waited = time.monotonic() - self.demands_since
        if not self.demands or waited <= self.limits.pending_notice_s:
            return None
        waits = (
            f"has waited {waited:.0f} s to place {'; '.join(self.demands)} (free: {self.resources}). Give the run "
            "more, or let it ask for less: docs/troubleshooting.md, 'Ray waits for CPUs or GPUs'"
        )
        if not self.demands_told:
            with suppress(OSError):  # the terminal is gone
                print(f"Warning: Ray {waits}.")
            self.demands_told = True
        if self.on_cluster or waited <= self.limits.max_pending_s:
            return None
        return f"Ray (watchdog.max_pending_s={self.limits.max_pending_s:g}) {waits}"

    def dead_server(self) -> str | None:
        """The reason if a process of a vLLM server on this node has gone, else None; notes what those there hold.

        A server is believed at its second sighting: between vfork and exec a child shows the title of its parent, so
        that any command which an engine runs is, for some microseconds, one more engine.
        """
        there = {pid: title for pid, title in self.processes().items() if title.startswith("VLLM::")}
        gone = [f"{title} (process {pid})" for pid, title in self.servers.items() if pid not in there]
        if there.keys() - self.servers.keys():
            self.shared_memory |= cleanup.shared_memory(there)
        self.servers.update({pid: title for pid, title in there.items() if pid in self.seen})
        self.seen = set(there)
        return f"{gone[0]} of a vLLM server has died" if gone else None

    def stuck_weights(self) -> str | None:
        """The reason if weights are too long on their way, else None: verl removes their socket at the end."""
        for path in cleanup.weight_sockets(self.job) if self.job else ():
            with suppress(OSError):  # it has ended
                began = path.stat().st_mtime
                took, limit = time.time() - began, self.limits.max_sync_s
                if began > self.began and took > limit:  # older ones are of a run that was killed
                    return f"the weights did not reach vLLM in {took:.0f} s (watchdog.max_sync_s={limit:g})"
        return None

    def processes(self) -> dict[int, str]:
        """The titles of the run's processes on this node by their ids; on a cluster those of vLLM alone."""
        if not self.on_cluster:
            return cleanup.descendants()
        return cleanup.vllm_processes(self.job) if self.job else {}

    def left_outside(self) -> set[Path]:
        """What the run's processes on this node hold outside its folder, and what those held that have died."""
        sockets = cleanup.weight_sockets(self.job) if self.job else set()
        return self.shared_memory | cleanup.shared_memory(self.processes()) | sockets

    def write_stacks(self, driver: int) -> None:
        """Write by py-spy what the process ``driver`` and the run's workers on this node are doing."""
        spy = Path(sys.executable).with_name("py-spy")
        workers = [pid for pid, title in self.processes().items() if title.startswith(("ray::", "VLLM::"))]
        with suppress(OSError), open(self.run_dir / STACKS, "w") as out:  # the disk is full, say
            for pid in (driver, *workers):
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run([spy, "dump", "--pid", str(pid)], stdout=out, stderr=out, timeout=10)
