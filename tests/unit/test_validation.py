# SPDX-License-Identifier: Apache-2.0
"""avg@n and its spread, by hand."""

import pytest

from recipe.bapo.records.validation import summarise, table, write


def test_mean_and_spread_by_hand():
    # Two problems of source a with 3 responses each, interleaved; passes: (1+0)/2, (0+0)/2, (1+1)/2.
    responses = [("a", "p", 1), ("a", "q", 0.0), ("a", "p", False), ("a", "q", 0), ("a", "p", True), ("a", "q", 1.0)]
    found = summarise(*zip(*[*responses, ("b", "r", 1.0)], strict=True))
    assert found["a"] == {"problems": 2, "n": 3, "mean": 0.5, "std": 0.5, "lowest": 0.0, "highest": 1.0}
    assert found["b"] == {"problems": 1, "n": 1, "mean": 1.0, "std": None, "lowest": 1.0, "highest": 1.0}


def test_a_problem_with_fewer_responses_counts_as_much():
    found = summarise(["a"] * 4, ["p", "p", "p", "q"], [1.0, 1.0, 0.0, 0.0])["a"]
    assert found["mean"] == pytest.approx((2 / 3 + 0) / 2) and found["n"] == 1
    assert summarise(["a", "a"], ["p", "q"], [1.0, None])["a"]["problems"] == 1


def test_the_table(tmp_path):
    write(tmp_path / "validation", 7, summarise(["aime_2024"] * 2, ["p", "p"], [1.0, 0.0]))
    lines = table(tmp_path / "validation" / "step_7.json").splitlines()
    assert lines[1].split() == ["aime_2024", "1", "2", "0.5000", "0.7071", "0.0000", "1.0000"]
