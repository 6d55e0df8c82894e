# SPDX-License-Identifier: Apache-2.0
"""Run the study on the language model. A run can be stopped at any time and resumed by its name.

    .venv/bin/python -m scripts.study.language_model list
    .venv/bin/python -m scripts.study.language_model run [NAME ...] [--threads 1]
    .venv/bin/python -m scripts.study.language_model table
    MODEL_PATH=/models/mine .venv/bin/python -m scripts.study.language_model run

``run`` makes all runs of both stages that are not complete, one after the other, or those that you name. It uses a GPU
if there is one (not tried yet; VERL_PLATFORM=cpu prevents it). On a CPU start it once for each core, with ``--threads
1``: no two processes make the same run. Task and model come from ``recipe/bapo/language_model``. With MODEL_PATH
another model is warmed up for the same task and trained; its rows go to a folder of its own in runs/study.

After each rollout batch a run writes its rows to docs/results/language_model/NAME.parquet, and its state (weights,
optimizer, generator) to .cache/study/NAME.pt. The state has 12 bytes a weight and is removed when the run is complete.
The same command resumes a stopped run. The plan is docs/dev/plan_language_model.md.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.bapo.language_model.task import draw_rows
from scripts.study import language_model_updates as updates
from scripts.study.warmed_up_model import cache_of, device_of_this_machine, warmed_up_model

ROWS, STATES = Path("docs/results/language_model"), Path(".cache/study")
PROMPTS = 8  # prompts of an update; each has ``updates.SAMPLES`` responses
HELD_OUT_ITEMS = 512  # items, each answered once before training and after every rollout batch
# Mini-batches of a rollout batch, and epochs on it. Both make 16 updates on each rollout batch.
SOURCES = {"epochs": (4, 4), "batches": (16, 1)}


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        method: the name of a file in configs/method, or of a loss of verl in ``scripts.study.methods``.
        source: a key of ``SOURCES``.
        learning_rate: learning rate of AdamW, constant.
        seed: seed of the prompts and of the sampling.
        rollouts: number of rollout batches; each has 16 updates.
        precision: ``float32``, or ``bfloat16`` for autocast, as in verl: the weights stay in float32, matrices are
            multiplied in bfloat16.
    """

    method: str
    source: str
    learning_rate: str
    seed: int
    rollouts: int = 6
    precision: str = "bfloat16"

    @property
    def name(self) -> str:
        """The name of the run on the command line."""
        return f"{self.method}-{self.source}-{self.learning_rate}-seed{self.seed}"


# Stage (a): measure how much is clipped, and how often rho is below the target, at each source of staleness.
STAGE_A = [Run("grpo", "epochs", "1e-5", 1, precision="float32"), Run("grpo", "batches", "1e-5", 1)]
# Stage (b): compare methods. All methods of a seed come before the next seed, so that whole blocks can be compared.
METHODS = ("grpo", "high_only", "bapo", "gspo")
IN_FLOAT32 = (12, 13, 14)  # seeds made on a machine without processor instructions for bfloat16
STAGE_B = [
    Run(method, "epochs", "1e-5", seed, rollouts=4, precision="float32" if seed in IN_FLOAT32 else "bfloat16")
    for seed in range(12, 18)
    for method in METHODS
]
# Runs of stage (b) that are not compared: of its first version (seed 2), and of a machine that was lost (seed 11).
NOT_COMPARED = [
    Run("grpo", "epochs", "1e-5", 2, rollouts=4, precision="float32"),
    Run("high_only", "epochs", "1e-5", 2, rollouts=2, precision="float32"),
    Run("grpo", "epochs", "1e-5", 11, rollouts=4),
    Run("high_only", "epochs", "1e-5", 11, rollouts=4),
]
# GRPO at twice the learning rate, with seeds of stage (b).
CONTROLS = [replace(run, learning_rate="2e-5") for run in STAGE_B if run.method == "grpo" and run.seed in (12, 13)]
PLANNED = STAGE_A + STAGE_B + NOT_COMPARED + CONTROLS


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


def runs_named(names: list[str]) -> list[Run]:
    """Return the planned runs with these names. No name: the runs of both stages."""
    planned = {run.name: run for run in PLANNED}
    for name in names:
        if name not in planned:
            raise SystemExit(f"Error: no run {name} is planned: choose from {', '.join(planned)}.")
    return [planned[name] for name in names] or STAGE_A + STAGE_B


def make_run(run: Run, model_folder: Path, results: Path = ROWS, states: Path = STATES) -> None:
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
        "command": f"python -m scripts.study.language_model run {run.name}",
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


def is_complete(run: Run, path: Path) -> bool:
    """Whether the file has the rows of all rollout batches."""
    return path.exists() and pd.read_parquet(path, columns=["rollout"])["rollout"].max() + 1 == run.rollouts


def main() -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run", "table"])
    parser.add_argument("names", nargs="*", help="for `run`: names (default: all runs of both stages)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    given = os.environ.get("MODEL_PATH")
    name = f"{Path(given).name}-{cache_of(given).name}" if given else ""  # two models may have the same folder name
    results, states = (Path("runs/study") / name if given else ROWS), STATES / name
    if arguments.command == "table":
        from scripts.study.language_model_tables import print_tables

        print_tables(results)
        return 0
    if arguments.command == "list":
        for run in PLANNED:
            print("complete" if is_complete(run, results / f"{run.name}.parquet") else "to do   ", run.name)
        return 0
    runs = runs_named(arguments.names)  # before a model is warmed up
    torch.set_num_threads(arguments.threads)
    try:
        folder = warmed_up_model(given)
    except (ValueError, OSError) as error:
        prefix = f"MODEL_PATH={given} is not usable; give a model of Hugging Face: " if given else ""
        print(f"Error: {prefix}{error}", file=sys.stderr)
        return 1
    commit_of_this_process()
    for run in runs:
        make_run(run, folder, results, states)
    return 0


if __name__ == "__main__":
    sys.exit(main())
