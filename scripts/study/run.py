# SPDX-License-Identifier: Apache-2.0
"""The study behind docs/results.md: which of the paper's claims hold at the scale of the example's task.

    bash scripts/study/run.sh           everything: runs what is missing, writes tables and pictures of docs/results.md
    bash scripts/study/run.sh loop      the cheap part alone: one process, every method, three stalenesses, five seeds
    bash scripts/study/run.sh stack     the real stack alone: three methods, one staleness, three seeds
    bash scripts/study/run.sh report    tables and pictures from what is in docs/results/

A finished run is a file in docs/results/; a study that was stopped goes on with the next missing one. Plan, analysis
and seeds stand in docs/results.md, written before the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from recipe.bapo.records.metrics import read_metrics, validation_reward
from scripts.study.loop import SEARCH_METRICS, Settings, train
from scripts.study.plan import LOOP, ROOT, STACK, STACK_METHODS, STACK_SEEDS, TASK, WINDOW, loop_runs, run_path
from scripts.study.report import report


def write(path: Path, record: dict) -> None:
    """Write a run's record, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record) + "\n")
    os.replace(unfinished, path)


def is_done(path: Path, settings: dict) -> bool:
    """Whether the run is there.

    Raises:
        ValueError: it was made with other settings.
    """
    if not path.exists():
        return False
    found = json.loads(path.read_text())["settings"]
    if found != settings:
        raise ValueError(f"{path} was made with {found}, not {settings}: remove it to run it anew.")
    return True


def windows(values: list[float], size: int) -> list[float]:
    """Means over ``size`` values each, to five significant digits; NaN is left out, and None where nothing else is."""
    parts = [[v for v in values[i : i + size] if not math.isnan(v)] for i in range(0, len(values), size)]
    return [float(f"{sum(part) / len(part):.5g}") if part else None for part in parts]


def run_loop() -> None:
    """The cheap part, a run on each core."""
    todo = [run for run in loop_runs() if not is_done(run_path("loop", *run), {**LOOP, "staleness": run[1]})]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, line in enumerate(pool.map(run_in_one_process, todo), 1):
            print(f"loop {number}/{len(todo)}  {line}", flush=True)


def run_in_one_process(run: tuple[str, int, int]) -> str:
    """One run of the loop: method, staleness and seed. Returns what to print."""
    import torch

    torch.set_num_threads(1)  # the same sums on every machine
    method, staleness, seed = run
    path, settings = run_path("loop", *run), {**LOOP, "staleness": staleness}
    began = time.time()
    result = train(TASK / "model", method, seed, Settings(**settings))
    columns = {key: [update[key] for update in result.updates] for key in result.updates[0]}
    series = {key: windows(values, 1 if key == "grad_norm" else WINDOW) for key, values in columns.items()}
    record = {"method": method, "seed": seed, "settings": settings, "series": series}
    write(path, {**record, "final_reward": result.final_reward, "weights": result.weights})
    return f"{path.stem}  {time.time() - began:.0f} s"


def run_stack() -> None:
    """The real stack."""
    todo = [(seed, method) for seed in STACK_SEEDS for method in STACK_METHODS]
    for number, (seed, method) in enumerate(todo, 1):
        path = run_path("stack", method, STACK["staleness"], seed)
        if is_done(path, STACK):
            continue
        began = time.time()
        output = ROOT / "runs" / "study" / path.stem
        shutil.rmtree(output, ignore_errors=True)  # an earlier try that did not finish
        command = [
            "bash",
            "recipe/bapo/run_bapo_example.sh",
            f"method={method}",
            f"staleness={STACK['staleness']}",
            f"data.train_batch_size={STACK['prompts'] * STACK['staleness']}",
            f"actor_rollout_ref.rollout.n={STACK['samples']}",
            f"actor_rollout_ref.actor.optim.lr={STACK['learning_rate']}",
            f"trainer.total_training_steps={STACK['steps']}",
            f"data.seed={seed}",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",  # one micro-batch an update, and larger ones
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",  # for the old log-probs: faster
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192",
            "trainer.val_before_train=false",
            f"trainer.test_freq={STACK['steps']}",
            "actor_rollout_ref.rollout.val_kwargs.n=8",
        ]
        environment = {
            "CONFIG": "replay",
            "SIZE": "cpu",
            "VERL_PLATFORM": "cpu",
            "OUTPUT_DIR": str(output),
            "MODEL_PATH": str(TASK / "model"),
            "TRAIN_FILE": str(TASK / "train.parquet"),
            "TEST_FILE": str(TASK / "test.parquet"),
        }
        subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True)
        steps = [data for _, data in read_metrics(output) if "training/global_step" in data]
        names = {
            "reward": "critic/rewards/mean",
            "entropy": "actor/entropy",
            "grad_norm": "actor/grad_norm",
            **{key: f"actor/bapo/{key}" for key in ("clip_low", "clip_high", *SEARCH_METRICS)},
        }
        series = {key: windows([data[name] for data in steps], 1) for key, name in names.items()}
        record = {"method": method, "seed": seed, "settings": STACK, "series": series}
        write(path, {**record, "final_reward": validation_reward(steps[-1])})
        print(f"stack {number}/{len(todo)}  {path.stem}  {time.time() - began:.0f} s", flush=True)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=["all", "loop", "stack", "report"])
    part = parser.parse_args().part
    if part in ("all", "loop"):
        run_loop()
    if part in ("all", "stack"):
        run_stack()
    if part in ("all", "report"):
        report()


if __name__ == "__main__":
    main()
