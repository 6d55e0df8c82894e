# SPDX-License-Identifier: Apache-2.0
"""Show what Ray cannot place, while training has not made a step.

If Ray has fewer CPUs or GPUs than verl asks it for, Ray waits forever and verl reports nothing. Preflight counts CPUs,
but only for a Ray that the run starts itself.
"""

import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from recipe.bapo.launch import send

INTERVAL = 60.0  # seconds between two looks, and so the least time between two messages
CONFIRMATION = 10.0  # seconds to a second look: Ray renews its status every 5 s, so the first may be out of date
TIMEOUT = 30.0  # seconds for the command


def follow(address: str, metrics: Path) -> None:
    """Send Ray's status to the console while a demand stays unmet, until the first step or validation has ended.

    A daemon thread asks once a minute. It sends a status only if it differs from the last one that it sent.

    Args:
        address: ``HOST:PORT`` of Ray's control service.
        metrics: the run's metrics file, which verl creates empty and to which it adds a line per step.
    """
    threading.Thread(target=_follow, args=(address, metrics), daemon=True).start()


def _follow(address, metrics):
    began, shown = time.monotonic(), []
    while True:
        time.sleep(INTERVAL)
        if _has_progress(metrics):
            return
        lines = unmet_demands(_status(address))
        if lines:
            time.sleep(CONFIRMATION)
            lines = unmet_demands(_status(address))
        if lines and lines != shown and not _has_progress(metrics):
            text = (
                f"Training has not made a step for {time.monotonic() - began:.0f} s, and Ray cannot place all that it "
                "is asked for (docs/troubleshooting.md, 'Ray waits for CPUs or GPUs'). Ray's status:"
            )
            send("info", "\n  ".join([text, *lines]))
            shown = lines


def _has_progress(metrics):
    with suppress(OSError):  # raised if the file does not exist yet
        return metrics.stat().st_size > 0
    return False


def _status(address):
    """Return what ``ray status`` prints. Its errors go to the log, and do not matter otherwise."""
    command = [Path(sys.executable).with_name("ray"), "status", "--address", address]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace", timeout=TIMEOUT
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"Could not ask Ray for its status: {error}")
        return ""


def unmet_demands(status: str) -> list[str]:
    """Return the lines of ``ray status`` that say which CPUs and GPUs are used and which demands are pending.

    The list is empty if no demand is pending, or if Ray does not know its status yet.
    """
    usage, _, demands = status.partition("Total Usage:")[2].partition("Pending Demands:")
    pending = [line for line in demands.splitlines() if "+ pending " in line]
    if not pending:
        return []
    used = [line for line in usage.splitlines() if re.match(r" \S+ (CPU|GPU)\b", line)]
    return ["Total Usage:", *used, "Pending Demands:", *pending]
