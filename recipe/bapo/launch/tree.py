"""The processes below this one, of which none gets out of sight, and their folder for temporary files."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of Linux's <sys/prctl.h>
LONGEST = 25  # characters of a folder in which the path of Ray's sockets stays below Unix's limit of 107


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, whatever else it has shed."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a Python program in a process group of its own, so that a terminal's signals reach this process alone.

    SIGINT ends it, also where it is ignored here, and is sent to it should this process be killed.
    """

    def in_the_child():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would ignore it too
        _prctl(SET_PDEATHSIG, signal.SIGINT)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=in_the_child, **options)


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
    while _has_children() and time.monotonic() < until:
        for process in below():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def _has_children():
    """Whether any is left; one whose parent has ended is a child of ours."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return True
    return False


def make_scratch() -> Path:
    """A folder for Ray's session and whatever else a run would leave in ``/tmp``: the ``TMPDIR`` of its processes."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="bapo-", dir=parent if len(parent) <= LONGEST else "/tmp"))


def remove_scratch(folder: Path, keep_logs_in: Path | None) -> None:
    """Remove it; Ray's logs of a run that failed are kept."""
    logs = folder / "ray" / "session_latest" / "logs"
    if keep_logs_in is not None and logs.exists():
        with suppress(OSError):  # a full disk, say
            shutil.copytree(logs, keep_logs_in, dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
    shutil.rmtree(folder, ignore_errors=True)
