# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it goes: a line per step, warnings that matter, and in a terminal a progress bar beneath."""

from __future__ import annotations

import statistics
import time
from math import ceil, floor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recipe.bapo.launch.console import step_line
from recipe.bapo.records import METRICS
from recipe.bapo.records.metrics import parse_lines, validation_reward

WINDOW = 10  # steps
ENTROPY_FELL, NORM_ROSE = 0.5, 10.0  # to this share of what it was, to so many times its median, within the window
UNBOUNDED = 0.1  # share of the gradient's size that tokens carry which no bound touches
AT_ONCE = 0.95  # share of the updates that met the target before any bound moved


def warnings_in(history: list[dict[str, float]], searches: bool = True) -> dict[str, str]:
    """Warnings about the metrics of the steps so far, by their kind.

    Args:
        searches: whether the run's bounds can move; those of ``method=grpo`` cannot.
    """
    found: dict[str, str] = {}
    recent = history[-WINDOW:]
    if len(recent) < WINDOW:
        return found
    if all(data.get("actor/bapo/saturated") == 1 and data.get("actor/bapo/search_steps", 0) > 0 for data in recent):
        # At the widest bounds, so this is the most that they can reach.
        reached = statistics.median(data["actor/bapo/positive_contribution"] for data in recent)
        found["saturated"] = (
            f"the target was out of reach in every update of the last {WINDOW} steps, so the bounds stand at their "
            f"widest. They reached {reached:.3f}: positive_contribution_target={floor(100 * reached) / 100:g} is in "
            "reach of about half of such updates. What each target would do: docs/configuration.md, Choosing rho0."
        )
    at_once = statistics.mean(data.get("actor/bapo/met_at_once", 0.0) for data in recent)
    # Where nothing is clipped, data are fresh and no bound matters.
    if searches and at_once > AT_ONCE and any(data.get("actor/pg_clipfrac", 0.0) for data in recent):
        came = statistics.median(data["actor/bapo/positive_contribution_start"] for data in recent)
        low, high = (statistics.mean(data[f"actor/bapo/clip_{side}"] for data in recent) for side in ("low", "high"))
        found["at_once"] = (
            f"{at_once:.0%} of the updates of the last {WINDOW} steps met the target as they came, so the bounds stand "
            f"at their start [{low:.2f}, {high:.2f}], and BAPO is that fixed range. rho came at {came:.3f}: with "
            f"positive_contribution_target={ceil(100 * came) / 100:g} bounds would move in about half of such "
            "updates. What each target would do: docs/configuration.md, Choosing rho0."
        )
    entropies = [data["actor/entropy"] for data in recent if "actor/entropy" in data]
    if len(entropies) == WINDOW and entropies[-1] < ENTROPY_FELL * entropies[0]:
        found["entropy"] = f"the entropy fell from {entropies[0]:.3f} to {entropies[-1]:.3f} within {WINDOW} steps."
    share = statistics.mean(data.get("actor/bapo/negative_unbounded_share", 0.0) for data in recent)
    # A dual clip of 3 or less would clip every one of these tokens, and show in this metric.
    if share > UNBOUNDED and not any(data.get("actor/pg_clipfrac_lower", 0.0) for data in recent):
        found["unbounded"] = (
            f"tokens with negative advantage and a ratio above 3 carried {share:.0%} of the gradient's "
            f"size in the last {WINDOW} steps, and neither a bound nor a dual clip limits them: consider "
            "actor_rollout_ref.actor.clip_ratio_c=3.0."
        )
    norms = [data["actor/grad_norm"] for data in recent if "actor/grad_norm" in data]
    if len(norms) == WINDOW and not norms[-1] <= NORM_ROSE * statistics.median(norms):
        found["norm"] = (
            f"the gradient norm is {norms[-1]:.3g}, its median over {WINDOW} steps {statistics.median(norms):.3g}."
        )
    return found


class StepPrinter:
    """Prints to ``out`` a line for each step of a run, in a terminal above a progress bar."""

    def __init__(self, out, since: float):
        self.out, self.since = out, since  # an older metrics file is an earlier run's
        self.path: Path | None = None
        self.total: int | None = None
        self.searches = True
        self.offset = 0
        self.began: tuple[float, int] | None = None
        self.history: list[dict[str, float]] = []
        self.warned: dict[str, int] = {}  # step of the last warning of a kind
        self.progress = None

    def begin(self, run_dir: Path, total: int | None, searches: bool = True):
        """Follow the ``metrics.jsonl`` of a run of ``total`` steps whose bounds can move, or not (``searches``)."""
        self.path, self.total, self.searches = run_dir / METRICS, total, searches
        if self.out.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            columns = (*columns, TextColumn("left"), TimeRemainingColumn())
            self.progress = Progress(*columns, console=Console(file=self.out))
            self.task = self.progress.add_task("training", total=total)
            self.progress.start()

    def close(self):
        """Print what is still to be printed; the progress bar stays as it is."""
        self.print_new()
        if self.progress is not None:
            self.progress.stop()

    def print_new(self):
        """Print what has been appended since the last look."""
        if self.path is None or not self.path.exists() or self.path.stat().st_mtime < self.since:
            return
        with open(self.path) as file:
            file.seek(self.offset)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self.offset += len(complete.encode())
        for step, data in parse_lines(complete):
            self.show(self.line(step, data))
            if "training/global_step" in data:
                self.history.append(data)
                self.warn(step)
                if self.progress is not None:
                    self.progress.update(self.task, completed=step)

    def show(self, text):
        """One line."""
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.out, flush=True)

    def warn(self, step):
        """Show the warnings, each kind once in ``WINDOW`` steps."""
        for kind, text in warnings_in(self.history, self.searches).items():
            if step - self.warned.get(kind, step - WINDOW) >= WINDOW:
                self.warned[kind] = step
                self.show(f"Warning: {text}")

    def line(self, step, data):
        """The line of one record, with the time left at the pace so far."""
        validation = validation_reward(data)
        if "training/global_step" not in data:
            return f"before training: validation {validation:.3f}" if validation is not None else f"step {step}"
        if self.began is None:
            self.began = time.time() - data.get("timing_s/step", 0.0), step - 1
        pace = (time.time() - self.began[0]) / (step - self.began[1])
        return step_line(step, self.total, data, pace)
