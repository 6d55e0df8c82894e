# SPDX-License-Identifier: Apache-2.0
"""Print a run for the user: a line per step, advice, a progress bar in a terminal, and a summary at the end.

The parent of a run does it. It reads all of it from ``metrics.jsonl``, ``train.log`` and ``validation/`` in the run's
folder. No program reads it, so you may change the texts; docs/running.md shows the summary.
"""

import math
import re
import textwrap
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from recipe.bapo.host.files import ANSWERS, METRICS
from recipe.bapo.host.metrics import parse_lines, read_answers, read_file, read_metrics, validation_reward
from recipe.bapo.run import bapo_run

# The parts of a step's line, by metric. A part is left out if the step did not log its metric.
IN_A_LINE = {
    "critic/rewards/mean": "  reward {:.3f}",
    "actor/entropy": "  entropy {:.3f}",
    **bapo_run.IN_A_LINE,
    "actor/grad_norm": "  grad norm {:.3f}",
    "response_length/mean": "  length {:.0f}",
    "timing_s/step": "  {:.1f} s",
}
# Of an evaluation: verl's core figures, and the spread of the responses to a problem.
SHOWN = re.compile(r"^val-core/.*/(mean@\d+|best@\d+/mean)$|/std@\d+$")
MOST_READ = 16 << 20  # bytes of a log in which an error is looked for
BEFORE_AND_AFTER = {
    "critic/rewards/mean": "training reward",
    "actor/entropy": "entropy, nats a token",
    "response_length/mean": "response length, tokens",
    "actor/grad_norm": "gradient norm",
}


class StepPrinter:
    """Prints a line for each step of a run of ``total`` steps, and what the worker says of the search in ``log``."""

    def __init__(self, run_dir: Path, log: Path, total: int | None):
        self.metrics, self.log, self.total = run_dir / METRICS, log, total
        self.offsets = {self.metrics: 0, self.log: 0}  # bytes of the two files that have been read
        self.bar: tqdm | None = None  # made at the first step, minutes after the start
        self.response_failed = False  # whether the log says so
        self.warned: set[str] = set()  # what a warning was printed for: metrics, or "a failed response"

    def print_new(self) -> None:
        """Print the steps and the advice that were written since the last call."""
        for step, data in parse_lines(self.read_new(self.metrics)):
            tqdm.write(step_line(step, self.total, data))
            if "training/global_step" in data:
                if self.bar is None:  # disable=None shows the bar in a terminal only
                    self.bar = tqdm(total=self.total, initial=step, unit="step", desc="training", disable=None)
                self.bar.update(step - self.bar.n)
            for metric, text in warnings_of(data).items():
                self.warn(metric, f"in step {step} {text}")
        if self.response_failed:  # verl's asynchronous modes go on, even if no response ever arrives
            self.warn("a failed response", "a response failed in its reward, tool or agent loop.")
        added = self.read_new(self.log)
        # The error itself is some lines further down, which may not be written yet.
        self.response_failed = self.response_failed or "Error in _run_prompt" in added
        for said in re.findall(rf"\b{bapo_run.NAME}: .+", added):
            tqdm.write(said)

    def warn(self, about: str, text: str) -> None:
        """Print a warning with the first error at the end of the log, unless one was printed for the same before."""
        if about not in self.warned:
            self.warned.add(about)
            error = first_error(end_of(self.log))
            tqdm.write(f"Warning: {text}{f' The first error is {error}.' if error else ''}")

    def read_new(self, path: Path) -> str:
        """Read the complete lines that were added to a file since the last call."""
        if not path.exists():
            return ""
        with open(path, "rb") as file:
            file.seek(self.offsets[path])
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self.offsets[path] += len(complete)
        return complete.decode(errors="replace")

    def close(self) -> None:
        """Print the last steps, and leave the progress bar as it is."""
        self.print_new()
        if self.bar is not None:
            self.bar.close()


def step_line(step: int, total: int | None, data: dict[str, float]) -> str:
    """Format one training step, or the validation before training, as one line."""
    line = "before training"
    if "training/global_step" in data:
        line = f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"
    line += "".join(text.format(data[key]) for key, text in IN_A_LINE.items() if key in data)
    validation = validation_reward(data)
    if validation is not None:
        line += f"  validation {validation:.3f}"
    if total and "timing_s/step" in data:
        line += f"  left {timedelta(seconds=round(max(0, total - step) * data['timing_s/step']))}"
    return line


