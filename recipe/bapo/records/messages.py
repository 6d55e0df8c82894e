"""What ``main_bapo`` tells the process that launched it (``recipe.bapo.launch``); without one it is printed.

They go through a pipe: a file in the run's folder would be lost where its disk is full.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

PIPE = "BAPO_LAUNCH_PIPE"  # in the environment: the descriptor
_pipe = os.environ.pop(PIPE, None)  # Ray's workers inherit the environment, not the descriptor


def tell(**message) -> None:
    """Tell the launcher one thing.

    Args:
        say: a text for the console.
        error: what is wrong.
        training: the checks have passed; ``{"config": its path, "cluster": whether Ray is up already}``.
        ray: it is up; how the launcher reaches it (``TaskRunnerOnThisNode``).
        trained: training has ended, and with it what the watchdog watches.
    """
    if _pipe is not None:
        with suppress(OSError):  # the launcher is gone
            os.write(int(_pipe), json.dumps(message).encode() + b"\n")
    elif "say" in message:
        print(message["say"], flush=True)
    elif "error" in message:
        print(f"Error: {message['error']}", file=sys.stderr)


def wait_to_be_ended(seconds: float = 60.0) -> None:
    """After a failure: keep Ray up, of which the launcher asks what has died, until it ends this process."""
    if _pipe is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(seconds)
