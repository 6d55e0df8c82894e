# SPDX-License-Identifier: Apache-2.0
"""The life of a run: its parent process, what the parent shows and watches, what keeps runs apart, what is cleaned up.

``__main__`` is the command and the parent's view of training, ``watchdog`` finds a run that would hang, ``demands``
asks Ray what it waits for, ``cleanup`` leaves nothing behind, ``console`` is what a person reads, ``locks`` keep two
runs from each other. The parent imports neither verl nor torch: it starts at once, and is none of the processes that
die.

Here is training's end of the pipe to its parent. It is a pipe and not a file, because a file in the run's folder would
be lost where its disk is full. ``Supervisor.handle_message`` has to know every kind of message that is sent.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

PIPE = "BAPO_LAUNCH_PIPE"  # environment variable with the pipe's descriptor, which Ray's workers do not inherit
_descriptor = os.environ.pop(PIPE, None)
_parent = Connection(int(_descriptor), readable=False) if _descriptor else None
_one_at_a_time = threading.Lock()


def send(kind: str, content=None) -> None:
    """Send one message to the parent; without one, texts are printed.

    Args:
        kind: one of the following.

            - ``info``: a text for the console.
            - ``error``: a text that says why training ends.
            - ``checked``: the checks have passed; the path of the run's config, whether Ray is a cluster's, and whether
              the bounds can move.
            - ``ray``: Ray is up; the job's id in it.
            - ``demands``: what Ray has no place for, a list of texts, and what of it is free.
            - ``trained``: training is done, and the process is about to end.
        content: what belongs to the kind.
    """
    if _parent is not None:
        with suppress(OSError), _one_at_a_time:  # the parent is gone
            _parent.send((kind, content))
    elif kind == "info":
        print(content)
    elif kind == "error":
        print(f"Error: {content}", file=sys.stderr)


def wait_for_final_check() -> None:
    """Wait up to 60 s for the parent to end this process.

    The parent first looks which of vLLM's processes have died: all of them die with this process, which started Ray.
    """
    if _parent is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(60)