def warnings_of(data: dict[str, float]) -> dict[str, str]:
    """Say what is wrong in a step although verl trains on, by the metric that shows it."""
    found = {}
    arrived = data.get("training/responses_arrived", 1.0)
    if arrived < 1:
        found["training/responses_arrived"] = (
            # Rounded down, because 511 of 512 are not 100%.
            f"{math.floor(1000 * arrived) / 10:g}% of the responses arrived; verl trained without the others."
        )
    if has_unusable_gradient(data):
        found["actor/grad_norm, not finite"] = (
            "the gradient norm was not finite. FSDP skips such an update. Megatron makes its step, which breaks the "
            "weights: then stop, and resume from a checkpoint before this step (docs/troubleshooting.md)."
        )
    advantages = [data.get(f"critic/advantages/{side}", 0.0) for side in ("min", "max")]
    if data.get("actor/grad_norm") == 0 and advantages != [0, 0]:
        found["actor/grad_norm"] = (
            "the gradient norm was 0 although there were advantages, so nothing was trained: look at the learning "
            "rate, LoRA's alpha and frozen parameters."
        )
    return found


def has_unusable_gradient(data: dict[str, float]) -> bool:
    """Whether the gradient norm of an update of a step was not finite."""
    return not math.isfinite(data.get("actor/grad_norm", 0.0)) or data.get(bapo_run.SKIPPED, 0.0) > 0


def end_of(log: Path) -> str:
    """Read the last part of a log, which after days may have gigabytes; "" if it is gone."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - MOST_READ))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def first_error(log: str) -> str | None:
    """Find the first exception in a run's log, or its end, and the worker that printed it; None if there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    of_vllm = r"(?:\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]*\] )?"  # vLLM's processes print through their server
    of_argparse = r"\S+(?: \w+)?: (?=error: )"  # vLLM's server parses its options like a command
    pattern = rf"^\((\w+) pid=[^)]*\) (?:{of_vllm}|{of_argparse})((?:[\w.]*(?:Error|Exception))|error): (.*)$"
    match = re.search(pattern, plain, re.M)
    return f"{match[2]}: {match[3].strip()} ({match[1]})" if match else None


def dead_actor(log: str) -> str | None:
    """Find the class of the Ray worker that died first, from Ray's error in a run's log; None if there is none."""
    match = re.search(r"The actor died.*\n.*class_name: \S*?(\w+)$", log, re.M)
    return match[1] if match else None


def summary(run_dir: Path) -> str:
    """Format the screen at the end of a run: metrics before and after training, or verl's results of an evaluation."""
    records = [data for _, data in read_metrics(run_dir)]
    latest = [data for _, data in read_file(run_dir / METRICS)] if (run_dir / METRICS).exists() else []
    # An evaluation may have been started in the folder of a run that trained before, so only its own metrics count.
    if not any("training/global_step" in data for data in latest):
        records = latest
    steps = [data for data in records if "training/global_step" in data]
    lines, part = [], max(1, len(steps) // 5)

    def before_and_after(label, values, part):
        lines.append(f"  {label:<46}{fmean(values[:part]):>9.3f}  ->{fmean(values[-part:]):>9.3f}")

    if steps:
        lines.append(f"{len(steps)} steps, mean of the first and the last {part}:")
        for key, label in BEFORE_AND_AFTER.items():
            values = [data[key] for data in steps if key in data]
            if values:
                before_and_after(label, values, part)
        unusable = sum(map(has_unusable_gradient, steps))
        if unusable:
            lines.append(f"  {'steps with a gradient norm that is not finite':<46}{unusable:>9}  of {len(steps)}")
        validations = [reward for reward in map(validation_reward, records) if reward is not None]
        if len(validations) > 1:
            before_and_after("validation reward, first and last", validations, 1)
        lines += bapo_run.summary_lines(steps)
        lines += answer_lines(run_dir / ANSWERS)
    else:
        lines.append("No training step was recorded. verl's figures of n responses to each problem:")
        figures = {key: value for data in records for key, value in data.items() if SHOWN.search(key)}
        lines += [f"  {key:<46}{value:>9.4f}" for key, value in figures.items()]
    lines.append(f"Metrics and records: {run_dir}")
    return "\n".join(lines)


def answer_lines(folder: Path, prompts: int = 3) -> list[str]:
    """Format the answers to the first validation prompts, at the first and at the last validation.

    These are the first prompts of the data, not the best ones. verl writes a file ``<step>.jsonl`` for each validation.
    """
    files = sorted((path for path in folder.glob("*.jsonl") if path.stem.isdigit()), key=lambda path: int(path.stem))
    if len(files) < 2:
        return []
    before, after = (read_answers(path) for path in (files[0], files[-1]))
    after_by_prompt = {answer["input"]: answer for answer in after}
    lines = ["Answers to the first validation prompts, before and after:"]
    for first in [answer for answer in before if answer["input"] in after_by_prompt][:prompts]:
        lines.append(f"  {_in_one_line(first['input'])}")
        for when, answer in (("before", first), ("after", after_by_prompt[first["input"]])):
            lines.append(f"    {when:<8}{_in_one_line(answer['output'])}  (reward {answer['score']:g})")
    return lines


def _in_one_line(text: str) -> str:
    return textwrap.shorten(", ".join(line.strip() for line in text.strip().splitlines()), 100, placeholder=" ...")
