# SPDX-License-Identifier: Apache-2.0
"""Time the search and the loss against verl's vanilla loss and against the literal sequential search.

    .venv/bin/python -m scripts.benchmark.loss [--quick] [--json FILE]

Variants run in turn in one process, so that a noisy machine disturbs them alike; read the ratios, not the seconds. On a
machine with a GPU the same table is measured with device events, under ``set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock
from weakref import finalize

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, bounds_from, compute_policy_loss_bapo
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

SHAPES = {"16 x 1k": (16, 1024), "16 x 8k": (16, 8192), "64 x 8k": (64, 8192), "ragged 64k": (8, 65536)}
TARGETS = {"at once": 0.01, "half way": None, "never": 0.99}
HOST_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")


def make_batch(rows, columns, dtype, device, seed=0, ragged=False):
    """Old log-probs, log-probs, advantages and mask like those of a few updates on the same rollouts, ``(B, T)``."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator) * 2
    log_prob = old + 0.15 * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, columns).contiguous()
    lengths = torch.full((rows, 1), columns)
    if ragged:
        lengths = (columns * torch.rand(rows, 1, generator=generator) ** 2).long().clamp(min=1)
        lengths[0] = columns
    mask = torch.arange(columns).expand(rows, columns) < lengths
    return [tensor.to(device) for tensor in (old.to(dtype), log_prob.to(dtype), advantages, mask)]


def actor_config(policy_loss):
    """verl's actor config with the whole batch as one mini-batch."""
    return FSDPActorConfig(
        strategy="fsdp2", rollout_n=8, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss
    )


def contribution(ratio, weight, advantages, mask, low, high):
    """P and N at one pair of bounds: what one trial of the sequential search reduces."""
    weighted = weight * advantages * mask
    p = torch.where(advantages > 0, weighted * ratio.clamp(max=high), 0).sum()
    n = torch.where(advantages < 0, -weighted * ratio.clamp(min=low), 0).sum()
    return torch.stack([p, n])


@torch.no_grad()
def sequential_search(old, log_prob, advantages, mask, config, group=None):
    """Algorithm 1 literally: per trial one pass over the tokens, one all-reduce and one read by the host."""
    ratio = (log_prob.float() - old.float()).clamp(-20, 20).exp()
    weight = old.float().exp()
    low, high, target = config.ratio_lower_start, config.ratio_upper_start, config.positive_contribution_target
    while True:
        sums = contribution(ratio, weight, advantages, mask, low, high)
        if group is not None:
            dist.all_reduce(sums, group=group)
        p, n = sums.tolist()
        if (1 - target) * p >= target * n:
            return low, high
        if high < config.ratio_upper_max - 1e-9:
            high = min(high + config.ratio_upper_step, config.ratio_upper_max)
        elif low < config.ratio_lower_max - 1e-9:
            low = min(low + config.ratio_lower_step, config.ratio_lower_max)
        else:
            return low, high


def half_way_target(batch, config, group):
    """The target, the same on all ranks, that Algorithm 1 reaches half way up the grid of c_high."""
    old, log_prob, advantages, mask = batch
    middle = (config.ratio_upper_start + config.ratio_upper_max) / 2
    ratio, weight = (log_prob.float() - old.float()).exp(), old.float().exp()
    sums = contribution(ratio, weight, advantages, mask, config.ratio_lower_start, middle)
    if group is not None:
        dist.all_reduce(sums, group=group)
    p, n = sums.tolist()
    return p / (p + n) if p + n else 0.5


def make_variants(batch, group) -> dict[str, Callable]:
    """The losses to time, forward and backward, and the two searches alone."""
    old, log_prob, advantages, mask = batch

    def step(loss_fn, config):
        leaf = log_prob.detach().requires_grad_()
        loss, _ = loss_fn(old, leaf, advantages, mask, "token-mean", config)
        loss.backward()

    def fixed(low, high, config):
        loss = compute_policy_loss_vanilla
        config = actor_config(PolicyLossConfig())
        config = type(config)(
            **{**dict(config), "clip_ratio_low": 1 - low, "clip_ratio_high": high - 1, "_target_": ""}
        )
        step(loss, config)

    def sequential(config):
        low, high = sequential_search(*batch, config, group)
        fixed(low, high, config)

    def ours(config):
        with bounds_from(lambda *tensors: find_clip_bounds(*tensors, config, group, clip_ratio_c=3.0)):
            step(compute_policy_loss_bapo, actor_config(config))

    def search(config):
        find_clip_bounds(*batch, config, process_group=group, clip_ratio_c=3.0)

    def config(candidates=52, **changes):
        steps = (candidates - 1) // 2
        grid = {"ratio_upper_step": 1.8 / steps, "ratio_lower_step": 0.3 / steps} if candidates != 52 else {}
        return BAPOPolicyLossConfig(**grid, **changes)

    targets = {name: target or half_way_target(batch, BAPOConfig(), group) for name, target in TARGETS.items()}
    variants = {"vanilla": lambda: step(compute_policy_loss_vanilla, actor_config(PolicyLossConfig()))}
    for name, target in targets.items():
        variants[f"sequential, {name}"] = partial(sequential, config(positive_contribution_target=target))
    never = targets["never"]
    variants["bapo, value"] = partial(ours, config(positive_contribution_target=never))
    variants["bapo, gradient"] = partial(ours, config(positive_contribution_target=never, contribution="gradient"))
    variants["search alone: sequential, never"] = lambda: sequential_search(
        *batch, config(positive_contribution_target=never), group
    )
    variants["search alone: bapo, value"] = partial(search, config(positive_contribution_target=never))
    for count in (500, 5000):
        many = config(count, positive_contribution_target=never)
        variants[f"bapo, value, {count} candidates"] = partial(ours, many)
        variants[f"search alone: bapo, value, {count} candidates"] = partial(search, many)
    return variants


