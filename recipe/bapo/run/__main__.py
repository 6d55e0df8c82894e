# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO and clean up after it: ``python -m recipe.bapo.run [arguments of recipe.bapo.main_bapo]``.

This process starts training as its child. It shows a line per step and a summary, and ends a run that hangs. However
training ends, it kills the remaining processes and removes the files that they would leave behind. The run's folder is
``OUTPUT_DIR``; everything that verl and Ray print goes to ``train.log`` in it. The exit code is 0, 1 for a failure, or
128 + N for signal N. The run script, and so every user, relies on the command and on its exit codes.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.bapo.host import cleanup
from recipe.bapo.host.files import CONFIG, LOG, RAY_LOGS, keep_earlier, latest_checkpoint, output_folder
from recipe.bapo.host.locks import claim_folder
from recipe.bapo.run import bapo_run, console
from recipe.bapo.run.messages import PIPE
from recipe.bapo.run.watchdog import Watchdog

# Unbuffered (-u), so that the log has the last lines of a killed process.
TRAINING = (sys.executable, "-u", "-m", bapo_run.TRAINING)
PATIENCE = 20.0  # seconds that training on a cluster gets to end by itself and to clean up on the other nodes


def main(arguments: list[str]) -> int:
    """Start training, follow it until it ends, clean up, and report the result. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also when it is redirected to a file
    interruptions = catch_interruptions()
    cleanup.adopt_orphans()
    try:
        run_dir = output_folder(arguments, os.environ, "bapo")
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    os.environ["OUTPUT_DIR"] = str(run_dir)
    try:
        claim = claim_folder(run_dir)  # held until this process ends
        log = keep_earlier(run_dir / LOG)
        log.touch()
    except (OSError, ValueError) as error:
        print(f"Error: invalid run_dir (OUTPUT_DIR)={run_dir}: {error}", file=sys.stderr)
        return 1
    try:
        # For all processes of the run, so that Ray's session and other files do not stay.
        parent = os.path.abspath(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())  # as with Ray
        temporary = tempfile.TemporaryDirectory(prefix="bapo-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        print(f"Error: no temporary folder can be made (RAY_TMPDIR or TMPDIR): {error}", file=sys.stderr)
        return 1
    with temporary as scratch:
        run = TrainingProcess(arguments, run_dir, log, scratch)
        try:
            while run.poll() and not interruptions:
                time.sleep(0.2)
            failure, code = run.result(interruptions)
        finally:
            run.end()
        if failure is not None:
            # Ray makes its folders writable by everybody; cp with this mask copies them without that right. The new
            # session keeps Ctrl-C from interrupting the copy.
            copy = ["cp", "-rT", f"{scratch}/ray/session_latest/logs", str(run_dir / RAY_LOGS)]
            subprocess.run(copy, umask=0o022, stderr=subprocess.DEVNULL, start_new_session=True)
    with suppress(OSError):  # raised if the terminal is gone
        if failure is not None:
            print(f"Error: {failure}\nThe whole output: {log}", file=sys.stderr)
        elif run.config is None:  # Hydra printed its help or the config (--cfg job), and nothing trained
            print(log.read_text())
        else:
            run.show(lambda: print(console.summary(run_dir)))
            if not run.config.trainer.val_only:
                subprocess.run([sys.executable, "-m", "recipe.bapo.run.dynamics", run_dir], stderr=subprocess.STDOUT)
    claim.close()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the terminal is gone: Python would try again at its exit, and end with code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def catch_interruptions() -> list[signal.Signals]:
    """Return a list to which every SIGINT, SIGTERM and SIGHUP is appended from now on.

    The handlers do nothing else. ``main`` ends the run at the first signal, and later ones do not disturb the clean-up.
    """
    caught: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps its meaning
            signal.signal(number, lambda number, _: caught.append(signal.Signals(number)))
    return caught


class TrainingProcess:
    """Training, as a child of this process in a process group of its own, so that Ctrl-C does not reach it.

    Args:
        arguments: the arguments of ``recipe.bapo.main_bapo``.
        run_dir: the run's folder.
        log: the file to which the child's output goes.
        scratch: the folder for temporary files of the child and of its children.
    """

    def __init__(self, arguments: list[str], run_dir: Path, log: Path, scratch: str):
        self.run_dir, self.log = run_dir, log
        self.weights_of_others = cleanup.weights()
        self.errors: list[str] = []
        # These three are None until the checks have passed.
        self.config: Any = None
        self.watchdog: Watchdog | None = None
        self.printer: console.StepPrinter | None = None
        self.trained_at: float | None = None  # by the monotonic clock
        self.display_failed = False
        self.pipe, childs_end = Pipe(duplex=False)
        with childs_end, open(log, "ab") as out:
            self.process = subprocess.Popen(
                [*TRAINING, *arguments],
                env={**os.environ, "TMPDIR": scratch, "RAY_TMPDIR": scratch, PIPE: str(childs_end.fileno())},
                pass_fds=(childs_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                preexec_fn=cleanup.end_with_parent,
            )

    def poll(self) -> bool:
        """Print what is new. Returns False once training has ended, has failed or has to be ended."""
        ended = self.process.poll() is not None  # asked first, so that no message before the end is missed
        messages = []
        with suppress(EOFError, OSError):  # raised if training has closed the pipe, perhaps within a message
            while self.pipe.poll():
                messages.append(self.pipe.recv())
        for message in messages:
            self.handle_message(*message)
        if self.printer is not None:
            self.show(self.printer.print_new)
        if ended or self.watchdog is None:
            return not ended
        if self.trained_at is not None:
            return time.monotonic() - self.trained_at < self.config.watchdog.max_exit_s
        if self.errors:
            self.watchdog.check()  # finds a dead engine, which verl's own error does not mention
            return False
        if not self.watchdog.should_end():
            return True
        self.watchdog.write_stacks(self.process.pid)
        return False

    def show(self, display: Callable[[], object]) -> None:
        """Show something on the console. An error in it does not end the run; only the first one is printed."""
        try:
            display()
        except OSError:  # the terminal is gone
            pass
        except Exception as error:
            if not self.display_failed:
                self.display_failed = True
                with suppress(OSError):
                    print(f"Warning: a part of the display failed ({type(error).__name__}: {error}). The run goes on.")

    def handle_message(self, kind: str, content) -> None:
        """Handle one message from training; ``send`` lists the kinds."""
        if kind == "info":
            self.show(lambda: print(content))
        elif kind == "error":
            self.errors.append(content)
        elif kind == "checked":
            self.config = OmegaConf.load(self.run_dir / CONFIG)
            self.watchdog = Watchdog(self.run_dir, self.config.watchdog, on_cluster=content)
            self.printer = console.StepPrinter(self.run_dir, self.log, self.config.trainer.total_training_steps)
            starting = f"Starting Ray, the trainer and the vLLM servers; this takes 1 to 4 minutes. Log: {self.log}"
            self.show(lambda: print(starting))
        elif kind == "ray" and self.watchdog is not None:
            self.watchdog.job = content
        elif kind == "trained":
            self.trained_at = time.monotonic()

    def result(self, interruptions: list[signal.Signals]) -> tuple[str | None, int]:
        """Return an error message, or None if nothing went wrong, and the exit code."""
        exit_code = self.process.poll()
        if exit_code == 0:
            return None, 0
        if self.trained_at is not None:
            end = f"did not end within {self.config.watchdog.max_exit_s:g} s (watchdog.max_exit_s) and is killed"
            if exit_code is not None:
                end = f"ended with code {exit_code}"
            elif interruptions:
                end = f"is killed after {interruptions[0].name}"
            with suppress(OSError):  # raised if the terminal is gone
                print(f"Training is done, but its process {end}.")
            return None, 0
        if interruptions:
            return f"interrupted by {interruptions[0].name}. {self.how_to_resume()}", 128 + interruptions[0]
        log = console.end_of(self.log)
        if self.watchdog is None:  # the checks have failed, or training ended before they were done
            ended = f"the training process ended with code {exit_code}"
            return "\nError: ".join(self.errors) or "\n".join(log.strip().splitlines()[-6:]) or ended, 1
        first, actor = console.first_error(log), console.dead_actor(log)
        reasons = (
            self.watchdog.reason,
            self.full_disk(),
            f"the worker {actor} has died" if actor else None,
            *self.errors,
            None if self.errors or exit_code is None else f"the training process ended with code {exit_code}",
            f"the first error at the end of the log is {first}" if first else None,
        )
        return f"Training failed: {'; '.join(filter(None, reasons))}. {self.how_to_resume()}", 1

    def how_to_resume(self) -> str:
        """Say which checkpoint is the last, and which settings resume from it."""
        if self.config is None:
            return "Nothing was trained."
        try:
            folder = latest_checkpoint(Path(self.config.trainer.default_local_dir))
        except ValueError as error:  # the last checkpoint is missing
            return str(error)
        if folder is None:
            return "No checkpoint was saved."
        return f"The last checkpoint is {folder}: to resume, use the same OUTPUT_DIR with trainer.resume_mode=auto."

    def full_disk(self) -> str | None:
        """Return a message if a folder of the run has hardly any space left, because the error may not say so."""
        for folder in (self.run_dir, Path(self.config.trainer.default_local_dir)):
            if folder.exists() and (free := shutil.disk_usage(folder).free) < 64 << 20:
                return f"no space left: {folder} has {free / (1 << 20):.1f} MiB free"
        return None

    def end(self) -> None:
        """End every process of the run, and remove the files that they would leave outside its folder."""
        left: set[Path] = set()
        if self.watchdog is not None:
            left = self.watchdog.left_outside()
            if self.watchdog.on_cluster and self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(PATIENCE)
        cleanup.kill_descendants()
        if self.watchdog is not None and not self.watchdog.on_cluster:
            left |= cleanup.unmapped_weights(self.weights_of_others)
        cleanup.remove(left)
        if self.printer is not None:
            self.show(self.printer.close)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
