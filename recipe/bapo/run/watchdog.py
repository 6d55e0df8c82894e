# SPDX-License-Identifier: Apache-2.0
"""Detect a run that hangs, in its parent: vLLM has died, weights do not reach it, or no step ends.

verl waits for an answer from a server that has died or failed, in some cases forever. (If a Ray worker dies, verl ends
the run itself.) To detect another fault, add a method and call it in ``check``; ``tests/stack/test_faults.py`` injects
each fault. The limits are in the section ``watchdog`` of the config.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from recipe.bapo.host import cleanup
from recipe.bapo.host.files import METRICS, STACKS

INTERVAL = 2.0  # seconds between two checks


class Watchdog:
    """Checks a run's processes and its progress. ``reason`` is the reason to end the run, or None.

    Args:
        run_dir: the run's folder. A step has ended when ``metrics.jsonl`` in it grows.
        limits: the section ``watchdog`` of the config, in seconds. ``bapo_trainer.yaml`` explains its keys.
        on_cluster: whether the run joined a cluster, whose processes are not descendants of this one.
    """

    def __init__(self, run_dir: Path, limits, on_cluster: bool):
        self.run_dir, self.limits, self.on_cluster = run_dir, limits, on_cluster
        self.began = time.time()
        self.last_check = time.monotonic()
        self.reason: str | None = None
        self.job: str | None = None  # the run's job id in Ray, once Ray is up
        self.servers: dict[int, str] = {}  # the titles of vLLM's processes that were seen twice, by id
        self.seen: set[int] = set()  # the ids of vLLM's processes at the last check
        self.shared_memory: set[Path] = set()  # of vLLM's processes, noted because it cannot be found once they died

    def should_end(self) -> bool:
        """Check every ``INTERVAL`` seconds. True once verl has had ``grace_s`` to report the problem itself."""
        now = time.monotonic()
        if self.reason is None and now - self.last_check >= INTERVAL:
            self.check()
            self.last_check = now
        return self.reason is not None and now - self.last_check >= self.limits.grace_s

    def check(self) -> None:
        """Look for a reason to end the run, and keep the first one found."""
        self.reason = self.reason or self.silence() or self.dead_server() or self.stuck_weights()

    def silence(self) -> str | None:
        """Return a reason if no step has ended for too long, else None."""
        last_step = self.began
        with suppress(OSError):  # raised before the first step
            last_step = max(self.began, (self.run_dir / METRICS).stat().st_mtime)
        silence, limit = time.time() - last_step, self.limits.max_silence_s
        if silence <= limit:
            return None
        return (
            f"no step ended in {silence:.0f} s (watchdog.max_silence_s={limit:g}); the stack of each process is in "
            f"{self.run_dir / STACKS}"
        )

    def dead_server(self) -> str | None:
        """Return a reason if a process of a vLLM server on this node has died, else None.

        A process counts as a server only when two checks in a row have seen it. Between vfork and exec a child shows
        its parent's title, so any command that an engine runs looks like another engine for some microseconds. This
        method also notes the shared memory of the servers, which ``left_outside`` returns.
        """
        there = {pid: title for pid, title in self.processes().items() if title.startswith("VLLM::")}
        gone = [f"{title} (process {pid})" for pid, title in self.servers.items() if pid not in there]
        if there.keys() - self.servers.keys():
            self.shared_memory |= cleanup.shared_memory(there)
        self.servers.update({pid: title for pid, title in there.items() if pid in self.seen})
        self.seen = set(there)
        return f"{gone[0]} of a vLLM server has died" if gone else None

    def stuck_weights(self) -> str | None:
        """Return a reason if sending weights takes too long, else None. verl removes their socket when it is done."""
        for path in cleanup.weight_sockets(self.job) if self.job else ():
            with suppress(OSError):  # raised if verl has just removed it
                began = path.stat().st_mtime
                took, limit = time.time() - began, self.limits.max_sync_s
                if began > self.began and took > limit:  # an older socket is from a run that was killed
                    return f"the weights did not reach vLLM in {took:.0f} s (watchdog.max_sync_s={limit:g})"
        return None

    def processes(self) -> dict[int, str]:
        """Return the titles of the run's processes on this node, by process id; on a cluster only those of vLLM."""
        if not self.on_cluster:
            return cleanup.descendants()
        return cleanup.vllm_processes(self.job) if self.job else {}

    def left_outside(self) -> set[Path]:
        """List the files outside the run's folder that its processes on this node hold, or held before they died."""
        sockets = cleanup.weight_sockets(self.job) if self.job else set()
        return self.shared_memory | cleanup.shared_memory(self.processes()) | sockets

    def write_stacks(self, driver: int) -> None:
        """Write the stacks of the process ``driver`` and of the run's workers on this node, with py-spy."""
        spy = Path(sys.executable).with_name("py-spy")
        workers = [pid for pid, title in self.processes().items() if title.startswith(("ray::", "VLLM::"))]
        with suppress(OSError), open(self.run_dir / STACKS, "w") as out:  # raised if the disk is full, for example
            for pid in (driver, *workers):
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run([spy, "dump", "--pid", str(pid)], stdout=out, stderr=out, timeout=10)
