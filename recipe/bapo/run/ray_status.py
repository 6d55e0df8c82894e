# SPDX-License-Identifier: Apache-2.0
"""Show Ray's own status while no step has ended and Ray cannot place what it is asked for.

If Ray has fewer CPUs or GPUs than verl asks it for, Ray waits for ever and verl reports nothing. Preflight counts the
CPUs, but only of a Ray that the run starts itself.
"""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from recipe.bapo.run.messages import send

INTERVAL = 30.0  # seconds between two looks


def follow(address: str, metrics: Path) -> threading.Thread:
    """Look at ``ray status`` in a thread until a step has ended, and print what two looks in a row found pending.

    Args:
        address: ``HOST:PORT`` of Ray's control service.
        metrics: the run's metrics file, which has a line once the first step or validation has ended.
    """
    thread = threading.Thread(target=_follow, args=(address, metrics), daemon=True)
    thread.start()
    return thread


def _follow(address, metrics):
    command = [Path(sys.executable).with_name("ray"), "status", "--address", address]
    before = shown = ""
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(INTERVAL)
        try:
            found = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"Could not ask Ray for its status: {error}")
            continue
        now = pending(found.stdout)
        if now and now == before and now != shown:
            text = "Warning: no step has ended, and Ray cannot place all that it is asked for"
            send("info", f"{text} (docs/troubleshooting.md, 'Ray waits for CPUs or GPUs'):\n{now}")
            shown = now
        before = now


def pending(status: str) -> str:
    """Return the lines of ``ray status`` that say what is used and what is pending; empty if nothing is pending."""
    usage, _, demands = status.partition("Total Usage:")[2].partition("Pending Demands:")
    waiting = re.findall(r"^ .*\bpending\b.*", demands, re.M)
    used = re.findall(r"^ \S+ (?:CPU|GPU)\b.*", usage, re.M)
    return "\n".join(["Total Usage:", *used, "Pending Demands:", *waiting]) if waiting else ""
