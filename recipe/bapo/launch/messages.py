# SPDX-License-Identifier: Apache-2.0
"""The pipe from training to the process that launched it; without a launcher, texts are printed.

A pipe and not a file: a file in the run's folder would be lost where its disk is full. ``main_bapo`` sends;
``Supervisor.handle_message`` is the other end and has to know every kind that is sent.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

PIPE = "BAPO_LAUNCH_PIPE"  # environment variable with the pipe's descriptor, which Ray's workers do not inherit
_descriptor = os.environ.pop(PIPE, None)
_launcher = Connection(int(_descriptor), readable=False) if _descriptor else None


def send(kind: str, content=None) -> None:
    """Send one message to the launcher.

    Args:
        kind: one of the following.

            - ``info``: a text for the console.
            - ``error``: a text that says why training ends.
            - ``checked``: the checks have passed; the path of the run's config, and whether Ray is a cluster's.
            - ``ray``: Ray is up; the job's id in it.
            - ``trained``: training is done, and the process is about to end.
        content: what belongs to the kind.
    """
    if _launcher is not None:
        with suppress(OSError):  # the launcher is gone
            _launcher.send((kind, content))
    elif kind == "info":
        print(content)
    elif kind == "error":
        print(f"Error: {content}", file=sys.stderr)


def wait_for_final_check(seconds: float = 60.0) -> None:
    """Wait until the launcher ends this process. It first looks which of vLLM's processes have died, and all of them
    would be gone with this one, which started Ray."""
    if _launcher is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(seconds)
