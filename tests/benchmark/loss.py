# SPDX-License-Identifier: Apache-2.0
"""Time search and loss together, forward and backward, against verl's ``vanilla`` loss at 64 x 8k tokens.

    .venv/bin/python -m tests.benchmark.loss [--repeats 15] [--json FILE]

The losses take turns in one process, so that a noisy machine disturbs all of them. So compare the ratios, not the
times. On a GPU, time is measured with events on the device. The target is at most 1.5 times ``vanilla``, in float32 on
one CPU thread. Importing this module needs only torch.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bapo import BAPOConfig, find_clip_bounds, read_and_validate

TARGET = 1.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DUAL_CLIP = 3.0


def make_batch(rows, columns, dtype, device, seed=0):
    """Make old log-probs, log-probs, advantages and mask as after a few updates on the same rollouts, ``(B, T)``."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator) * 2
    log_prob = old + 0.15 * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, columns)
    mask = torch.ones(rows, columns, dtype=torch.bool)
    return [tensor.to(device) for tensor in (old.to(dtype), log_prob.to(dtype), advantages.contiguous(), mask)]


def find_bounds_for(policy_loss, batch):
    """Find the batch's bounds and set them in our config, as the worker does. With verl's config, do nothing."""
    if isinstance(policy_loss, BAPOConfig):
        values = read_and_validate(*find_clip_bounds(*batch, policy_loss, clip_ratio_c=DUAL_CLIP))
        policy_loss.current_bounds = values["low"], values["high"]


def make_losses(batch) -> dict[str, Callable[[], object]]:
    """Return what to time: verl's loss, ours with a search that never reaches its target, and this search alone."""
    from recipe.bapo.policy_loss import BAPOPolicyLossConfig, compute_policy_loss_bapo
    from tests.support.actor import actor_config
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import PolicyLossConfig

    old, log_prob, advantages, mask = batch

    def step(loss_fn, policy_loss):
        leaf = log_prob.detach().requires_grad_()
        find_bounds_for(policy_loss, batch)
        loss, _ = loss_fn(old, leaf, advantages, mask, "token-mean", actor_config(policy_loss))
        loss.backward()

    losses: dict[str, Callable[[], object]] = {
        "vanilla": partial(step, compute_policy_loss_vanilla, PolicyLossConfig())
    }
    for kind in ("value", "gradient"):
        options = {"positive_contribution_target": 0.99, "contribution": kind}
        ours = BAPOPolicyLossConfig(**options)
        losses[f"bapo, {kind}"] = partial(step, compute_policy_loss_bapo, ours)
        losses[f"its search, {kind}"] = partial(find_clip_bounds, *batch, BAPOConfig(**options), clip_ratio_c=DUAL_CLIP)
    return losses


def milliseconds_of(run, device) -> float:
    """Time one call in milliseconds, by the device's clock."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    begin_s = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begin_s)


def measure(runs, repeats, device) -> dict[str, float]:
    """Return the median milliseconds of each function. They take turns, and the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            took = milliseconds_of(run, device)
            if turn:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_all(rows, columns, repeats) -> dict[str, dict[str, dict[str, float]]]:
    """Measure milliseconds by dtype, by machine (a number of CPU threads, or the GPU) and by loss."""
    machines = [("CPU, 1 thread", "cpu", 1), ("CPU, 2 threads", "cpu", 2)]
    if torch.cuda.is_available():
        machines.append((torch.cuda.get_device_name(), "cuda", torch.get_num_threads()))
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in DTYPES}
    for machine, kind, threads in machines:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            batch = make_batch(rows, columns, dtype, kind)
            found[name][machine] = measure(make_losses(batch), repeats, torch.device(kind))
    return found


def table(found) -> str:
    """Format the results as Markdown: milliseconds of ``vanilla``, and the others as multiples of it."""
    machines = list(next(iter(found.values())))
    lines = [f"| loss | {' | '.join(machines)} |", "|---" * (len(machines) + 1) + "|"]
    for dtype, columns in found.items():
        for name in next(iter(columns.values())):
            cells = (
                f"1 ({times[name]:.1f} ms)" if name == "vanilla" else f"{times[name] / times['vanilla']:.2f}"
                for times in columns.values()
            )
            lines.append(f"| {dtype}: {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Time all losses, and print the table and the ratio that has a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="file for the milliseconds")
    arguments = parser.parse_args()
    found = measure_all(arguments.rows, arguments.columns, arguments.repeats)
    print(table(found))
    times = found["float32"]["CPU, 1 thread"]
    ratio = max(time for name, time in times.items() if name.startswith("bapo")) / times["vanilla"]
    print(f"\nfloat32 on one thread: {ratio:.2f} times vanilla (target: at most {TARGET})")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
