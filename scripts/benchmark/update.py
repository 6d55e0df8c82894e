# SPDX-License-Identifier: Apache-2.0
"""Time one optimizer update of the real actor (verl's FSDP2 engine) with the monitor and with BAPO.

    .venv/bin/python -m scripts.benchmark.update [--platform gpu] [--json FILE]

For each model size this trains on the same mini-batches with verl's ``vanilla`` loss, with the same monitored, and with
BAPO in each way in which an update may find its bounds: by a forecast that turns out right, by a forward pass before
the update, or by a forecast that turns out wrong, so that the update is redone; and with ``bound_scope=micro_batch``.
The losses take turns in one process: a round makes one update with each. An update's time is divided by the time of
``vanilla`` in the same round. The table shows the median of these ratios, and the range of the middle half of the
rounds. The command fails if even the lower end of the monitor's range is above ``MOST_OF_MONITOR`` with the largest
model.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from tests.support.actor import free_port, make_actor, make_mini_batch

SIZES = {"2 x 64": (2, 64), "4 x 256": (4, 256), "8 x 512": (8, 512)}  # layers x hidden size
ROWS, LONGEST, MICRO = 32, 200, 8
THREADS = 2  # of the CPU
LOSS = "actor_rollout_ref.actor.policy_loss"
BAPO = [f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"]
# This target is met at the start of the ranges, whatever the batch, so bounds at their end are a wrong forecast.
MET = [*BAPO, f"++{LOSS}.positive_contribution_target=0.01"]
# By name: the overrides of verl's own config. ``vanilla`` comes first, and runs in verl's worker.
LOSSES = {
    "vanilla": [],
    "monitor": [f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"],
    "forecast": MET,
    "forward": MET,
    "redone": MET,
    "micro_batch": [*BAPO, f"++{LOSS}.bound_scope=micro_batch"],
}
FORCED = {"forecast": (0, 0), "forward": (1, 0), "redone": (0, 1)}  # extra_forward and redone, as logged
BATCHES = 3
MOST_OF_MONITOR = 1.02


def seconds_of(call):
    """Time ``call`` in seconds, until the device has done its work."""
    import torch

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def force(actor, kind):
    """Have every update of an actor find its bounds in one of the ways of ``FORCED``."""
    from bapo import Forecast, search_clip_bounds

    config = actor.scope.config
    end = dataclasses.replace(config, positive_contribution_target=0.99)

    def forecast(own, first):
        bounds = search_clip_bounds(own, end if kind == "redone" else config)
        return Forecast(bounds, trusted=kind != "forward")

    actor.scope.forecaster.forecast = forecast


def make_actors(folder, layers, hidden, platform):
    """Make an actor for each of ``LOSSES``, all with the same weights, from verl's own config."""
    from scripts.example_task import make_task

    task = Path(folder) / f"{layers}x{hidden}"
    make_task(task, steps=3, layers=layers, hidden=hidden)
    common = [
        f"actor_rollout_ref.model.path={task}/model",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
    ]
    port, actors = free_port(), {}
    for loss, overrides in LOSSES.items():
        actors[loss] = make_actor([*common, *overrides], port=port, platform=platform, stock=True)
        if loss in FORCED:
            force(actors[loss], loss)
    return actors


def measure(folder, layers, hidden, rounds, platform="cpu", longest=LONGEST):
    """Time the updates of one model: seconds of each round by loss, with responses of up to ``longest`` tokens."""
    import torch

    actors = make_actors(folder, layers, hidden, platform)
    torch.set_num_threads(THREADS)  # each of the tests' actors has set one
    batches = [make_mini_batch(actors["vanilla"], seed, rows=ROWS, longest=longest) for seed in range(BATCHES)]
    seconds = {loss: [] for loss in LOSSES}
    for number in range(rounds + 1):
        for loss, actor in actors.items():
            data = batches[number % BATCHES].copy()
            taken = seconds_of(lambda actor=actor, data=data: actor.train_batch(data))
            if number > 0:  # the first round warms up
                seconds[loss].append(taken)
            if loss in FORCED:
                made = tuple(actor.logged[f"actor/bapo/{name}"] for name in ("extra_forward", "redone"))
                assert made == FORCED[loss], (loss, made)
    parameters = sum(p.numel() for p in actors["vanilla"].engine.module.parameters())
    return {"parameters": parameters, "seconds": seconds}


def ratios_to_vanilla(seconds):
    """Divide for each loss the time of an update by the time of ``vanilla`` in the same round."""
    return {
        loss: [own / vanilla for own, vanilla in zip(of_loss, seconds["vanilla"], strict=True)]
        for loss, of_loss in seconds.items()
    }


def main():
    """Time all sizes, print the table, and fail if the monitor costs more than ``MOST_OF_MONITOR``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--platform", default="cpu", help="a file of recipe/bapo/config/platform")
    parser.add_argument("--json", type=Path, help="file for the seconds of every update")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):  # verl prints, too; stdout is for the table
            found = {name: measure(folder, *size, arguments.rounds, arguments.platform) for name, size in SIZES.items()}
    others = [loss for loss in LOSSES if loss != "vanilla"]
    print(f"| model, layers x hidden | parameters | vanilla, s | {' | '.join(others)} |")
    print("|---" * (3 + len(others)) + "|")
    for name, row in found.items():
        ranges = {loss: quantiles(ratios, n=4) for loss, ratios in ratios_to_vanilla(row["seconds"]).items()}
        cells = [f"{ranges[loss][1]:.2f} ({ranges[loss][0]:.2f} to {ranges[loss][2]:.2f})" for loss in others]
        print(f"| {name} | {row['parameters']:,} | {median(row['seconds']['vanilla']):.2f} | {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if ranges["monitor"][0] > MOST_OF_MONITOR:  # of the largest model
        sys.exit(f"the monitor takes {ranges['monitor'][0]:.3f} of vanilla's time or more in three of four rounds")


if __name__ == "__main__":
    main()
