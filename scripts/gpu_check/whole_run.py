# SPDX-License-Identifier: Apache-2.0
"""Stage 3 of scripts/gpu_check.sh: the example on the real stack (Ray, FSDP2, vLLM), then replay, then two jobs of one
Ray cluster at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from recipe.bapo.records.metrics import read_metrics
from scripts.benchmark.actor_process import free_port
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

    def call(self, script, *arguments, **environment):
        """A script of the repository, started."""
        return subprocess.Popen(
            ["bash", script, *arguments],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )

    def start(self, name, *arguments, **environment):
        """A run that writes into the folder ``name``."""
        arguments = ("actor_rollout_ref.actor.strategy=fsdp2", *arguments)
        environment = {"OUTPUT_DIR": str(self.folder / name), **environment}
        return self.call("recipe/bapo/run_bapo_example.sh", *arguments, **environment)

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


def two_jobs_at_once(table: Table):
    """Of one cluster: two runs with a Ray each are refused (docs/log.md)."""
    if not table.rehearsal and torch.cuda.device_count() < 2:
        return table.tell("two jobs at once", "needs two GPUs")
    with tempfile.TemporaryDirectory(prefix="bapo", dir="/tmp") as folder:  # a short path: Ray's sockets lie in it
        runs, port, dashboard = Runs(folder, table.rehearsal), free_port(), free_port()
        cluster = {"RAY_AUTH_TOKEN_PATH": f"{folder}/token", "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        options = (f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}/ray")
        options += ("--node-ip-address=127.0.0.1",)
        head = runs.call("scripts/cluster/ray.sh", "head", *options, **cluster, GPUS_PER_NODE="2")
        try:
            code = runs.end(runs.call("scripts/cluster/ray.sh", "wait", "1", **cluster))
            table.check("a Ray cluster on this machine: exit code", 0, code, code == 0)
            if code == 0:
                jobs = {name: runs.start(name, *SHORT, **cluster) for name in ("job-1", "job-2")}
                for name, code in {name: runs.end(job) for name, job in jobs.items()}.items():
                    look_at(table, runs, name, code)
        finally:
            head.terminate()
            runs.end(head, 120)


CHECKS = (the_example_and_replay, two_jobs_at_once)

if __name__ == "__main__":
    sys.exit(main("3", CHECKS))
