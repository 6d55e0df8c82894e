# SPDX-License-Identifier: Apache-2.0
"""The processes below this one: none escapes from the tree, and all of them can be ended.

Only Linux's ``prctl`` makes both hold. The supervisor relies on it: what it starts, and whatever that starts in turn,
is gone when it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress

import psutil

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of Linux's <sys/prctl.h>


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, whatever session it is in."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """In a new child: have the kernel send it SIGINT if this process is killed."""
    _prctl(SET_PDEATHSIG, signal.SIGINT)


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def below() -> list[psutil.Process]:
    """The processes that this one has started, those that they have started, and so on."""
    return psutil.Process().children(recursive=True)


def end_below(patience: float = 10.0) -> None:
    """Kill them, and wait ``patience`` seconds at most until none is left.

    Python's resource trackers are spared for half of that time: each ends by itself once the processes that it serves
    are gone, and removes the shared memory that they have left (for verl's and vLLM's, ``tests/stack/test_faults.py``).
    """
    began = time.monotonic()
    with suppress(ChildProcessError):  # there is no child left
        while time.monotonic() < began + patience:
            spare_trackers = time.monotonic() < began + patience / 2
            for process in below():
                with suppress(psutil.Error):  # it has ended
                    if not (spare_trackers and "multiprocessing.resource_tracker" in " ".join(process.cmdline())):
                        process.kill()
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.02)
