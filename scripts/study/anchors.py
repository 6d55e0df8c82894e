# SPDX-License-Identifier: Apache-2.0
"""A few cells of map B again, so that the maps of small policies are believed or corrected.

The example's model (99,136 weights, a transformer) in one process, every method that the loss can express; and three
of them in the real stack. One staleness, one learning rate. Finished runs are lines of docs/results/anchors_*.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from scripts.study.plan import METHODS, RESULTS, ROOT

MODEL = Path(__file__).parent / "anchor_model"  # the example's after a longer warm-up with few right guesses
DATA = ROOT / "recipe" / "bapo" / "example" / "files"
SEEDS = [1, 2, 3]
LOOP = {"mini_batches": 4, "epochs": 8, "updates": 320, "prompts": 16, "samples": 8, "learning_rate": 1e-3}
LOOP_CLIPS = {"norm_clip": 1.0, "dual_clip": None}
LOOP_METHODS = [method for method in METHODS if method not in ("topr", "balance")]
STACK_METHODS = {"grpo": "grpo", "bapo@0.4": "paper", "widest": "widest"}  # and their file in configs/method
STACK = {"mini_batches": 4, "epochs": 8, "steps": 10, "prompts": 16, "samples": 8, "learning_rate": 1e-3}
WINDOW = 8  # updates; series are means over so many, but for the gradient norm
NO_DUAL_CLIP = 1e9


def check_model() -> None:
    """Raise a CalledProcessError unless the starting model is the stored one."""
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=MODEL, check=True)


def finished(path: Path) -> set[tuple[str, int]]:
    """Method and seed of the runs in a file."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(row["method"], row["seed"]) for row in rows}


def keep(path: Path, row: dict) -> None:
    """Add a finished run."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def windows(values: list[float], size: int) -> list[float | None]:
    """Means over ``size`` values each, to five significant digits; NaN is left out, and None where nothing else is."""
    parts = [[v for v in values[i : i + size] if not math.isnan(v)] for i in range(0, len(values), size)]
    return [float(f"{sum(part) / len(part):.5g}") if part else None for part in parts]


def run_anchors(path: Path = RESULTS / "anchors_loop.jsonl") -> None:
    """The loop's runs, one on each core; ``control`` is GRPO at staleness 1."""
    check_model()
    there = finished(path)
    todo = [(method, seed) for seed in SEEDS for method in LOOP_METHODS if (method, seed) not in there]
    todo += [("control", seed) for seed in SEEDS if ("control", seed) not in there]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, row in enumerate(pool.map(run_in_loop, todo), 1):
            keep(path, row)
            print(f"loop {number}/{len(todo)}  {row['method']} seed {row['seed']}  {row['seconds']:.0f} s", flush=True)


def run_in_loop(run: tuple[str, int]) -> dict:
    """One run of the loop."""
    import torch

    from scripts.study.loop import Settings, train

    torch.set_num_threads(1)
    method, seed = run
    staleness_1 = {"mini_batches": 1, "epochs": 1} if method == "control" else {}
    settings = Settings(**LOOP | LOOP_CLIPS | staleness_1)
    began = time.process_time()
    result = train(MODEL, "grpo" if method == "control" else method, seed, settings)
    columns = {key: [update[key] for update in result.updates] for key in result.updates[0]}
    ended = [0 if update["saturated"] else 1 if update["search_steps"] else 2 for update in result.updates]
    shares = {
        name: ended.count(code) / len(ended) for code, name in enumerate(("out_of_reach", "on_the_way", "at_once"))
    }
    return {
        "method": method,
        "seed": seed,
        "settings": asdict(settings),
        "final_reward": result.final_reward,
        **shares,
        "weights": result.weights,
        "series": {key: windows(values, 1 if key == "grad_norm" else WINDOW) for key, values in columns.items()},
        "seconds": round(time.process_time() - began, 1),
    }


def stack_command(method: str, seed: int, output: Path) -> list[str]:
    """One run of the real stack: staleness from ``ppo_epochs``, dual clip off. Its sampling is not seeded."""
    return [
        "bash",
        "recipe/bapo/run_bapo_example.sh",
        f"method={STACK_METHODS[method]}",
        f"staleness={STACK['mini_batches'] * STACK['epochs']}",
        f"data.train_batch_size={STACK['prompts'] * STACK['mini_batches']}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.n={STACK['samples']}",
        f"actor_rollout_ref.actor.ppo_epochs={STACK['epochs']}",
        f"actor_rollout_ref.actor.optim.lr={STACK['learning_rate']}",
        f"actor_rollout_ref.actor.clip_ratio_c={NO_DUAL_CLIP}",
        f"actor_rollout_ref.actor.policy_loss.token_dump_dir={output}/tokens",  # 9 MB, for the clip report
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",  # one micro-batch an update
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192",
        f"trainer.total_training_steps={STACK['steps']}",
        "trainer.val_before_train=false",
        f"trainer.test_freq={STACK['steps']}",
        "actor_rollout_ref.rollout.val_kwargs.n=8",
    ]


def run_stack(path: Path = RESULTS / "anchors_stack.jsonl") -> None:
    """The real stack's runs, one after the other."""
    check_model()
    there = finished(path)
    todo = [(method, seed) for seed in SEEDS for method in STACK_METHODS if (method, seed) not in there]
    for number, (method, seed) in enumerate(todo, 1):
        began = time.time()
        output = ROOT / "runs" / "study" / f"stack-{method}-{seed}"
        shutil.rmtree(output, ignore_errors=True)  # an earlier try that did not finish
        files = {name: str(DATA / f"{part}.parquet") for name, part in (("TRAIN_FILE", "train"), ("TEST_FILE", "test"))}
        about = {"CONFIG": "replay", "SIZE": "cpu", "VERL_PLATFORM": "cpu", "MODEL_PATH": str(MODEL)}
        environment = {**os.environ, **about, **files, "OUTPUT_DIR": str(output)}
        subprocess.run(stack_command(method, seed, output), cwd=ROOT, env=environment, check=True)
        keep(path, {"method": method, "seed": seed, "settings": STACK, **stack_results(output)})
        print(f"stack {number}/{len(todo)}  {method} seed {seed}  {time.time() - began:.0f} s", flush=True)


def stack_results(output: Path) -> dict:
    """The final reward, and series by step, from what a run of the real stack wrote."""
    from recipe.bapo.records.metrics import read_metrics, validation_reward

    steps = [data for _, data in read_metrics(output) if "training/global_step" in data]
    names = {"reward": "critic/rewards/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm"}
    keys = ("clip_low", "clip_high", "positive_contribution", "positive_contribution_start", "saturated")
    names |= {key: f"actor/bapo/{key}" for key in (*keys, "clipfrac_positive", "clipfrac_negative")}
    series = {key: windows([data[name] for data in steps], 1) for key, name in names.items()}
    return {"final_reward": validation_reward(steps[-1]), "series": series}
