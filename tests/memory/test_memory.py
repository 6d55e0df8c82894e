# SPDX-License-Identifier: Apache-2.0
"""Preflight's arithmetic of a GPU's memory, held against torch's FSDP2 memory tracker."""

from pathlib import Path

import pytest
from support.memory_cases import CASES, EXPERIMENTS, HIGHEST, LOWEST, NO_UPDATE, Case, line_of, row_of
from support.memory_tracker import Work, peak_gibibytes

ROOT = Path(__file__).parents[2]


def test_every_shipped_experiment_is_a_case():
    assert {case.experiment for case in CASES} | NO_UPDATE == set(EXPERIMENTS)


def test_preflight_is_near_the_tracker_for_a_small_model(tmp_path):
    for phase, (preflight, tracker) in row_of(Case("example", "0.5B", 1), tmp_path).items():
        assert LOWEST * tracker <= preflight <= HIGHEST * tracker, phase


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_preflight_is_near_the_tracker_and_the_table_says_so(case, tmp_path):
    row = row_of(case, tmp_path)
    for phase, (preflight, tracker) in row.items():
        assert LOWEST * tracker <= preflight <= HIGHEST * tracker, phase
    assert line_of(case, row) in (ROOT / "docs" / "running.md").read_text().splitlines()


@pytest.mark.slow
def test_an_entropy_without_gradient_spares_six_planes_of_logits():
    measured = Work("7B", 8, 18432, update=True, entropy=True)
    without = peak_gibibytes(measured)["total"]
    with_gradient = peak_gibibytes(Work("7B", 8, 18432, update=True, entropy=True, entropy_gradient=True))["total"]
    plane = 2 * 18432 * 152064 / (1 << 30)
    assert with_gradient - without == pytest.approx(6 * plane, rel=0.05)
