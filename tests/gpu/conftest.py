# SPDX-License-Identifier: Apache-2.0
"""Options and fixtures of the tests that need a GPU. This file imports only torch, pytest and Python's own modules.

``bash scripts/gpu_check.sh`` runs these tests. ``--rehearse`` runs them on the CPU, which checks the tests themselves
and says nothing about a GPU. ``--report FILE`` appends a line of JSON to FILE after each test, so that a run that is
killed keeps its results.
"""

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

HERE = Path(__file__).parent


def pytest_addoption(parser):
    group = parser.getgroup("gpu")
    group.addoption("--rehearse", action="store_true", help="run the GPU tests on the CPU")
    group.addoption("--report", type=Path, help="append a line of JSON to this file after each test")


def is_rehearsal(config):
    """Return whether to use the CPU. pytest does not know the option if it was started without this folder."""
    return bool(config.getoption("--rehearse", default=False))


def pytest_collection_modifyitems(config, items):
    reason = f"no GPU that torch {torch.__version__} (CUDA {torch.version.cuda}) can use; on the CPU: --rehearse"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not is_rehearsal(config) and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


def describe_machine(rehearsal):
    """Describe the machine, for the figures in the report."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": collect_env.run(f"git -C {HERE} describe --always --dirty")[1],
        "rehearsal": rehearsal,
        "machine": collect_env.get_pretty_env_info().splitlines(),
    }


class Report:
    """Writes the lines of ``--report``."""

    def __init__(self, path):
        self.path = path

    def append(self, entry):
        """Append a line, and return when it is on the disk."""
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def pytest_runtest_logreport(self, report):
        if not report.nodeid.startswith("tests/gpu/"):
            return
        if report.when != "call" and report.outcome == "passed":
            return
        entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.user_properties:
            entry["told"] = dict(report.user_properties)
        if report.outcome != "passed":
            entry["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)[-2000:]
        self.append(entry)


def pytest_configure(config):
    path = config.getoption("--report", default=None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = Report(path)
        report.append(describe_machine(is_rehearsal(config)))
        config.pluginmanager.register(report, "gpu-report")


@pytest.fixture(scope="session")
def rehearsal(pytestconfig):
    """Return whether the tests run on the CPU."""
    return is_rehearsal(pytestconfig)


@pytest.fixture(scope="session")
def device(rehearsal):
    """Return the device to compute on."""
    return torch.device("cpu" if rehearsal else "cuda")


@pytest.fixture
def on_gpu(rehearsal):
    """Skip a test that a CPU cannot run."""
    if rehearsal:
        pytest.skip("needs a GPU, so a rehearsal skips it")


@pytest.fixture
def tell(record_property):
    """Return a function that writes a name and a value to the report, without judging them."""
    return record_property
