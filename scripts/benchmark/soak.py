# SPDX-License-Identifier: Apache-2.0
"""Run the example on a CPU for a long time, and report what grows although it should not.

    .venv/bin/python -m scripts.benchmark.soak [--steps 300] [--json FILE] [key=value ...]

Every ten seconds this measures the run's processes, files, temporary folders and shared memory. The table compares the
run's second tenth with its last: memory (proportional set size), threads and open files of every process, files other
than logs and metrics, and the time of a step. The run saves a checkpoint every 20 steps and keeps the last two.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from recipe.bapo.records.metrics import read_metrics

ROOT = Path(__file__).parents[2]

INTERVAL = 10  # seconds
GROWS = 1.05, 10.0  # a value grows if it rises by more than 5 % and by more than 10 units (MB, threads, files)
MAY_GROW = {".log", ".jsonl", ".out", ".err"}


def bytes_in(folders, but=frozenset()) -> float:
    """Return the megabytes that files in ``folders`` take on disk, without those whose ending is in ``but``."""
    total = 0
    for folder in folders:
        for path in Path(folder).rglob("*"):
            try:
                if path.suffix not in but and path.is_file() and not path.is_symlink():
                    total += path.stat().st_blocks * 512
            except OSError:
                continue  # the file is gone
    return total / 1e6


def measure(root: psutil.Process, run_dir: Path) -> dict[str, float]:
    """Measure the run now: values by name, with processes of the same title added up."""
    found: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            command, memory = process.cmdline(), process.memory_full_info().pss / 1e6
            # Ray adds the name of the current method to a worker's title.
            title = Path(command[0]).name.split(" ")[0].removeprefix("ray::").split(".")[0]
            if title.startswith("python"):
                ours = {"recipe.bapo.launch": "launcher", "recipe.bapo.main_bapo": "driver"}
                title = next((ours[word] for word in command if word in ours), "Ray's dashboard and monitors")
            found[f"{title}, MB"] += memory
            found["all, MB"] += memory
            found["all, threads"] += process.num_threads()
            found["all, open files"] += process.num_fds()
        except (psutil.Error, IndexError):
            continue  # the process has ended
    found["files of the run but logs and metrics, MB"] = bytes_in([run_dir], MAY_GROW)
    found["logs and metrics, MB"] = bytes_in([run_dir]) - found["files of the run but logs and metrics, MB"]
    temporary = [*Path(tempfile.gettempdir()).glob("bapo-*"), "/dev/shm"]
    found["shared memory and temporary files but logs, MB"] = bytes_in(temporary, MAY_GROW)
    return dict(found)


def part_of(samples, first, last):
    """Return the values that were measured from step ``first`` to step ``last``."""
    return [sample["values"] for sample in samples if first <= sample["step"] <= last and sample["values"]]


def report(samples, step_times, steps) -> str:
    """Format the table as Markdown."""
    tenth = steps // 10
    early, late = part_of(samples, tenth, 2 * tenth), part_of(samples, steps - tenth, steps)
    lines = ["| what | second tenth | last tenth | change | |", "|---|---|---|---|---|"]
    for name in sorted({name for values in early + late for name in values}):
        a, b = (statistics.median(values.get(name, 0.0) for values in part) for part in (early, late))
        verdict = "grows" if b > GROWS[0] * a and b > a + GROWS[1] else "flat"
        lines.append(f"| {name} | {a:,.1f} | {b:,.1f} | {b - a:+,.1f} | {verdict} |")
    a, b = statistics.median(step_times[tenth : 2 * tenth]), statistics.median(step_times[-tenth:])
    lines.append(f"| median step, s | {a:.2f} | {b:.2f} | {b - a:+.2f} | |")
    return "\n".join(lines)


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the run")
    arguments = parser.parse_args()
    steps = arguments.steps
    if steps < 100:
        parser.error(f"--steps {steps} is too short for tenths to be compared: give 100 or more.")
    run_dir = ROOT / "runs" / f"soak-{time.strftime('%Y%m%d-%H%M%S')}"
    length = (f"trainer.total_training_steps={steps}", "trainer.test_freq=-1")
    saved = ("trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=2")
    command = ["bash", "recipe/bapo/run_bapo_example.sh", *length, *saved, *arguments.overrides]
    environment = {"VERL_PLATFORM": "cpu", **os.environ, "OUTPUT_DIR": str(run_dir)}
    samples: list[dict] = []
    with subprocess.Popen(command, cwd=ROOT, env=environment) as run:
        try:
            root = psutil.Process(run.pid)
            while run.poll() is None:
                step = max((step for step, _ in read_metrics(run_dir)), default=0)
                samples.append({"step": step, "values": measure(root, run_dir)})
                time.sleep(INTERVAL)
        except KeyboardInterrupt:
            run.send_signal(signal.SIGINT)
    if arguments.json:
        arguments.json.write_text(json.dumps(samples))
    if run.returncode:
        sys.exit(run.returncode)
    step_times = [data["timing_s/step"] for _, data in read_metrics(run_dir) if "timing_s/step" in data]
    print(report(samples, step_times, steps))


if __name__ == "__main__":
    main()