class PeakMemory(TorchDispatchMode):
    """Peak bytes of the tensors made inside, on any device."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf.untyped_storage(), known)
        return result

    def add(self, storage, known):
        key = storage._cdata
        if key in known or key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.live -= size


@contextmanager
def counted():
    """Counts our collectives and the reads by the host inside."""
    counts = {"collectives": 0, "host_reads": 0}

    def wrap(function, name):
        def counting(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counting

    patches = [mock.patch.object(dist, "all_reduce", wrap(dist.all_reduce, "collectives"))]
    patches += [
        mock.patch.object(torch.Tensor, name, wrap(getattr(torch.Tensor, name), "host_reads")) for name in HOST_READS
    ]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


def time_of(run, device) -> float:
    """Milliseconds of one call."""
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


def measure(variants, repeats, device) -> dict[str, dict[str, float]]:
    """Median milliseconds, peak megabytes and counts of each variant, all run in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    rows = {}
    for name, run in variants.items():
        run()
        with counted() as counts:
            run()
        with PeakMemory() as memory:
            run()
        rows[name] = {**counts, "peak_mb": memory.peak / 2**20}
    for _ in range(repeats):
        for name, run in variants.items():
            times[name].append(time_of(run, device))
    floor = statistics.median(times["vanilla"])
    for name, values in times.items():
        rows[name].update(ms=statistics.median(values), ratio=statistics.median(values) / floor)
    return rows


def check_no_sync(batch):
    """On CUDA: the search and the loss, all but the one packed read of the metrics, never wait for the device."""
    from bapo import clipped_surrogate_loss

    torch.cuda.set_sync_debug_mode("error")
    try:
        for kind in ("value", "gradient"):
            bounds = find_clip_bounds(*batch, BAPOConfig(contribution=kind), clip_ratio_c=3.0)
            leaf = batch[1].detach().requires_grad_()
            result = clipped_surrogate_loss(batch[0], leaf, *batch[2:], bounds.low, bounds.high, 3.0)
            result.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_rank(rank, size, cases, repeats, store, results):
    """All cases on one of ``size`` ranks; rank 0 keeps the results."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD if size > 1 else None
    found = []
    for case in cases:
        rows, columns = SHAPES[case["shape"]]
        batch = make_batch(
            rows, columns, getattr(torch, case["dtype"]), device, seed=rank, ragged=case["shape"].startswith("ragged")
        )
        if device.type == "cuda":
            check_no_sync(batch)
        variants = make_variants(batch, group)
        found.append({**case, "ranks": size, "device": str(device), "rows": measure(variants, repeats, device)})
    if size > 1:
        dist.destroy_process_group()
    if rank == 0:
        Path(results).write_text(json.dumps(found))


def run_cases(cases, ranks, repeats):
    """The results of ``cases`` on ``ranks`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, cases, repeats, f"{folder}/store", f"{folder}/results")
        if ranks == 1:
            run_rank(0, *arguments)
        else:
            mp.spawn(run_rank, args=arguments, nprocs=ranks)
        return json.loads(Path(folder, "results").read_text())


def table(results) -> str:
    """The results as Markdown."""
    lines = []
    for case in results:
        lines.append(
            f"\n**{case['shape']} tokens, {case['dtype']}, {case['ranks']} "
            f"rank{'s' * (case['ranks'] > 1)}, {case['device']}**\n\n"
            "| variant | ms | x vanilla | peak MB | collectives | host reads |\n|---|---|---|---|---|---|"
        )
        for name, row in case["rows"].items():
            lines.append(
                f"| {name} | {row['ms']:.2f} | {row['ratio']:.2f} | {row['peak_mb']:.1f} | {row['collectives']} | "
                f"{row['host_reads']} |"
            )
    return "\n".join(lines)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, one rank, few repeats")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.quick:
        plan = [(1, [{"shape": "64 x 8k", "dtype": "float32"}])]
    else:
        one_rank = [{"shape": shape, "dtype": "float32"} for shape in SHAPES]
        plan = [(1, [*one_rank, {"shape": "64 x 8k", "dtype": "bfloat16"}])]
        if not torch.cuda.is_available():
            plan += [(ranks, [{"shape": "64 x 8k", "dtype": "float32"}]) for ranks in (2, 4)]
    results = []
    for ranks, cases in plan:
        results += run_cases(cases, ranks, 5 if arguments.quick else arguments.repeats)
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
