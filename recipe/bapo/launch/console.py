# SPDX-License-Identifier: Apache-2.0
"""What a run shows a person: a line per step, warnings, in a terminal a progress bar, and a summary at the end.

Everything shown is read from ``metrics.jsonl`` and ``train.log`` in the run's folder, so texts may be changed freely;
the README shows the summary.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from recipe.bapo.health import WINDOW, health_warnings
from recipe.bapo.records import METRICS
from recipe.bapo.records.metrics import parse_lines, read_metrics, validation_reward


class StepPrinter:
    """Prints to ``out`` a line for each step of a run, in a terminal above a progress bar."""

    def __init__(self, out, since: float):
        self.out, self.since = out, since  # a metrics file that is older belongs to an earlier run
        self.path: Path | None = None
        self.bar: tqdm | None = None  # from the first step on, which comes minutes after the start
        self.offset = 0  # bytes of the metrics file that have been printed
        self.start: tuple[float, int] | None = None  # time and step from which the pace is measured
        self.history: list[dict[str, float]] = []
        self.warned: dict[str, int] = {}  # the step of the last warning of each kind

    def begin(self, run_dir: Path, total: int | None, bounds_can_move: bool = True) -> None:
        """Follow the ``metrics.jsonl`` of a run of ``total`` steps."""
        self.path, self.total, self.bounds_can_move = run_dir / METRICS, total, bounds_can_move

    def print_new(self) -> None:
        """Print the steps that have been written since the last call."""
        if self.path is None or not self.path.exists() or self.path.stat().st_mtime < self.since:
            return
        with open(self.path) as file:
            file.seek(self.offset)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self.offset += len(complete.encode())
        for step, data in parse_lines(complete):
            if "training/global_step" in data:
                self.print_step(step, data)
            else:
                reward = validation_reward(data)
                if reward is not None:
                    self.print(f"before training: validation {reward:.3f}")

    def print_step(self, step: int, data: dict[str, float]) -> None:
        """Print one step with the time left at the pace so far, and each kind of warning once in ``WINDOW`` steps."""
        if self.start is None:
            self.start = time.time() - data.get("timing_s/step", 0.0), step - 1
        pace = (time.time() - self.start[0]) / (step - self.start[1])
        self.print(step_line(step, self.total, data, pace))
        self.history.append(data)
        for kind, text in health_warnings(self.history, self.bounds_can_move).items():
            if step - self.warned.get(kind, step - WINDOW) >= WINDOW:
                self.warned[kind] = step
                self.print(f"Warning: {text}")
        if self.bar is None:
            # disable=None: shown in a terminal alone.
            self.bar = tqdm(desc="training", unit="step", total=self.total, initial=step, file=self.out, disable=None)
        self.bar.update(step - self.bar.n)

    def print(self, text: str) -> None:
        """Print one line, above the progress bar where there is one."""
        tqdm.write(text, file=self.out)
        self.out.flush()

    def close(self) -> None:
        """Print what is still to be printed; the progress bar stays as it is."""
        self.print_new()
        if self.bar is not None:
            self.bar.close()


def step_line(step: int, total: int | None, data: dict[str, float], pace: float) -> str:
    """One step of training as one line; ``pace`` is in seconds a step."""
    nan = float("nan")
    count = f"{step:>{len(str(total))}}/{total}" if total else str(step)
    parts = [f"step {count}", f"reward {data.get('critic/rewards/mean', nan):.3f}"]
    if "actor/entropy" in data:
        parts.append(f"entropy {data['actor/entropy']:.3f}")
    if "actor/bapo/clip_low" in data:
        rho = (data["actor/bapo/positive_contribution_start"], data["actor/bapo/positive_contribution"])
        bounds = (data["actor/bapo/clip_low"], data["actor/bapo/clip_high"])
        parts += [f"rho {rho[0]:.3f} -> {rho[1]:.3f}", f"bounds [{bounds[0]:.3f}, {bounds[1]:.3f}]"]
    parts.append(f"grad norm {data.get('actor/grad_norm', nan):.3f}")
    parts.append(f"length {data.get('response_length/mean', nan):.0f}")
    parts.append(f"{data.get('timing_s/step', nan):.1f} s")
    validation = validation_reward(data)
    if validation is not None:
        parts.append(f"validation {validation:.3f}")
    if total:
        parts.append(f"left {timedelta(seconds=round(pace * max(0, total - step)))}")
    return "  ".join(parts)


def first_error(log: str) -> str | None:
    """The first exception that a worker printed to a run's log, and in which worker; None if there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    of_vllm = r"(?:\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]*\] )?"  # vLLM's processes print through their server
    pattern = rf"^\((\w+) pid=[^)]*\) {of_vllm}([\w.]*(?:Error|Exception)): (.*)$"
    match = re.search(pattern, plain, re.M)
    return f"{match[2]}: {match[3].strip()} ({match[1]})" if match else None


