# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO and clean up after it: ``python -m recipe.bapo.launch [arguments of recipe.bapo.main_bapo]``.

Training is a child of this process, which shows a line per step and a summary, ends a run that would hang and, whatever
its end, kills what is left of it and removes what it would leave behind. The run's folder is ``OUTPUT_DIR``; what verl
and Ray print goes to ``train.log`` in it. Exit code: 0, 1 for a failure, 128 + N for signal N.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from recipe.bapo.launch import console, tree
from recipe.bapo.launch.run import Run
from recipe.bapo.records import LOG, PICTURE, RAY_LOGS, VALIDATION, keep_earlier, validation

TRAINING = (sys.executable, "-u", "-m", "recipe.bapo.main_bapo")  # -u: its last words reach the log if it is killed
LONGEST = 25  # characters of a folder in which the path of Ray's sockets stays below Unix's limit of 107


def main(arguments: list[str]) -> int:
    """Start training, follow it to its end, clean up, say how it went. Returns the exit code."""
    interruptions = catch_interruptions()
    tree.adopt_orphans()
    run_dir = Path(os.environ.setdefault("OUTPUT_DIR", time.strftime("runs/bapo-%Y%m%d-%H%M%S"))).absolute()
    try:
        log = keep_earlier(run_dir / LOG)
        log.touch()
    except OSError as error:
        print(f"Error: OUTPUT_DIR={run_dir} is not usable: {error}", file=sys.stderr)
        return 1
    with scratch_folder() as scratch:
        run = Run([*TRAINING, *arguments], run_dir, log, scratch)
        try:
            while run.goes_on() and not interruptions:
                time.sleep(0.2)
            message, code = run.verdict(interruptions)
        finally:
            run.end()
        if message is not None:
            logs, but = Path(scratch, "ray", "session_latest", "logs"), shutil.ignore_patterns("old")
            with suppress(OSError):  # there are none, or the disk is full
                shutil.copytree(logs, run_dir / RAY_LOGS, dirs_exist_ok=True, ignore=but)
    with suppress(OSError):  # of a terminal that is gone
        if message is not None:
            print(f"Error: {message}\nThe whole output: {log}", file=sys.stderr)
        else:
            show_result(run.run_dir, evaluated=run.config.trainer.val_only)
    return code


def catch_interruptions() -> list[signal.Signals]:
    """Those that come from now on. They interrupt nothing, so that the first ends the run and no other its clean-up."""
    caught: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: caught.append(signal.Signals(number)))
    return caught


def scratch_folder() -> tempfile.TemporaryDirectory:
    """For Ray's session and whatever else a run would leave in ``/tmp``: the ``TMPDIR`` of its processes."""
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST:
        print(f"Temporary files go to /tmp: the path of {parent} is too long for Ray's sockets ({LONGEST} characters).")
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="bapo-", dir=parent, ignore_cleanup_errors=True)


def show_result(run_dir: Path, evaluated: bool) -> None:
    """The screen at the end, and the run's picture; a run that trained well does not fail for want of one."""
    if evaluated:
        print(validation.table(max((run_dir / VALIDATION).glob("step_*.json"), key=os.path.getmtime)))
        return
    print(console.summary(run_dir))
    try:
        from recipe.bapo import plot

        plot.draw({run_dir.name: [run_dir]}, run_dir / PICTURE)
        print(f"Picture: {run_dir / PICTURE}")
    except Exception as error:
        print(f"No picture: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
