# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO and clean up after it: ``python -m recipe.bapo.launch [arguments of recipe.bapo.main_bapo]``.

Training is a child of this process, which shows a line per step and a summary, ends a run that would hang and, whatever
its end, kills what is left of it and removes what it would leave behind. The run's folder is ``OUTPUT_DIR``; what verl
and Ray print goes to ``train.log`` in it. Exit code: 0, 1 for a failure, 128 + N for signal N. The run script, and with
it every user, relies on the command and on its exit codes.
"""

import os
import signal
import subprocess
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
            print(console.summary(run.run_dir))
            if not run.config.trainer.val_only:
                draw(run.run_dir)
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
    """Copy Ray's logs of a failed run, if there are any, to the run's folder."""
    # Ray makes its own folders writable by everybody, and cp takes the mask's bits from their rights.
    copy = ["cp", "-rT", scratch / "ray" / "session_latest" / "logs", run_dir / RAY_LOGS]
    subprocess.run(copy, umask=0o022, stderr=subprocess.DEVNULL)


def draw(run_dir: Path) -> None:
    """The run's picture; a run that trained well does not fail for want of one."""
    try:
        from recipe.bapo import plot

        plot.draw({run_dir.name: [run_dir]}, run_dir / PICTURE)
        print(f"Picture: {run_dir / PICTURE}")
    except Exception as error:
        print(f"No picture: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
