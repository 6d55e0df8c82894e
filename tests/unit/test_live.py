# SPDX-License-Identifier: Apache-2.0
"""What is shown while a run goes: lines, and warnings once in a while."""

import json

import pytest

from recipe.bapo.health import WINDOW, health_warnings
from recipe.bapo.launch.console import StepPrinter


def step(number, **changes):
    data = {
        "training/global_step": number,
        "critic/rewards/mean": 0.5,
        "actor/entropy": 1.0,
        "actor/grad_norm": 0.3,
        "actor/bapo/saturated": 0.5,
        "actor/bapo/search_steps": 20.0,
        "actor/bapo/positive_contribution": 0.4,
    }
    return {**data, **changes}


QUIET = [step(i) for i in range(1, WINDOW + 1)]


@pytest.mark.parametrize(
    "history, said",
    [
        (QUIET, []),
        ([step(i, **{"actor/bapo/saturated": 1.0}) for i in range(WINDOW)], ["the target was out of reach"]),
        # Fixed bounds: nothing is searched, so there is no target to miss.
        ([step(i, **{"actor/bapo/saturated": 1.0, "actor/bapo/search_steps": 0.0}) for i in range(WINDOW)], []),
        (
            [step(i, **{"actor/bapo/negative_unbounded_share": 0.11}) for i in range(WINDOW)],
            ["tokens with negative advantage"],
        ),
        ([step(i, **{"actor/bapo/negative_unbounded_share": 0.09}) for i in range(WINDOW)], []),
        # With a dual clip they carry nothing.
        (
            [
                step(i, **{"actor/bapo/negative_unbounded_share": 0.11, "actor/pg_clipfrac_lower": 0.01})
                for i in range(WINDOW)
            ],
            [],
        ),
    ],
)
def test_what_deserves_a_look(history, said):
    warnings = health_warnings(history, bounds_can_move=True)
    assert len(warnings) == len(said) and all(map(str.startswith, warnings, said))


def test_a_target_out_of_reach_comes_with_one_that_is_not():
    reached = [0.40, 0.41, 0.42, 0.43, 0.44, 0.448, 0.45, 0.46, 0.47, 0.48]
    missed = {"actor/bapo/saturated": 1.0}
    history = [step(i, **missed, **{"actor/bapo/positive_contribution": rho}) for i, rho in enumerate(reached)]
    (text,) = health_warnings(history, bounds_can_move=True)
    assert "They reached 0.444: positive_contribution_target=0.44 is in reach" in text  # not rounded up


def already_met(number, share=0.96, clipped=0.01):
    found = {"met_at_once": share, "positive_contribution_start": 0.441 + number / 1000, "clip_low": 0.6}
    searched = {f"actor/bapo/{name}": value for name, value in {**found, "clip_high": 1.2}.items()}
    return step(number, **searched, **{"actor/pg_clipfrac": clipped})


def test_a_target_below_where_rho_comes_in_leaves_the_bounds_at_their_start():
    (text,) = health_warnings([already_met(i) for i in range(WINDOW)], bounds_can_move=True)
    assert "in 96% of the updates" in text and "at their start [0.60, 1.20]" in text
    assert "rho before the search was 0.446: with positive_contribution_target=0.45 bounds" in text  # not rounded down


def test_it_is_no_news_where_bounds_move_or_matter_not():
    assert not health_warnings([already_met(i, share=0.94) for i in range(WINDOW)], bounds_can_move=True)
    assert not health_warnings([already_met(i, clipped=0.0) for i in range(WINDOW)], bounds_can_move=True)  # fresh data
    assert not health_warnings([already_met(i) for i in range(WINDOW)], bounds_can_move=False)


def test_each_step_is_a_line_and_warnings_come_once_in_a_while(tmp_path, capsys):
    printer = StepPrinter(tmp_path, total=25, bounds_can_move=True)
    printer.print_new()  # there is no file yet
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for number in range(1, 26):
            line = json.dumps({"step": number, "data": step(number, **{"actor/bapo/saturated": 1.0})}) + "\n"
            for part in (line[:20], line[20:]):
                file.write(part)
                file.flush()
                printer.print_new()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines if line.startswith("step ")] == [f"step {i:>2}" for i in range(1, 26)]
    # At step 10, and again at step 20.
    assert [i for i, line in enumerate(lines) if line.startswith("Warning: the target was out of reach")] == [10, 21]
