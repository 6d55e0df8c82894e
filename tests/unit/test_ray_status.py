# SPDX-License-Identifier: Apache-2.0
"""What a run shows of Ray's status while no step has ended. tests/stack/test_faults.py shows it in a real run."""

import sys
import threading

import pytest
from ray.autoscaler._private.autoscaler import AutoscalerSummary
from ray.autoscaler._private.util import LoadMetricsSummary, format_info_string
from support.commands import until

from recipe.bapo.launch import ray_status

USAGE = {"CPU": (4.0, 4.0), "GPU": (0.0, 1.0), "memory": (0, 1 << 30), "node:10.0.0.2": (0, 1)}
SHOWN = ["Total Usage:", " 4.0/4.0 CPU", " 0.0/1.0 GPU", "Pending Demands:"]
FAKE_RAY = """#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >> arguments
answer=$(ls answers | head -n 1)
[ -n "$answer" ] || exit 1
cat "answers/$answer"
rm "answers/$answer"
"""


def status_of(tasks=(), groups=()):
    """Return what ``ray status`` prints, made by Ray's own function."""
    load = LoadMetricsSummary(USAGE, list(tasks), list(groups), request_demand=[], node_types=[])
    return format_info_string(load, AutoscalerSummary({"node_1": 1}, {}, [], {}, []))


def waiting(count):
    """Return Ray's status while ``count`` tasks wait for a CPU."""
    return status_of(tasks=[({"CPU": 1.0}, count)])


def test_usage_and_demands_are_taken_from_rays_status():
    group = ({"strategy": "PACK", "bundles": [({"CPU": 3.0, "GPU": 1.0}, 1)]}, 1)
    assert ray_status.unmet_demands(status_of([({"CPU": 1.0}, 3)], [group])) == [
        *SHOWN,
        " {'CPU': 1.0}: 3+ pending tasks/actors",
        " {'CPU': 3.0, 'GPU': 1.0} * 1 (PACK): 1+ pending placement groups",
    ]


def test_nothing_is_shown_if_ray_has_placed_everything():
    status = status_of()
    assert "(no resource demands)" in status and ray_status.unmet_demands(status) == []
    assert ray_status.unmet_demands("No cluster status. It may take a few seconds") == []


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Follow a fake Ray that gives these answers, one after the other. Return what the console shows."""
    shown, metrics = [], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(ray_status, "send", lambda kind, text: shown.append((kind, text)))
    monkeypatch.setattr(ray_status, "INTERVAL", 0.05)
    monkeypatch.setattr(ray_status, "CONFIRMATION", 0.05)
    (tmp_path / "ray").write_text(FAKE_RAY)
    (tmp_path / "ray").chmod(0o755)
    folder = tmp_path / "answers"
    folder.mkdir()
    before = set(threading.enumerate())

    def answered():
        return not list(folder.iterdir())

    def ended():
        return set(threading.enumerate()) <= before

    def follow(*answers):
        for number, answer in enumerate(answers):
            (folder / f"{number:02}").write_text(answer)
        metrics.touch()  # verl creates it empty before the first step
        ray_status.follow("10.0.0.2:6379", metrics)
        until(answered, 30, "the last answer")
        asked = len((tmp_path / "arguments").read_text().splitlines())
        until(lambda: len((tmp_path / "arguments").read_text().splitlines()) > asked, 30, "a look that fails")
        assert not ended()
        metrics.write_text("{}\n")
        until(ended, 30, "the end of the thread")
        assert set((tmp_path / "arguments").read_text().splitlines()) == {"status --address 10.0.0.2:6379"}
        assert {kind for kind, _ in shown} <= {"info"}
        return [text.splitlines() for _, text in shown]

    return follow


def test_rays_status_is_shown_once_and_again_when_it_changes(look):
    first, second = look(waiting(3), waiting(3), waiting(3), waiting(3), waiting(2), waiting(2))
    assert first[0].startswith("Training has not made a step for ") and first[0].endswith("Ray's status:")
    assert first[1:] == [f"  {line}" for line in (*SHOWN, " {'CPU': 1.0}: 3+ pending tasks/actors")]
    assert second[-1] == "   {'CPU': 1.0}: 2+ pending tasks/actors"


def test_a_demand_that_ray_places_at_once_is_not_shown(look):
    assert look(waiting(1), status_of(), status_of(), waiting(1), status_of()) == []


def test_nothing_is_shown_once_a_step_has_ended(tmp_path, monkeypatch):
    """Also if it ends while Ray is asked."""
    metrics = tmp_path / "metrics.jsonl"

    def ask(address):
        metrics.write_text("{}\n")
        return waiting(1)

    monkeypatch.setattr(ray_status, "_status", ask)
    monkeypatch.setattr(ray_status, "send", lambda *_: pytest.fail("a status was shown"))
    monkeypatch.setattr(ray_status, "INTERVAL", 0)
    monkeypatch.setattr(ray_status, "CONFIRMATION", 0)
    ray_status._follow("10.0.0.2:6379", metrics)


def test_a_ray_command_that_fails_is_only_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert ray_status._status("10.0.0.2:6379") == ""
    assert "Could not ask Ray for its status: " in capsys.readouterr().out
    (tmp_path / "ray").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setattr(ray_status, "TIMEOUT", 0.2)
    assert ray_status._status("10.0.0.2:6379") == ""
    assert "timed out" in capsys.readouterr().out
