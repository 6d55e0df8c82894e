# SPDX-License-Identifier: Apache-2.0
"""The table of a stage: what was looked at, what is expected, what was seen, and whether that is ok."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


class Table:
    """Rows are printed as they are found, so that a run that breaks off has shown what it saw."""

    def __init__(self, stage: str, rehearsal: bool):
        self.stage, self.rehearsal = stage, rehearsal
        self.device = torch.device("cpu" if rehearsal else "cuda")
        self.rows: list[dict] = []

    def check(self, what: str, expected, seen, ok: bool | None):
        """Add a row; ``ok`` None: told, not judged."""
        self.rows.append({"what": what, "expected": str(expected), "seen": str(seen), "ok": ok})
        print(f"| {what} | {expected} | {seen} | {'-' if ok is None else 'ok' if ok else 'NO'} |", flush=True)

    def tell(self, what: str, seen):
        """Add a row that is not judged."""
        self.check(what, "", seen, None)

    def run(self, checks: Sequence[Callable[[Table], None]]):
        """Run ``checks``; one that raises makes a failed row, and the others run."""
        what = "rehearsal on the CPU: nothing here was run on a GPU" if self.rehearsal else "on a GPU"
        print(f"\n**Stage {self.stage}, {what}**\n\n| what | expected | seen | ok |\n|---|---|---|---|", flush=True)
        for check in checks:
            try:
                check(self)
            except Exception as error:
                traceback.print_exc()
                self.check(
                    check.__name__.replace("_", " "), "no error", f"{type(error).__name__}: {error}"[:300], False
                )

    def failed(self) -> list[dict]:
        """The rows that are not as expected."""
        return [row for row in self.rows if row["ok"] is False]


def output_of(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def machine(table: Table):
    """What the figures belong to."""
    table.tell("Python, torch, torch's CUDA", f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}")
    if not table.rehearsal:
        memory, capability = (
            torch.cuda.mem_get_info()[1] / 2**30,
            ".".join(map(str, torch.cuda.get_device_capability())),
        )
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, sm {capability}, {memory:.0f} GiB"
        table.tell("GPU", name)
        table.tell("driver", output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))


def main(stage: str, checks: Sequence[Callable[[Table], None]], arguments: Sequence[str] | None = None) -> int:
    """Command line of a stage. The exit code is 0, 1 where a row is not ok, 2 where there is no GPU to check."""
    parser = argparse.ArgumentParser(prog=f"scripts/gpu_check.sh {stage}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU platform; says nothing about a GPU")
    parser.add_argument("--json", type=Path, help="write the table here")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print(
            f"There is no GPU that torch {torch.__version__} (CUDA {torch.version.cuda}) can use. Where nvidia-smi "
            "lists one, the driver is older than this CUDA. To try the check itself on a CPU: --rehearse.",
            file=sys.stderr,
        )
        return 2
    table = Table(stage, given.rehearse)
    table.run([machine, *checks])
    failed = table.failed()
    print(f"\n{len(failed)} of {sum(row['ok'] is not None for row in table.rows)} checks are not ok.")
    if given.json:
        about = {
            "stage": stage,
            "rehearsal": table.rehearsal,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": output_of("git", "describe", "--always", "--dirty"),
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**about, "rows": table.rows}, indent=1))
    return 1 if failed else 0