def dead_actor(log: str) -> str | None:
    """The class of the worker of Ray's that died first, from Ray's error in a run's log; None if there is none."""
    match = re.search(r"The actor died.*\n.*class_name: \S*?(\w+)$", log, re.M)
    return match[1] if match else None


def summary(run_dir: Path) -> str:
    """The screen at the end of a run: before and after, and where everything is."""
    records = [data for _, data in read_metrics(run_dir)]
    steps = [data for data in records if "training/global_step" in data]
    if not steps:
        return f"No training step was recorded in {run_dir}."

    def change(values, count):
        return f"{sum(values[:count]) / count:>9.3f}  ->{sum(values[-count:]) / count:>9.3f}"

    lines = [f"{len(steps)} steps, mean of the first and the last {max(1, len(steps) // 5)}:"]
    rows = {
        "training reward": "critic/rewards/mean",
        "entropy, nats a token": "actor/entropy",
        "response length, tokens": "response_length/mean",
        "gradient norm": "actor/grad_norm",
    }
    for label, key in rows.items():
        values = [data[key] for data in steps if key in data]
        if values:
            lines.append(f"  {label:<46}{change(values, max(1, len(values) // 5))}")
    validations = [reward for reward in map(validation_reward, records) if reward is not None]
    if len(validations) > 1:
        lines.append(f"  {'validation reward, first and last':<46}{change(validations, 1)}")
    lines += search_lines([data for data in steps if "actor/bapo/met_at_once" in data])
    lines.append(f"Metrics, log and records: {run_dir}")
    return "\n".join(lines)


def search_lines(steps: list[dict[str, float]]) -> list[str]:
    """What the search for bounds did in a run, from its steps that made updates."""

    def mean(name):
        return sum(data[f"actor/bapo/{name}"] for data in steps) / len(steps)

    if not steps:
        return []
    already_met, out_of_reach = mean("met_at_once"), mean("saturated")
    rho = (mean("positive_contribution_start"), mean("positive_contribution"))
    rows = {
        "updates with the target already met": f"{already_met:.0%}",
        "updates with the target met by moving bounds": f"{max(0.0, 1 - already_met - out_of_reach):.0%}",
        "updates with the target out of reach": f"{out_of_reach:.0%}",
        "positive contribution (rho)": f"{rho[0]:.3f} before, {rho[1]:.3f} after the search",
        "bounds on the ratio": f"[{mean('clip_low'):.3f}, {mean('clip_high'):.3f}]",
    }
    return ["The search for bounds, mean of all updates:", *(f"  {name:<46}{text}" for name, text in rows.items())]


def evaluation(run_dir: Path) -> str:
    """The figures of a run that only validates, by data source: verl's metrics ``mean@n`` and ``std@n``."""
    lines = [f"{'data source':<28}{'n':>4}{'mean@n':>9}{'std@n':>9}"]
    for _, metrics in parse_lines((run_dir / METRICS).read_text()):
        for key, mean in metrics.items():
            if match := re.fullmatch(r"val-core/(.+)/([^/]+)/mean@(\d+)", key):
                source, variable, n = match.groups()
                std = metrics.get(f"val-aux/{source}/{variable}/std@{n}")
                lines.append(f"{source:<28}{n:>4}{mean:>9.4f}{'-' if std is None else f'{std:.4f}':>9}")
    lines.append("std@n: between the n responses to a problem, mean over the problems.")
    lines.append(f"Metrics and log: {run_dir}")
    return "\n".join(lines)
