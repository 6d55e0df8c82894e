# SPDX-License-Identifier: Apache-2.0
"""Stage 1 of scripts/gpu_check.sh: the search and the loss on the GPU, compared with the CPU. Needs torch alone."""

from __future__ import annotations

import sys
import warnings
from itertools import product

import torch

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_values
from bapo.config import CHOICES
from bapo.statistics import GPU_CHUNK
from scripts.benchmark.loss import DTYPES, DUAL_CLIP, make_batch, measure
from scripts.gpu_check.table import Table, main

SWITCHES = ("contribution", "token_weight", "search_order")
TARGETS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6)
LARGE = {True: (8, 512), False: (64, 8192)}  # by rehearsal
BYTES_PER_TOKEN = 160  # of the search's temporaries, by arithmetic 108


def search(batch, config=None):
    """The bounds of a batch and its diagnostics, 0-d tensors on its device."""
    return find_clip_bounds(*batch, config or BAPOConfig(), clip_ratio_c=DUAL_CLIP)


def loss_and_gradient(batch, low, high):
    """Of the loss with given bounds."""
    leaf = batch[1].detach().requires_grad_()
    loss = clipped_surrogate_loss(batch[0], leaf, *batch[2:], low, high, DUAL_CLIP).loss
    loss.backward()
    return loss.detach(), leaf.grad


def search_and_loss(batch, config=None):
    """All that an update adds, without its read."""
    bounds, diagnostics = search(batch, config)
    return bounds, diagnostics, *loss_and_gradient(batch, bounds.low, bounds.high)


def the_bounds_are_those_of_the_cpu(table: Table):
    for dtype in DTYPES:
        seen, distance, on_the_way = [], 0.0, 0
        for seed, (choice, target) in enumerate(product(product(*(CHOICES[name] for name in SWITCHES)), TARGETS)):
            config = BAPOConfig(positive_contribution_target=target, **dict(zip(SWITCHES, choice, strict=True)))
            batch = make_batch(8, 512, DTYPES[dtype], "cpu", seed)
            there = read_values(*search([tensor.to(table.device) for tensor in batch], config))
            here = read_values(*search(batch, config))
            seen.append([there[name] == here[name] for name in ("low", "high", "search_steps", "saturated")])
            distance = max(distance, abs(there["positive_contribution"] - here["positive_contribution"]))
            on_the_way += 0 < here["search_steps"] < config.upper.steps + config.lower.steps
        other = sum(not all(same) for same in seen)
        what = f"bounds, steps and saturation of {len(seen)} searches, {dtype}"
        table.check(
            what, "the CPU's; some stop on their way", f"{other} other; {on_the_way} stop", not other and on_the_way > 0
        )
        table.check(f"their rho, {dtype}", "within 1e-5 of the CPU's", f"{distance:.1e}", distance <= 1e-5)


def the_loss_and_its_gradient_are_those_of_the_cpu(table: Table):
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        batch = make_batch(*LARGE[table.rehearsal], DTYPES[dtype], "cpu")
        loss, gradient = loss_and_gradient(batch, 0.7, 1.7)
        other_loss, other = loss_and_gradient([tensor.to(table.device) for tensor in batch], 0.7, 1.7)
        off = ((other.cpu().float() - gradient.float()).abs().max() / gradient.float().abs().max()).item()
        off_loss = abs(other_loss.item() - loss.item())
        seen = f"{off_loss:.1e}, {off:.1e}"
        table.check(f"loss and gradient, {dtype}", f"within {tolerance:g}", seen, max(off_loss, off) <= tolerance)


def autocast_changes_nothing(table: Table):
    batch = make_batch(8, 512, torch.float32, table.device)
    bounds, _, loss, gradient = search_and_loss(batch)
    with torch.autocast(table.device.type, torch.bfloat16):
        again, _, other_loss, other = search_and_loss(batch)
    same = all(torch.equal(getattr(bounds, name), getattr(again, name)) for name in ("low", "high", "search_steps"))
    table.check("bounds under bfloat16 autocast", "the same", "the same" if same else "other", same)
    off = max((other_loss - loss).abs().item(), ((other - gradient).abs().max() / gradient.abs().max()).item())
    table.check("loss and gradient under it", "within 1e-6", f"{off:.1e}", off <= 1e-6)


def log_probs_under_autocast_are_float32(table: Table):
    # verl computes them inside autocast; without flash-attn's cross-entropy by log_softmax.
    with torch.autocast(table.device.type, torch.bfloat16):
        states, weights = (torch.randn(16, 64, device=table.device) for _ in range(2))
        log_probs = torch.nn.functional.linear(states, weights).log_softmax(-1)
    expected = "torch.bfloat16" if table.rehearsal else "torch.float32"  # the CPU's autocast widens less
    table.check("log_softmax under bfloat16 autocast", expected, log_probs.dtype, str(log_probs.dtype) == expected)


def two_runs_of_one_input(table: Table):
    batch = make_batch(*LARGE[table.rehearsal], torch.float32, table.device)
    first, second = read_values(*search(batch)), read_values(*search(batch))
    same = all(first[name] == second[name] for name in ("low", "high", "search_steps"))
    table.check("two searches of one input", "the same bounds", "the same" if same else "other", same)
    off = abs(first["positive_contribution"] - second["positive_contribution"])
    table.check("their rho (atomic additions)", "within 1e-12", f"{off:.1e}", off <= 1e-12)


def nothing_but_the_read_waits_for_the_device(table: Table):
    batch = make_batch(*LARGE[table.rehearsal], torch.float32, table.device)
    search_and_loss(batch)  # loads the kernels
    if table.rehearsal:
        return table.tell("waits for the device", "not to be seen on a CPU")
    try:
        torch.cuda.set_sync_debug_mode("error")
        for kind in CHOICES["contribution"]:
            bounds, diagnostics, *_ = search_and_loss(batch, BAPOConfig(contribution=kind))
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            read_values(bounds, diagnostics)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(warning.message) for warning in found)
    table.check("waits for the device: search, loss, backward", 0, 0, True)  # else it has raised
    table.check("waits for the device: the read", 1, waits, waits == 1)


def memory_and_time(table: Table):
    rows, columns = LARGE[table.rehearsal]
    if not table.rehearsal:
        batch = make_batch(rows, columns, torch.float32, table.device)
        search(batch)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        search(batch)
        each = (torch.cuda.max_memory_allocated() - before) / min(rows * columns, GPU_CHUNK)
        what = "peak memory of the search, bytes a token"
        table.check(what, f"at most {BYTES_PER_TOKEN}", f"{each:.0f}", each <= BYTES_PER_TOKEN)
    for dtype in DTYPES:
        batch = make_batch(rows, columns, DTYPES[dtype], table.device)
        runs = {
            "loss with fixed bounds": lambda batch=batch: loss_and_gradient(batch, 0.8, 1.2),
            "search and loss": lambda batch=batch: search_and_loss(batch),
            "search": lambda batch=batch: search(batch),
        }
        times = measure(runs, 3 if table.rehearsal else 30, table.device)
        seen = ", ".join(f"{name} {took:.3f}" for name, took in times.items())
        table.tell(f"milliseconds at {rows} x {columns}, {dtype}", seen)


CHECKS = (
    the_bounds_are_those_of_the_cpu,
    the_loss_and_its_gradient_are_those_of_the_cpu,
    autocast_changes_nothing,
    log_probs_under_autocast_are_float32,
    two_runs_of_one_input,
    nothing_but_the_read_waits_for_the_device,
    memory_and_time,
)

if __name__ == "__main__":
    sys.exit(main("1", CHECKS))
