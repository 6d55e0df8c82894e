# SPDX-License-Identifier: Apache-2.0
"""What a run shows a person, as text: a line per step, a screen at the end, the first error of its log."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from recipe.bapo.records.metrics import read_metrics, validation_reward


def first_error(log: str) -> str | None:
    """The first exception that a worker printed to a run's log, and in which worker; None if there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    of_vllm = r"(?:\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]*\] )?"  # its processes' lines come through their server's
    pattern = rf"^\((\w+) pid=[^)]*\) {of_vllm}([\w.]*(?:Error|Exception)): (.*)$"
    for worker, name, text in re.findall(pattern, plain, re.M):
        return f"{name}: {text.strip()} ({worker})"
    return None


def step_line(step: int, total: int | None, data: dict[str, float], pace: float) -> str:
    """One step of training as one line; ``pace`` is in seconds a step."""
    count = f"{step:>{len(str(total))}}/{total}" if total else str(step)
    parts = [f"step {count}", f"reward {data.get('critic/rewards/mean', float('nan')):.3f}"]
    if "actor/entropy" in data:
        parts.append(f"entropy {data['actor/entropy']:.3f}")
    if "actor/bapo/clip_low" in data:
        rho = (data["actor/bapo/positive_contribution_start"], data["actor/bapo/positive_contribution"])
        bounds = (data["actor/bapo/clip_low"], data["actor/bapo/clip_high"])
        parts += [f"rho {rho[0]:.3f} -> {rho[1]:.3f}", f"bounds [{bounds[0]:.3f}, {bounds[1]:.3f}]"]
    parts.append(f"grad norm {data.get('actor/grad_norm', float('nan')):.3f}")
    parts.append(f"length {data.get('response_length/mean', float('nan')):.0f}")
    parts.append(f"{data.get('timing_s/step', float('nan')):.1f} s")
    validation = validation_reward(data)
    if validation is not None:
        parts.append(f"validation {validation:.3f}")
    if total:
        parts.append(f"left {timedelta(seconds=round(pace * max(0, total - step)))}")
    return "  ".join(parts)


def summary(run_dir: Path) -> str:
    """The screen at the end of a run: before and after, and where everything is."""
    records = read_metrics(run_dir)
    steps = [data for _, data in records if "training/global_step" in data]
    if not steps:
        return f"No training step was recorded in {run_dir}."

    def first_last(key):
        values = [data[key] for data in steps if key in data]
        few = max(1, len(values) // 5)
        return (sum(values[:few]) / few, sum(values[-few:]) / few, few) if values else None

    lines = [f"{len(steps)} steps, mean of the first and the last {max(1, len(steps) // 5)}:"]
    rows = [
        ("training reward", "critic/rewards/mean"),
        ("entropy, nats a token", "actor/entropy"),
        ("response length, tokens", "response_length/mean"),
        ("gradient norm", "actor/grad_norm"),
    ]
    for label, key in rows:
        found = first_last(key)
        if found:
            lines.append(f"  {label:<46}{found[0]:>9.3f}  ->{found[1]:>9.3f}")
    validations = [value for _, data in records if (value := validation_reward(data)) is not None]
    if len(validations) > 1:
        lines.append(f"  {'validation reward, first and last':<46}{validations[0]:>9.3f}  ->{validations[-1]:>9.3f}")
    lines += search_lines([data for data in steps if "actor/bapo/met_at_once" in data])
    lines.append(f"Metrics, log and records: {run_dir}")
    return "\n".join(lines)


def search_lines(steps: list[dict[str, float]]) -> list[str]:
    """What the search for bounds did in a run, from its steps that made updates."""

    def mean(name):
        return sum(data[f"actor/bapo/{name}"] for data in steps) / len(steps)

    if not steps:
        return []
    at_once, never = mean("met_at_once"), mean("saturated")
    start, end = mean("positive_contribution_start"), mean("positive_contribution")
    rows = {
        "updates that met the target as they came": f"{at_once:.0%}",
        "updates that met it with moved bounds": f"{1 - at_once - never:.0%}",
        "updates that missed it at the widest bounds": f"{never:.0%}",
        "positive contribution (rho)": f"{start:.3f} before, {end:.3f} after the search",
        "bounds on the ratio": f"[{mean('clip_low'):.3f}, {mean('clip_high'):.3f}]",
    }
    return ["The search for bounds, mean of all updates:", *(f"  {name:<46}{text}" for name, text in rows.items())]
