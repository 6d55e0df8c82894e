# SPDX-License-Identifier: Apache-2.0
"""Stage 3 of scripts/gpu_check.sh: the example on the real stack (Ray, FSDP2, vLLM), then replay, then two at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from recipe.bapo.records.metrics import read_metrics
from scripts.gpu_check.table import ROOT, Table, main

EXAMPLE = ROOT / "recipe" / "bapo" / "example" / "files"
STEPS = 3
UPDATES = 8  # per rollout batch
MAX_DIFFERENCE = 0.02  # mean, between the probabilities of the trainer and of vLLM, where both hold the same weights
SHORT = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false")


class Runs:
    """Starts ``run_bapo_example.sh`` with the example's tiny model and data, with this Python's environment."""

    def __init__(self, folder, rehearsal):
        self.folder = Path(folder)
        self.environment = {
            key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "RAY_ADDRESS")
        }
        self.environment |= {
            "BAPO_VENV": sys.prefix,
            "SIZE": "cpu",
            "GPUS_PER_NODE": "1",
            "MODEL_PATH": f"{EXAMPLE}/model",
            "TRAIN_FILE": f"{EXAMPLE}/train.parquet",
            "TEST_FILE": f"{EXAMPLE}/test.parquet",
        }
        if rehearsal:
            self.environment["VERL_PLATFORM"] = "cpu"

    def start(self, name, *arguments, inside=(), **environment):
        """A run that writes into the folder ``name``, started by the command ``inside``."""
        script = ["bash", "recipe/bapo/run_bapo_example.sh", "actor_rollout_ref.actor.strategy=fsdp2"]
        return subprocess.Popen(
            [*inside, *script, *arguments],
            cwd=ROOT,
            env={**self.environment, "OUTPUT_DIR": str(self.folder / name), **environment},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )

    @staticmethod
    def end(process, patience=1800):
        """Its exit code; a run that takes too long is interrupted, and cleans up."""
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait(120)


def look_at(table: Table, runs: Runs, name, code):
    """Rows of a run that has ended."""
    table.check(f"{name}: exit code", 0, code, code == 0)
    steps = [data for _, data in read_metrics(runs.folder / name) if "training/global_step" in data]
    table.check(f"{name}: steps", STEPS, len(steps), len(steps) == STEPS)
    record = runs.folder / name / "bounds" / "rank0.jsonl"
    updates = len(record.read_text().splitlines()) if record.exists() else 0
    table.check(f"{name}: updates with recorded bounds", STEPS * UPDATES, updates, updates == STEPS * UPDATES)
    if not steps:
        return
    # The last step's rollouts were sampled after weights were sent twice.
    off = steps[-1].get("training/rollout_probs_diff_mean", float("nan"))
    what = f"{name}: probabilities, trainer's less vLLM's, last step"
    table.check(what, f"below {MAX_DIFFERENCE}", f"{off:.1e}", off < MAX_DIFFERENCE)
    rho = [data["actor/bapo/positive_contribution"] for data in steps]
    table.check(
        f"{name}: rho by step", "between 0 and 1", [f"{value:.3f}" for value in rho], all(0 < x < 1 for x in rho)
    )
    memory = steps[-1].get("perf/max_memory_allocated_gb", float("nan"))
    table.tell(f"{name}: last step, s; peak memory, GB", f"{steps[-1]['timing_s/step']:.1f}; {memory:.1f}")


def the_example_and_replay(table: Table):
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder, table.rehearsal)
        code = runs.end(runs.start("preflight", *SHORT, "--preflight"))
        table.check("preflight: exit code", 0, code, code == 0)
        look_at(table, runs, "example", runs.end(runs.start("example", *SHORT)))
        replay = runs.start("replay", f"staleness={UPDATES}", *SHORT, CONFIG="replay")
        look_at(table, runs, "replay", runs.end(replay))


def two_at_once(table: Table):
    """Each with a /tmp of its own, without which the second is refused, and on a GPU of its own."""
    if not table.rehearsal and torch.cuda.device_count() < 2:
        return table.tell("two runs at once", "needs two GPUs")
    apart = ("bash", "scripts/apart.sh")
    if subprocess.run([*apart, "true"], cwd=ROOT, capture_output=True).returncode:
        return table.tell("two runs at once", "this machine lets nobody make namespaces")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        runs = Runs(folder, table.rehearsal)
        both = [runs.start(f"GPU {gpu}", *SHORT, inside=apart, CUDA_VISIBLE_DEVICES=str(gpu)) for gpu in (0, 1)]
        for gpu, code in enumerate([runs.end(run) for run in both]):
            look_at(table, runs, f"GPU {gpu}", code)


CHECKS = (the_example_and_replay, two_at_once)

if __name__ == "__main__":
    sys.exit(main("3", CHECKS))
