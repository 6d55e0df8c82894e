# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO and clean up after it: ``python -m recipe.bapo.launch [arguments of recipe.bapo.main_bapo]``.

Training is a child of this process, which shows a line per step and a summary, ends a run that would hang and, whatever
its end, kills what is left of it and removes what it would leave behind. The run's folder is ``OUTPUT_DIR``; what verl
and Ray print goes to ``train.log`` in it. Exit code: 0, 1 for a failure, 128 + N for signal N. The run script, and with
it every user, relies on the command and on its exit codes.
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

from recipe.bapo.launch import cleanup, console
from recipe.bapo.launch.supervisor import Supervisor
from recipe.bapo.records import LOG, PICTURE, RAY_LOGS, keep_earlier

# Unbuffered (-u): what a killed process printed last is in the log.
TRAINING = (sys.executable, "-u", "-m", "recipe.bapo.main_bapo")
MAX_PARENT_LENGTH = 25  # characters of a folder in which the path of Ray's sockets stays below Unix's limit of 107


def main(arguments: list[str]) -> int:
    """Start training, follow it to its end, clean up, say how it went. Returns the exit code."""
    interruptions = catch_interruptions()
    cleanup.adopt_orphans()
    run_dir = Path(os.environ.setdefault("OUTPUT_DIR", time.strftime("runs/bapo-%Y%m%d-%H%M%S"))).absolute()
    try:
        log = keep_earlier(run_dir / LOG)
        log.touch()
    except OSError as error:
        print(f"Error: OUTPUT_DIR={run_dir} is not usable: {error}", file=sys.stderr)
        return 1
    with scratch_folder() as scratch:
        run = Supervisor([*TRAINING, *arguments], run_dir, log, scratch)
        try:
            while run.poll() and not interruptions:
                time.sleep(0.2)
            error, code = run.result(interruptions)
        finally:
            run.end()
        if error is not None:
            keep_ray_logs(Path(scratch), run_dir)
    with suppress(OSError):  # the terminal is gone
        if error is not None:
            print(f"Error: {error}\nThe whole output: {log}", file=sys.stderr)
        elif run.config is None:  # Hydra printed its help or the config (--cfg job), and nothing trained
            print(log.read_text())
        else:
            show_result(run.run_dir, evaluated=run.config.trainer.val_only)
    return code


def catch_interruptions() -> list[signal.Signals]:
    """The list of the signals that come from now on. They interrupt nothing, so that the first ends the run and no
    further one ends its clean-up."""
    caught: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps its meaning
            signal.signal(number, lambda number, _: caught.append(signal.Signals(number)))
    return caught


def scratch_folder() -> tempfile.TemporaryDirectory:
    """For Ray's session and whatever else a run would leave in ``/tmp``: the ``TMPDIR`` of its processes."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_PARENT_LENGTH:
        print(
            f"Temporary files go to /tmp: {parent} is longer than {MAX_PARENT_LENGTH} characters, Ray's sockets' limit."
        )
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="bapo-", dir=parent, ignore_cleanup_errors=True)


def keep_ray_logs(scratch: Path, run_dir: Path) -> None:
    """Copy Ray's logs of a failed run to the run's folder. Ray makes its own folders writable by everybody."""
    kept = run_dir / RAY_LOGS
    with suppress(OSError):  # there are none, or the disk is full
        shutil.copytree(scratch / "ray" / "session_latest" / "logs", kept, dirs_exist_ok=True)
    for path in (kept, *kept.rglob("*")):
        with suppress(OSError):
            path.chmod(path.stat().st_mode & ~0o022)


def show_result(run_dir: Path, evaluated: bool) -> None:
    """The screen at the end, and the run's picture; a run that trained well does not fail for want of one."""
    if evaluated:
        print(console.evaluation(run_dir))
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
