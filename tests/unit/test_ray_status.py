# SPDX-License-Identifier: Apache-2.0
"""What a run shows of Ray's status while no step has ended. tests/stack/test_faults.py shows it in a real run."""

import sys

import pytest
from support.commands import until

from recipe.bapo.run import ray_status

# What `ray status` of Ray 2.56 printed for a task of 4 CPUs and a placement group where Ray has 2.
STATUS = """======== Autoscaler status: 2026-11-26 09:48:45.631051 ========
Node status
---------------------------------------------------------------
Pending:
 (no pending nodes)

Resources
---------------------------------------------------------------
Total Usage:
 0.0/2.0 CPU
 0.0/1.0 GPU
 0B/15.51GiB memory

From request_resources:
 (none)
Pending Demands:
 {'CPU': 4.0}: 3+ pending tasks/actors
 {'CPU': 3.0, 'GPU': 1.0} * 1 (PACK): 1+ pending placement groups
"""
NOTHING = STATUS.partition(" {'CPU': 4.0}")[0] + " (no resource demands)\n"
FAKE_RAY = """#!/bin/bash
cd "$(dirname "$0")"
[ "$*" = "status --address 10.0.0.2:6379" ] || exit 1
answer=$(ls answers | head -n 1)
[ -n "$answer" ] && cat "answers/$answer" && rm "answers/$answer"
"""


def test_usage_and_demands_are_taken_from_rays_status():
    assert ray_status.pending(STATUS).splitlines() == [
        "Total Usage:",
        " 0.0/2.0 CPU",
        " 0.0/1.0 GPU",
        "Pending Demands:",
        " {'CPU': 4.0}: 3+ pending tasks/actors",
        " {'CPU': 3.0, 'GPU': 1.0} * 1 (PACK): 1+ pending placement groups",
    ]
    assert ray_status.pending(NOTHING) == ray_status.pending("No cluster status. It may take a few seconds") == ""


@pytest.mark.parametrize(
    "answers, shown",
    [
        ("33332222", ["3+", "2+"]),  # once, and again when it has changed
        ("3.3.", []),  # Ray placed it soon after
        ("3 33", ["3+"]),  # a look that failed in between
    ],
)
def test_what_two_looks_find_is_shown_until_a_step_ends(tmp_path, monkeypatch, answers, shown):
    told, metrics, folder = [], tmp_path / "metrics.jsonl", tmp_path / "answers"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(ray_status, "send", lambda kind, text: told.append((kind, text)))
    monkeypatch.setattr(ray_status, "INTERVAL", 0.02)
    (tmp_path / "ray").write_text(FAKE_RAY)
    (tmp_path / "ray").chmod(0o755)
    folder.mkdir()
    for number, answer in enumerate(answers):
        text = {" ": "", ".": NOTHING}.get(answer, STATUS.replace("3+", f"{answer}+"))
        (folder / f"{number:02}").write_text(text)
    metrics.touch()  # verl creates it empty, and then adds a line per step
    thread = ray_status.follow("10.0.0.2:6379", metrics)
    until(lambda: not list(folder.iterdir()), 30, "the last answer")
    assert thread.is_alive()
    metrics.write_text("{}\n")
    thread.join(30)
    assert not thread.is_alive()
    assert [kind for kind, _ in told] == ["info"] * len(shown)
    assert all(count in text for count, (_, text) in zip(shown, told, strict=True))


def test_a_ray_command_that_fails_is_only_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(ray_status, "INTERVAL", 0.02)
    thread, said = ray_status.follow("10.0.0.2:6379", tmp_path / "metrics.jsonl"), []
    until(lambda: said.append(capsys.readouterr().out) or "Could not ask Ray" in "".join(said), 30, "a line in the log")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    thread.join(30)
    assert not thread.is_alive()
