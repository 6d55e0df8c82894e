# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show. ``bash scripts/gpu_check.sh`` runs these tests; imported here is nothing but torch.

``--rehearse`` runs them on the CPU, which tries the tests and says nothing about a GPU. ``--report FILE`` gets a line
of JSON after each test, so that a run which is killed has kept what it saw.
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def pytest_addoption(parser):
    group = parser.getgroup("gpu")
    group.addoption("--rehearse", action="store_true", help="run the GPU tests on the CPU")
    group.addoption("--report", type=Path, help="append a line of JSON to this file after each test")


def is_rehearsal(config):
    """Whether the CPU is to be used; not even asked for where pytest was started without this folder."""
    return bool(config.getoption("--rehearse", default=False))


def pytest_collection_modifyitems(config, items):
    reason = f"no GPU that torch {torch.__version__} (CUDA {torch.version.cuda}) can use; on the CPU: --rehearse"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not is_rehearsal(config) and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


def first_line_of(*command):
    """What a command prints first, or "unknown"."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def describe_machine(rehearsal):
    """What the figures belong to."""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": first_line_of("git", "describe", "--always", "--dirty"),
        "rehearsal": rehearsal,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if not rehearsal and torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        about |= {
            "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, sm {capability}",
            "gibibytes": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
            "driver": first_line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return about


class Report:
    """Writes the lines of ``--report``."""

    def __init__(self, path):
        self.path = path
        self.told = {}

    def append(self, entry):
        """A line that is on the disk when this returns."""
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def pytest_runtest_logreport(self, report):
        if not report.nodeid.startswith("tests/gpu/"):
            return
        self.told[report.nodeid] = dict(report.user_properties)
        if report.when != "call" and report.outcome == "passed":
            return
        entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.user_properties:
            entry["told"] = dict(report.user_properties)
        if report.outcome != "passed":
            entry["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)[-2000:]
        self.append(entry)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("what was seen")
        for test, told in self.told.items():
            for name, value in told.items():
                terminalreporter.write_line(f"{test.removeprefix('tests/gpu/')}: {name}: {value}")
        terminalreporter.write_line(f"the report: {self.path}")


def pytest_configure(config):
    path = config.getoption("--report", default=None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = Report(path)
        report.append(describe_machine(is_rehearsal(config)))
        config.pluginmanager.register(report, "gpu-report")


@pytest.fixture(scope="session")
def rehearsal(pytestconfig):
    """Whether this is the CPU's turn."""
    return is_rehearsal(pytestconfig)


@pytest.fixture(scope="session")
def device(rehearsal):
    """Where to compute."""
    return torch.device("cpu" if rehearsal else "cuda")


@pytest.fixture
def on_gpu(rehearsal):
    """For what a CPU cannot show."""
    if rehearsal:
        pytest.skip("not to be seen on a CPU")


@pytest.fixture
def tell(record_property):
    """A function of a name and a value: told in the report, not judged."""
    return record_property
