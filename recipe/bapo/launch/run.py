# SPDX-License-Identifier: Apache-2.0
"""One run as the process that launched it sees it: what it is told, what it finds, what it says at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from omegaconf import OmegaConf

from recipe.bapo.launch import console, tree
from recipe.bapo.launch.live import StepPrinter
from recipe.bapo.launch.watchdog import Watchdog
from recipe.bapo.records import CONFIG
from recipe.bapo.records.checkpoints import latest_checkpoint
from recipe.bapo.records.leftovers import leftovers, remove
from recipe.bapo.records.messages import PIPE

PATIENCE = 20.0  # seconds for training on a cluster to end of itself, and to remove what it leaves on other nodes


class Run:
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
        self.config = self.watchdog = None  # until the checks have passed
        self.cluster = self.trained = False
        self.printer = StepPrinter(sys.stdout, since=time.time())
        self.pipe, of_child = Pipe(duplex=False)
        with of_child, open(log, "ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "TMPDIR": scratch, PIPE: str(of_child.fileno())},
                pass_fds=(of_child.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                preexec_fn=tree.end_with_parent,
            )

    def goes_on(self) -> bool:
        """Show what is new; false once training has ended, has failed or has to be ended."""
        ended = self.process.poll() is not None  # before what it told last is read
        with suppress(EOFError, OSError):  # it has closed the pipe, or the console is gone
            while self.pipe.poll():
                self.take(*self.pipe.recv())
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

    def take(self, kind: str, what) -> None:
        """What training tells (``records.messages.tell``)."""
        if kind == "say":
            self.printer.show(what)
        elif kind == "error":
            self.errors.append(what)
        elif kind == "training":
            path, self.cluster = what
            self.config = OmegaConf.load(path)
            self.run_dir = Path(self.config.run_dir)  # as the command line has it
            self.watchdog = Watchdog(self.run_dir, **self.config.watchdog)
            switches = self.config.actor_rollout_ref.actor.policy_loss
            searches = any(
                switches.get(f"ratio_{side}_start") != switches.get(f"ratio_{side}_max") for side in ("lower", "upper")
            )
            self.printer.begin(self.run_dir, self.config.trainer.total_training_steps, searches)
        elif kind == "ray":
            self.watchdog.ray_is_up(*what)
        elif kind == "trained":
            self.trained = True

    def verdict(self, interruptions: list[signal.Signals]) -> tuple[str | None, int]:
        """What went wrong, if anything, and the exit code."""
        ended = self.process.poll()
        if ended == 0:
            return None, 0
        if interruptions:
            return f"interrupted by {interruptions[0].name}. {self.where_to_go_on()}", 128 + interruptions[0]
        log = self.log.read_text(errors="replace")
        if self.watchdog is None:
            return "\nError: ".join(self.errors) or "\n".join(log.strip().splitlines()[-6:]), 1
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
        with suppress(OSError):
            self.printer.close()
        if not self.cluster:
            tree.suspend_below()  # so that no shared memory is made while we look
        left = set()
        if self.watchdog is not None:
            left = self.watchdog.shared_memory | leftovers(self.watchdog.job, self.watchdog.processes())
        if self.cluster and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        tree.end_below()
        remove(left)
