# SPDX-License-Identifier: Apache-2.0
"""Training's end of the pipe to its parent process.

We use a pipe instead of a file, because a file in the run's folder could not be written when its disk is full.
``TrainingProcess.handle_message`` of the parent handles every kind of message.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

PIPE = "BAPO_LAUNCH_PIPE"  # environment variable with the pipe's file descriptor. Ray's workers do not inherit that.
_descriptor = os.environ.pop(PIPE, None)
_parent = Connection(int(_descriptor), readable=False) if _descriptor else None
_one_at_a_time = threading.Lock()


def has_parent() -> bool:
    """Whether ``recipe.bapo.run`` started this process."""
    return _parent is not None


def send(kind: str, content=None) -> None:
    """Send one message to the parent. Without a parent, print texts and drop other messages.

    Args:
        kind: one of the following.

            - ``info``: a text for the console.
            - ``error``: a text that says why training ends.
            - ``checked``: the checks have passed, and the config is in the run's folder. The content is whether the run
              joins a cluster.
            - ``ray``: Ray is up. The content is the id of this job in Ray.
            - ``trained``: training is done, and the process is about to end.
        content: as described above; None for ``trained``.
    """
    if _parent is not None:
        with suppress(OSError), _one_at_a_time:  # raised if the parent has ended
            _parent.send((kind, content))
    elif kind == "info":
        print(content)
    elif kind == "error":
        print(f"Error: {content}", file=sys.stderr)


def wait_for_final_check() -> None:
    """Wait up to 60 s for the parent to end this process.

    The parent first checks which of vLLM's processes have died. It has to do so before this process ends, because all
    of them end with it.
    """
    if _parent is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(60)
