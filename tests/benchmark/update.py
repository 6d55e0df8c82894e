# SPDX-License-Identifier: Apache-2.0
"""Time one optimizer update of the real actor (verl's FSDP2 engine) with the monitor and with BAPO.

    .venv/bin/python -m tests.benchmark.update [--platform gpu] [--json FILE]
    .venv/bin/python -m tests.benchmark.update --platform gpu --model Qwen/Qwen2.5-0.5B [OVERRIDE...]

For each model size, or for the given model, this trains on the same mini-batches with verl's ``vanilla`` loss, with the
same monitored, and with BAPO in each way in which an update may find its bounds: by a forecast that turns out right, by
a forward pass before the update, or by a forecast that turns out wrong, so that the update is redone; and with
``bound_scope=micro_batch``. The losses take turns in one process: a round makes one update with each. An update's time
is divided by the time of ``vanilla`` in the same round. The table shows the median of these ratios, and the range of
the middle half of the rounds. The command fails if even the lower end of the monitor's range is above
``MOST_OF_MONITOR`` with the largest model.
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
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss"
BAPO = [f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"]
# This target is met at the start of the ranges, whatever the batch, so bounds at their end are a wrong forecast.
MET = [*BAPO, f"++{LOSS}.positive_contribution_target=0.01"]
# The overrides of verl's own config by actor. ``vanilla`` comes first, and runs in verl's worker.
ACTORS = {
    "vanilla": [],
    "monitor": [f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"],
    "bapo": MET,
    "micro_batch": [*BAPO, f"++{LOSS}.bound_scope=micro_batch"],
}
FORCED = {"forecast": (0, 0), "forward": (1, 0), "redone": (0, 1)}  # extra_forward and redone, as logged
UPDATES = ["vanilla", "monitor", *FORCED, "micro_batch"]  # those of FORCED are made by the actor ``bapo``
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


def make_example(folder, layers, hidden):
    """Write a barely trained model of the example's. Returns the overrides with which to train it."""
    from scripts.example_task import make_task

    task = Path(folder) / f"{layers}x{hidden}"
    make_task(task, steps=3, layers=layers, hidden=hidden)
    return [
        f"{MODEL}.path={task}/model",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={MICRO}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={MICRO}",
    ]


def pack(tokens):
    """Return the overrides for packed micro-batches of up to ``tokens`` tokens."""
    return [
        f"{MODEL}.use_remove_padding=true",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={tokens}",
    ]


def measure(overrides, rounds, kinds=UPDATES, platform="cpu", rows=ROWS, longest=LONGEST, entropy=False):
    """Make updates of each kind in turn, in verl's own config with ``overrides``.

    Args:
        kinds: of ``UPDATES``, ``vanilla`` among them.
        rows: the number of sequences of an update.
        longest: the largest number of tokens of a response.
        entropy: whether the training forwards compute the entropy (verl's ``actor.calculate_entropy``).

    Returns:
        A dictionary with the number of ``parameters``; the ``seconds`` of each round by kind; ``gibibytes``, the most
        memory that an update of the kind took above what was in use before it (on a CPU 0); and ``graphs``, the number
        of graphs that torch compiled.
    """
    import torch

    port, actors = free_port(), {}
    for name in dict.fromkeys("bapo" if kind in FORCED else kind for kind in kinds):
        actors[name] = make_actor([*overrides, *ACTORS[name]], port=port, platform=platform)
    torch.set_num_threads(THREADS)  # each of the tests' actors has set one
    from verl.utils import tensordict_utils as tu  # after make_actor, which sets verl's platform

    batches = [make_mini_batch(actors["vanilla"], seed, rows=rows, longest=longest) for seed in range(BATCHES)]
    for batch in batches:
        tu.assign_non_tensor(batch, calculate_entropy=entropy)
    seconds, gibibytes = {kind: [] for kind in kinds}, dict.fromkeys(kinds, 0.0)
    for number in range(rounds + 1):
        for kind in kinds:
            actor = actors["bapo" if kind in FORCED else kind]
            if kind in FORCED:
                force(actor, kind)
            data = batches[number % BATCHES].copy()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = seconds_of(lambda actor=actor, data=data: actor.train_batch(data))
            if kind in FORCED:
                made = tuple(actor.logged[f"actor/bapo/{name}"] for name in ("extra_forward", "redone"))
                assert made == FORCED[kind], (kind, made)
            if number == 0:  # the first round warms up
                continue
            seconds[kind].append(taken)
            if torch.cuda.is_available():
                gibibytes[kind] = max(gibibytes[kind], (torch.cuda.max_memory_allocated() - before) / 2**30)
        if number > 0:
            print(f"round {number}/{rounds}:", ", ".join(f"{kind} {seconds[kind][-1]:.3f} s" for kind in kinds))
    parameters = sum(p.numel() for p in actors["vanilla"].engine.module.parameters())
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    return {"parameters": parameters, "seconds": seconds, "gibibytes": gibibytes, "graphs": graphs}


def ratios_to_vanilla(seconds):
    """Divide for each loss the time of an update by the time of ``vanilla`` in the same round."""
    return {
        loss: [own / vanilla for own, vanilla in zip(of_loss, seconds["vanilla"], strict=True)]
        for loss, of_loss in seconds.items()
    }


def main():
    """Time all sizes, print the table, and fail if the monitor costs more than ``MOST_OF_MONITOR``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--platform", default="cpu", help="a file of recipe/bapo/config/platform")
    parser.add_argument("--json", type=Path, help="file for the seconds of every update")
    parser.add_argument("--model", help="a model on the Hugging Face hub, or its folder, in place of our small ones")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a micro-batch, with --model")
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences of an update")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of a response")
    parser.add_argument("--entropy", action="store_true", help="compute the entropy in each update")
    parser.add_argument("--kinds", nargs="+", choices=UPDATES[1:], default=UPDATES[1:], help="what to compare")
    parser.add_argument("overrides", nargs="*", help="overrides of verl's config")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds takes 2 or more, because the table has the range of the rounds")
    kinds = ["vanilla", *arguments.kinds]
    sizes = arguments.rows, arguments.longest, arguments.entropy
    common = arguments.rounds, kinds, arguments.platform, *sizes
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # stdout is for the table
        if arguments.model:
            overrides = [f"{MODEL}.path={arguments.model}", *pack(arguments.tokens), *arguments.overrides]
            found = {arguments.model: measure(overrides, *common)}
        else:
            found = {
                name: measure([*make_example(folder, *size), *arguments.overrides], *common)
                for name, size in SIZES.items()
            }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"| model | parameters | vanilla, s | {' | '.join(arguments.kinds)} |")
    print("|---" * (3 + len(arguments.kinds)) + "|")
    for name, row in found.items():
        ranges = {kind: quantiles(ratios, n=4) for kind, ratios in ratios_to_vanilla(row["seconds"]).items()}
        cells = [f"{ranges[kind][1]:.2f} ({ranges[kind][0]:.2f} to {ranges[kind][2]:.2f})" for kind in arguments.kinds]
        print(f"| {name} | {row['parameters']:,} | {median(row['seconds']['vanilla']):.2f} | {' | '.join(cells)} |")
    if "monitor" in ranges and ranges["monitor"][0] > MOST_OF_MONITOR:  # of the largest model
        sys.exit(f"the monitor takes {ranges['monitor'][0]:.3f} of vanilla's time or more in three of four rounds")


if __name__ == "__main__":
    main()
