# SPDX-License-Identifier: Apache-2.0
"""Train the runs of the study on the language model, so that a stopped run can be resumed."""

import fcntl
import hashlib
import os
import subprocess
import time
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.bapo.language_model.task import draw_rows
from scripts.study import updates
from scripts.study.model import device_of_this_machine
from scripts.study.plan import SOURCES, Run, is_complete

PROMPTS = 8  # prompts of an update; each has ``updates.SAMPLES`` responses
HELD_OUT_ITEMS = 512  # items, each answered once before training and after every rollout batch


class Training:
    """A run in progress: model, optimizer, generator and the rows so far. ``state`` is the file of its state."""

    def __init__(self, run: Run, model_folder: Path, state: Path):
        self.run, self.state = run, state
        torch.manual_seed(run.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        device = device_of_this_machine()
        self.model.to(device)
        if run.precision == "bfloat16":
            # One context for each forward: autocast keeps the converted weights until its context ends, so in a longer
            # one an optimizer step would not be seen.
            self.model.forward = torch.autocast(device.type, torch.bfloat16)(self.model.forward)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=float(run.learning_rate), weight_decay=0.01)
        self.generator = torch.Generator(device).manual_seed(run.seed)
        self.rows: list[dict] = []
        self.weights = hash_of_weights(model_folder)
        if state.exists():
            kept = torch.load(state, map_location="cpu")
            if kept["weights"] != self.weights:
                raise SystemExit(f"Error: {state} was begun from other weights than {model_folder}: remove it.")
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.generator.set_state(kept["generator"])
            self.rows = kept["rows"]

    @property
    def rollouts_done(self) -> int:
        """Number of rollout batches on which all updates were made."""
        return self.rows[-1]["rollout"] + 1 if self.rows else 0

    def train_on_one_batch(self) -> None:
        """Sample a rollout batch, make its updates, measure the held-out reward, and save the state."""
        number, (mini_batches, epochs) = self.rollouts_done, SOURCES[self.run.source]
        before = self._held_out_reward(torch.Generator(self.model.device).manual_seed(0)) if number == 0 else None
        # The prompts of a rollout batch depend only on seed and number, so all methods get the same.
        items = list(draw_rows(f"study-{self.run.seed}-{number}", PROMPTS * mini_batches))
        rows = [row for row in items for _ in range(updates.SAMPLES)]
        rollouts = updates.sample(self.model, self.tokenizer, rows, self.generator)
        parts = torch.arange(len(rollouts.ids)).split(PROMPTS * updates.SAMPLES)
        old = [updates.log_probs(self.model, rollouts.rows(part)) for part in parts]
        for place in range(epochs * mini_batches):
            began, part = time.monotonic(), place % mini_batches
            mini_batch = rollouts.rows(parts[part])
            measured = updates.make_update(self.model, self.optimizer, mini_batch, old[part], self.run.method)
            place_of = {"rollout": number, "update": len(self.rows), "place": place, "epoch": place // mini_batches}
            self.rows.append(vars(self.run) | place_of | measured | {"seconds": time.monotonic() - began})
        if number == 0:
            self.rows[0]["held_out_before"] = before
        self.rows[-1]["held_out_reward"] = self._held_out_reward(self.generator)
        self.save_state()

    def _held_out_reward(self, generator):
        items = list(draw_rows("held-out", HELD_OUT_ITEMS))
        return updates.sample(self.model, self.tokenizer, items, generator).rewards.mean().item()

    def save_state(self) -> None:
        """Write the state in one piece, so that a kill leaves the old or the new one."""
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rows": self.rows}
        kept |= {"generator": self.generator.get_state(), "weights": self.weights}
        self.state.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.state.with_suffix(".unfinished")
        torch.save(kept, unfinished)
        unfinished.replace(self.state)


def hash_of_weights(model_folder: Path) -> str:
    """Return the SHA-256 of a model's file of weights."""
    with (model_folder / "model.safetensors").open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()


@cache
def commit_of_this_process() -> str:
    """Return the commit at the first call. Later commits do not change the code that this process has loaded."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def write_rows(rows: list[dict], path: Path, metadata: dict[str, str]) -> None:
    """Write a run's rows as parquet, with metadata such as command and commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pandas(pd.DataFrame(rows), preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
    unfinished = path.with_suffix(".unfinished")
    pyarrow.parquet.write_table(table, unfinished, compression="zstd")
    unfinished.replace(path)


def make_run(run: Run, model_folder: Path, results: Path, states: Path) -> None:
    """Start or resume a run, and train it to its end."""
    path = results / f"{run.name}.parquet"
    states.mkdir(parents=True, exist_ok=True)
    with (states / f"{run.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{run.name} is already running in another process.")
            return
        state = states / f"{run.name}.pt"
        if is_complete(run, path):
            print(f"{run.name} is complete: {path}")
        else:
            _train_to_the_end(run, model_folder, path, state)
        state.unlink(missing_ok=True)
        Path(lock.name).unlink()


def _train_to_the_end(run, model_folder, path, state):
    training = Training(run, model_folder, state)
    metadata = {
        "command": f"python -m scripts.study run {run.name}",
        "commit": commit_of_this_process(),
        "weights": training.weights,
        "model": model_folder.parent.name,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": str(training.model.device),
    }
    while training.rollouts_done < run.rollouts:
        training.train_on_one_batch()
        print(progress_line(training), flush=True)
        write_rows(training.rows, path, metadata)
    write_rows(training.rows, path, metadata)  # again, in case it was stopped between its last batch and the write


def progress_line(training: Training) -> str:
    """Format one line after a rollout batch: the held-out reward, and the figures of the batch's last update."""
    last, name = training.rows[-1], training.run.name
    return (
        f"{name}  rollout {training.rollouts_done}/{training.run.rollouts}  reward {last['reward']:.3f}  held out "
        f"{last['held_out_reward']:.3f}  clipped {last['clipfrac_positive']:.3f} of A > 0 and "
        f"{last['clipfrac_negative']:.3f} of A < 0  rho {last['bapo_positive_contribution_start']:.3f}  "
        f"{last['seconds']:.1f} s an update  load {os.getloadavg()[0]:.1f}"
    )
