# SPDX-License-Identifier: Apache-2.0
"""When a run shows what Ray cannot place. tests/stack/test_faults.py shows it in a real run."""

from types import SimpleNamespace

import pytest
from support.commands import LIMIT

from recipe.bapo.run import demands


@pytest.mark.parametrize(
    "answers, shown",
    [
        (["one", "one", "one", "two", "two", "two"], ["one", "two"]),  # once, and again when it has changed
        (["one", "", "one", ""], []),  # Ray placed it soon after
        (["one", OSError("the dashboard is not up"), "one"], ["one"]),
    ],
)
def test_what_two_looks_find_is_shown_until_a_step_ends(tmp_path, monkeypatch, capsys, answers, shown):
    told, left, metrics = [], list(answers), tmp_path / "metrics.jsonl"

    def pending(job):
        answer = left.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [answer] if answer else []

    def sleep(seconds):
        if seconds == demands.INTERVAL and not left:
            metrics.write_text("{}\n")  # a step ends after the last answer

    monkeypatch.setattr(demands, "send", lambda kind, text: told.append((kind, text)))
    monkeypatch.setattr(demands, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(demands, "pending", pending)
    monkeypatch.setattr(demands, "free", lambda: "0 of 4 CPU")
    starting = [False, False, True]
    monkeypatch.setattr("ray.is_initialized", lambda: starting.pop(0))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    metrics.touch()  # verl creates it empty, and then adds a line per step
    thread = demands.follow(metrics)
    thread.join(LIMIT)
    assert not thread.is_alive() and not left
    assert not starting and told.pop(0) == ("ray", "01000000")  # the parent finds the run's sockets by it
    assert [kind for kind, _ in told] == ["info"] * len(shown)
    assert all(f"place {name} (free: 0 of 4 CPU)" in text for name, (_, text) in zip(shown, told, strict=True))
    failed = [str(answer) for answer in answers if isinstance(answer, OSError)]
    said = capsys.readouterr().out
    assert said.count("Could not ask Ray") == len(failed) and all(error in said for error in failed)
