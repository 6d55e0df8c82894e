# SPDX-License-Identifier: Apache-2.0
"""What training (``main_bapo``) tells the process that launched it; without one, what is for a person is printed.

The way is a pipe: a file in the run's folder would be lost where its disk is full.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

PIPE = "BAPO_LAUNCH_PIPE"  # in the environment: the descriptor, which Ray's workers do not inherit
_descriptor = os.environ.pop(PIPE, None)
_launcher = Connection(int(_descriptor), readable=False) if _descriptor else None


def tell(kind: str, what) -> None:
    """Tell one thing.

    Args:
        kind: ``say``, a text for the console; ``error``, a text; ``training``, the checks have passed: the path of the
            run's config, and whether Ray is a cluster's; ``ray``, it is up: the ids of the job and of this node in it,
            and the environment in which Ray's client finds it; ``trained``, nothing is to be watched any more.
        what: what comes with it.
    """
    if _launcher is not None:
        with suppress(OSError):  # it is gone
            _launcher.send((kind, what))
    elif kind in ("say", "error"):
        print(what if kind == "say" else f"Error: {what}", file=sys.stdout if kind == "say" else sys.stderr)


def wait_to_be_ended(seconds: float = 60.0) -> None:
    """After a failure: keep Ray up, of which the launcher asks what has died, until it ends this process."""
    if _launcher is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(seconds)
