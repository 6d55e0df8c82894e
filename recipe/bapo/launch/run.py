"""One run as the process that launched it sees it: what it is told, what it finds, what it says at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf

from recipe.bapo.launch import console, tree
from recipe.bapo.launch.live import StepPrinter
from recipe.bapo.launch.watchdog import Watchdog
from recipe.bapo.records import CONFIG
from recipe.bapo.records.checkpoints import latest_checkpoint
from recipe.bapo.records.leftovers import remove
from recipe.bapo.records.messages import PIPE

PATIENCE = 20.0  # seconds for training on a cluster to end of itself, and to remove what it leaves on other nodes
FEW = 6  # lines of the log, where nobody said what is wrong


class Run:
    """Training as a child of this process.

    Args:
        command: of the child.
        run_dir: the run's folder.
        log: the file for all that the child prints.
        scratch: the folder for temporary files of everything below.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log: Path, scratch: Path):
        self.run_dir, self.log, self.began = run_dir, log, time.time()
        self.errors: list[str] = []
        self.config = None  # this and the two below: once the checks have passed
        self.watchdog: Watchdog | None = None
        self.printer: StepPrinter | None = None
        self.cluster = self.trained = False
        self.unread = b""
        self.pipe, of_child = os.pipe()
        os.set_blocking(self.pipe, False)
        environment = {**os.environ, "TMPDIR": str(scratch), PIPE: str(of_child)}
        with open(log, "ab") as out:
            self.process = tree.start(command, stdout=out, stderr=out, env=environment, pass_fds=(of_child,))
        os.close(of_child)

    def goes_on(self) -> bool:
        """Show what is new; false once training has ended, has failed or has to be ended."""
        ended = self.process.poll() is not None  # before what it told last is read
        with suppress(BlockingIOError):
            while found := os.read(self.pipe, 1 << 16):
                self.unread += found
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            self.take(**json.loads(line))
        if self.printer is not None:
            with suppress(OSError):  # a console that is gone does not end the run
                self.printer.print_new()
        if ended or self.trained or self.watchdog is None:
            return not ended
        if self.errors:
            self.watchdog.last_look()  # Ray is up for it: records.messages.wait_to_be_ended
            return False
        if self.watchdog.is_time_to_end():
            self.watchdog.write_stacks(self.process.pid)
            return False
        return True

    def take(self, say=None, error=None, training=None, ray=None, trained=False) -> None:
        """What training tells; ``records.messages.tell`` says what each means."""
        self.trained |= trained
        if say is not None:
            with suppress(OSError):
                self.printer.show(say) if self.printer is not None else print(say, flush=True)
        if error is not None:
            self.errors.append(error)
        if training is not None:
            self.cluster = training["cluster"]
            self.config = OmegaConf.load(training["config"])
            self.run_dir = Path(self.config.run_dir)  # as the command line has it
            self.watchdog = Watchdog(self.run_dir, **self.config.watchdog)
            self.printer = StepPrinter(self.run_dir, self.config.trainer.total_training_steps, sys.stdout, self.began)
        if ray is not None:
            self.watchdog.ray_is_up(**ray)

    def verdict(self, interruption: signal.Signals | None) -> tuple[str | None, int]:
        """What went wrong, if anything, and the exit code."""
        ended = self.process.poll()
        if ended == 0:
            return None, 0
        if interruption is not None:
            return f"interrupted by {interruption.name}. {self.where_to_go_on()}", 128 + interruption
        log = self.log.read_text(errors="replace")
        if self.watchdog is None:
            return "\nError: ".join(self.errors) or "\n".join(log.strip().splitlines()[-FEW:]), 1
        first = console.first_error(log)
        reasons = (
            self.watchdog.reason,
            self.full_disk(),
            *self.errors,
            None if self.errors or ended is None else f"the training process ended with code {ended}",
            f"the first error in the log is {first}" if first else None,
        )
        return f"Training failed: {'; '.join(filter(None, reasons))}. {self.where_to_go_on()}", 1

    def where_to_go_on(self) -> str:
        """The last checkpoint, and how to go on from it."""
        folder = None
        with suppress(ValueError, FileNotFoundError):  # before the checks: what an earlier start saved here
            config = self.config or OmegaConf.load(self.run_dir / CONFIG)
            folder = latest_checkpoint(Path(config.trainer.default_local_dir))
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
        if self.printer is not None:
            self.printer.close()
        if not self.cluster:
            tree.suspend_below()  # so that no shared memory is made while we look
        left = self.watchdog.leftovers() if self.watchdog is not None else set()
        if self.cluster and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        tree.end_below()
        remove(left)
