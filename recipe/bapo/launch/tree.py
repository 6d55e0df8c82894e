# SPDX-License-Identifier: Apache-2.0
"""The processes below this one, of which none gets out of sight."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress

import psutil

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of Linux's <sys/prctl.h>


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, whatever else it has shed."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """In a new child: SIGINT ends it, also where this process ignores it, and comes if this process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python keeps what it finds ignored
    _prctl(SET_PDEATHSIG, signal.SIGINT)


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def below() -> list[psutil.Process]:
    """The processes that this one has started, those that they have started, and so on."""
    return psutil.Process().children(recursive=True)


def suspend_below() -> None:
    """Stop them where they are; they can still be looked at and killed."""
    for process in below():
        with suppress(psutil.Error):
            process.suspend()


def end_below(patience: float = 10.0) -> None:
    """Kill them, and wait ``patience`` seconds at most until none is left."""
    until = time.monotonic() + patience
    with suppress(ChildProcessError):  # there is no child, so nothing is below
        while time.monotonic() < until:
            for process in below():
                with suppress(psutil.Error):
                    process.kill()
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.02)
