# SPDX-License-Identifier: Apache-2.0
"""Run the example in one process with many seeds.

From the results we chose the example's settings and the ranges that its test allows, and we describe it by them.

python -m scripts.study.example 1 20        # seeds 1 to 20; adds lines to docs/results/example_loop.jsonl
"""

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from omegaconf import OmegaConf

from bapo import BAPOConfig
from scripts.study.loop import Settings, train
from scripts.study.methods import config_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "example_loop.jsonl"
MODEL = ROOT / "recipe" / "bapo" / "example" / "files" / "model"


def example_settings() -> tuple[BAPOConfig, Settings]:
    """Return BAPO's options and the settings of ``SIZE=cpu_example``."""
    primary = ROOT / "recipe" / "bapo" / "config" / "bapo_trainer.yaml"
    sizes = [ROOT / "configs" / "size" / f"{name}.yaml" for name in ("cpu", "cpu_example")]
    config = OmegaConf.merge(*map(OmegaConf.load, (primary, *sizes)))
    actor = config.actor_rollout_ref.actor
    mini_batches = config.data.train_batch_size // actor.ppo_mini_batch_size
    return config_of("cpu_example"), Settings(
        mini_batches=mini_batches,
        epochs=actor.ppo_epochs,
        updates=config.trainer.total_training_steps * actor.ppo_epochs * mini_batches,
        prompts=actor.ppo_mini_batch_size,
        samples=config.actor_rollout_ref.rollout.n,
        learning_rate=actor.optim.lr,
        dual_clip=actor.clip_ratio_c,
    )


def run(seed: int) -> dict:
    """Make one run.

    Returns how its updates met the target, how bounds moved rho, and reward, entropy and mean bounds of each step.
    """
    config, settings = example_settings()
    result = train(MODEL, config, seed, settings)
    updates, per_step = result.updates, settings.mini_batches * settings.epochs
    never = [update["saturated"] for update in updates]
    at_once = [float(update["search_steps"] == 0 and not update["saturated"]) for update in updates]
    lifts = [update["positive_contribution"] - update["positive_contribution_start"] for update in updates]
    starts = [update["positive_contribution_start"] for update in updates]
    return {
        "seed": seed,
        "at_once": mean(at_once),
        "on_the_way": mean([1 - once - out for once, out in zip(at_once, never, strict=True)]),
        "out_of_reach": mean(never),
        "rho_start": mean(starts),
        "lift": mean(lifts),
        "final_reward": round(result.final_reward, 4),
        "rewards": by_step(updates, "reward", per_step),
        "entropies": by_step(updates, "entropy", per_step),
        "clip_low": by_step(updates, "low", per_step),
        "clip_high": by_step(updates, "high", per_step),
    }


def mean(values: list[float]) -> float:
    """Return the mean, rounded to four decimals."""
    return round(sum(values) / len(values), 4)


def by_step(updates: list[dict], key: str, per_step: int) -> list[float]:
    """Average over the updates of each rollout batch."""
    values = [update[key] for update in updates]
    return [mean(values[i : i + per_step]) for i in range(0, len(values), per_step)]


def main():
    """Run the command with first and last seed. Seeds that are already in the file are skipped."""
    torch.set_num_threads(1)
    first, last = map(int, sys.argv[1:])
    config, settings = example_settings()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    about = {"commit": commit.stdout.strip(), "date": str(date.today()), "torch": torch.__version__}
    about |= {"settings": asdict(settings), "switches": asdict(config)}
    for seed in range(first, last + 1):
        there = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        if seed not in {json.loads(line)["seed"] for line in there}:
            row = run(seed)
            with open(RESULTS, "a") as file:
                file.write(json.dumps(row | about) + "\n")
            print(seed, *(f"{key} {row[key]}" for key in ("at_once", "on_the_way", "out_of_reach", "lift")), flush=True)


if __name__ == "__main__":
    main()
