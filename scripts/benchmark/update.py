# SPDX-License-Identifier: Apache-2.0
"""What finding the bounds adds to one optimizer update of the real actor (verl's FSDP2 engine).

    .venv/bin/python -m scripts.benchmark.update [--platform gpu] [--json FILE]

For several model sizes an update is timed in one process with the pass (a forward without gradient over the mini-batch)
and, as the trainer marks a batch whose ratios are 1, without it. The search with its all-reduce and read is in both.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.actor import free_port, make_actor, make_mini_batch

SIZES = {"2 x 64": (2, 64), "4 x 256": (4, 256), "8 x 512": (8, 512)}  # layers x hidden size
ROWS, LONGEST, MICRO = 32, 200, 8


def seconds_of(call, repeats):
    """Median seconds of ``call`` after one call to warm up."""
    import torch

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def seconds_of_updates(actor, data, repeats):
    """Seconds of an update with the pass, and of one that is marked as at ratio 1, without it."""

    def update(ratios_are_1):
        actor.ratios_are_1 = ratios_are_1
        actor.train_batch(data)

    return {
        "with the pass": seconds_of(lambda: update(False), repeats),
        "without": seconds_of(lambda: update(True), repeats),
    }


def measure(folder, layers, hidden, repeats, platform="cpu", longest=LONGEST):
    """Seconds of one update of one model, with responses of up to ``longest`` tokens."""
    from scripts.example_task import make_task

    task = Path(folder) / f"{layers}x{hidden}"
    make_task(task, steps=3, layers=layers, hidden=hidden)
    actor = make_actor(
        [
            f"actor_rollout_ref.model.path={task}/model",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        ],
        port=free_port(),
        platform=platform,
    )
    data = make_mini_batch(actor, seed=1, rows=ROWS, longest=longest)

    return {
        "weights": sum(p.numel() for p in actor.engine.module.parameters()),
        **seconds_of_updates(actor, data, repeats),
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--platform", default="cpu", help="a file of recipe/bapo/config/platform")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):  # what verl prints is not the table
            found = {
                name: measure(folder, *size, arguments.repeats, arguments.platform) for name, size in SIZES.items()
            }
    print("| model, layers x hidden | weights | update with the pass, s | update without, s | pass / update without |")
    print("|---|---|---|---|---|")
    for name, row in found.items():
        a, b = row["with the pass"], row["without"]
        print(f"| {name} | {row['weights']:,} | {a:.2f} | {b:.2f} | {(a - b) / b:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
