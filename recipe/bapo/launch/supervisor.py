# SPDX-License-Identifier: Apache-2.0
"""A run as its parent process sees it: starts training, follows it, says how it ended, and leaves nothing of it.

``__main__`` calls ``poll`` until it returns False, then ``result``, and ``end`` whatever happens. A new kind of message
from training belongs in ``handle_message``; a new reason to end a run belongs in the watchdog.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from omegaconf import OmegaConf

from recipe.bapo.launch import PIPE, cleanup, console
from recipe.bapo.launch.watchdog import Watchdog
from recipe.bapo.records import latest_checkpoint

PATIENCE = 20.0  # seconds for training on a cluster to end by itself, and to remove what it leaves on other nodes


class Supervisor:
    """Training as a child of this process, in a process group of its own: a terminal's signals do not reach it.

    Args:
        command: of the child.
        run_dir: the run's folder.
        log: the file for all that the child prints.
        scratch: the folder for temporary files of everything below.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log: Path, scratch: str):
        self.run_dir, self.log = run_dir, log
        self.errors: list[str] = []
        self.config = self.watchdog = self.printer = None  # until the checks have passed
        self.trained_at: float | None = None  # by the monotonic clock
        self.pipe, childs_end = Pipe(duplex=False)
        with childs_end, open(log, "ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "TMPDIR": scratch, PIPE: str(childs_end.fileno())},
                pass_fds=(childs_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                preexec_fn=cleanup.end_with_parent,
            )

    def poll(self) -> bool:
        """Show what is new. Returns False once training has ended, has failed or has to be ended."""
        ended = self.process.poll() is not None  # before its last messages are read
        with suppress(EOFError, OSError):  # training has closed the pipe, or the console is gone
            while self.pipe.poll():
                self.handle_message(*self.pipe.recv())
        if self.config is not None:
            with suppress(OSError):
                self.printer.print_new()
        if ended or self.config is None:
            return not ended
        if self.trained_at is not None:
            return time.monotonic() - self.trained_at < self.config.watchdog.max_exit_s
        if self.errors:
            self.watchdog.check()  # verl does not say that an engine has died
            return False
        if not self.watchdog.should_end():
            return True
        self.watchdog.write_stacks(self.process.pid)
        return False

    def handle_message(self, kind: str, content) -> None:
        """What training sends; ``send`` lists the kinds."""
        if kind == "info":
            print(content, flush=True)
        elif kind == "error":
            self.errors.append(content)
        elif kind == "checked":
            path, on_cluster, bounds_can_move = content
            self.config = OmegaConf.load(path)
            self.run_dir = Path(self.config.run_dir)  # the command line may name another one than OUTPUT_DIR
            self.watchdog = Watchdog(self.run_dir, self.config.watchdog, on_cluster)
            total = self.config.trainer.total_training_steps
            self.printer = console.StepPrinter(self.run_dir, total, bounds_can_move)
        elif kind == "ray":
            self.watchdog.job = content
        elif kind == "trained":
            self.trained_at = time.monotonic()

    def result(self, interruptions: list[signal.Signals]) -> tuple[str | None, int]:
        """What went wrong, None if nothing did, and the exit code."""
        exit_code = self.process.poll()
        if exit_code == 0:
            return None, 0
        if interruptions:
            return f"interrupted by {interruptions[0].name}. {self.how_to_resume()}", 128 + interruptions[0]
        if self.trained_at is not None and exit_code is None:
            limit = self.config.watchdog.max_exit_s
            late = f"did not end within {limit:g} s (watchdog.max_exit_s)"
            with suppress(OSError):  # the terminal is gone
                print(f"Training is done, but its process {late}: it is killed.", flush=True)
            return None, 0
        log = self.log.read_text(errors="replace")
        if self.watchdog is None:  # the config is not usable, or training did not come to its checks
            return "\nError: ".join(self.errors) or "\n".join(log.strip().splitlines()[-6:]), 1
        first, actor = console.first_error(log), console.dead_actor(log)
        reasons = (
            self.watchdog.reason,
            self.full_disk(),
            f"the worker {actor} has died" if actor else None,
            *self.errors,
            None if self.errors or exit_code is None else f"the training process ended with code {exit_code}",
            f"the first error in the log is {first}" if first else None,
        )
        return f"Training failed: {'; '.join(filter(None, reasons))}. {self.how_to_resume()}", 1

    def how_to_resume(self) -> str:
        """The last checkpoint, and the settings that resume from it."""
        folder = None
        with suppress(ValueError):  # the last checkpoint is not there
            folder = latest_checkpoint(Path(self.config.trainer.default_local_dir)) if self.config else None
        if folder is None:
            return "No checkpoint was saved."
        return f"The last checkpoint is {folder}: the same OUTPUT_DIR with trainer.resume_mode=auto goes on from it."

    def full_disk(self) -> str | None:
        """Says so if there is hardly any space left for checkpoints; torch's own error would not."""
        folder = Path(self.config.trainer.default_local_dir)
        if not folder.exists() or (free := shutil.disk_usage(folder).free) >= 64 << 20:
            return None
        return f"no space left: {folder} has {free / (1 << 20):.1f} MiB free"

    def end(self) -> None:
        """End every process of the run, and remove what they would leave outside its folder."""
        left = set()
        if self.watchdog is not None:
            left = self.watchdog.left_outside()
            if self.watchdog.on_cluster and self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(PATIENCE)
        cleanup.kill_descendants()
        cleanup.remove(left)
