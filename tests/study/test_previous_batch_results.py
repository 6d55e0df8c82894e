# SPDX-License-Identifier: Apache-2.0
"""The claims of the docs about bounds of the previous batch follow from the raw table of the study."""

from pathlib import Path

import numpy as np
import pytest

from scripts.study import analysis
from scripts.study import previous_batch_tables as tables
from scripts.study.plan import RESULTS
from scripts.study.previous_batch import (
    BESIDE,
    DESCRIBED,
    EXACT,
    FOLLOW_UP_FAILING_MARGIN,
    FOLLOW_UP_SEEDS,
    FOLLOW_UP_TABLE,
    HARD,
    HARD_EXACT,
    HARD_LAGGED,
    LAGGED,
    NARROW,
    PARTIAL_128,
    PLACES,
    WIDE,
    cells,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    page.stem: page.read_text()
    for page in (
        DOCS / "results" / "small_networks.md",
        DOCS / "choosing.md",
        DOCS / "dev" / "log.md",
        DOCS / "performance.md",
    )
}
TEXT = {name: " ".join(page.split()) for name, page in PAGES.items()}


@pytest.fixture(scope="module")
def frame():
    return tables.read_table()


def speed(frame, method=LAGGED):
    """Return log ratios of the updates to those of exact BAPO, by place."""
    return [tables.against(frame, place, method) for place in PLACES]


def ratios(frame, method=LAGGED):
    return [f"{np.exp(differences.mean()):.2f}" for differences in speed(frame, method)]


def failed(frame, method, seeds=None):
    """Return the number of failed runs with partial rollout at 128, where failing is tested; ``seeds``: only these."""
    rows = analysis.at_place(frame, PARTIAL_128, method)
    return int(rows["failed"].sum() if seeds is None else rows[rows["seed"].isin(seeds)]["failed"].sum())


def test_the_stored_tables_follow_from_the_raw_table(capsys):
    tables.print_tables()
    assert capsys.readouterr().out.strip() in (RESULTS / "previous_batch.md").read_text()


def test_every_planned_cell_is_there_with_all_its_seeds(frame):
    assert not tables.missing(frame, cells())


def test_the_code_that_made_the_numbers_was_committed(frame):
    rows = frame[frame["cell"].isin({cell.name for cell in cells()})]
    assert len(set(rows["code"])) == 1 and "changes" not in rows["code"].iloc[0]


def test_the_tests_of_speed(frame):
    for line in tables.speed_table(frame):
        assert not line or line in PAGES["small_networks"].splitlines(), line
    assert all(map(tables.within_margin, speed(frame)))  # "the lagged bounds pass at all four places"
    upper = [f"{np.exp(analysis.interval(differences)[1]):.3f}" for differences in speed(frame)]
    assert "upper ends of the four intervals are {}, {}, {} and {},".format(*upper) in TEXT["small_networks"]
    for page in ("choosing", "log"):
        assert "0.97, 0.99, 1.01 and 0.98 times" in TEXT[page] and ratios(frame) == ["0.97", "0.99", "1.01", "0.98"]


def test_the_test_of_failing(frame):
    differences = tables.against(frame, PARTIAL_128, LAGGED, measure="failing")
    assert tables.failing_verdicts(differences) == {"fails more": False, "not much more": True}
    said = f"on 480 seeds {failed(frame, LAGGED)} runs fail with the lagged bounds and {failed(frame, EXACT)} with"
    assert said in TEXT["small_networks"] and len(differences) == 480
    assert f"The difference of the shares is {tables.signed(differences)}" in TEXT["small_networks"]
    assert f"{failed(frame, LAGGED)} against {failed(frame, EXACT)} of 480 runs" in TEXT["log"]
    said = f"{failed(frame, LAGGED)} of 480 runs failed with it and {failed(frame, EXACT)} with exact BAPO"
    assert said in TEXT["choosing"]


def test_what_the_task_can_tell(frame):
    within = {method: [tables.within_margin(differences) for differences in speed(frame, method)] for method in BESIDE}
    assert not any(within.pop(NARROW)) and all(map(all, within.values()))
    narrow = sorted(ratios(frame, NARROW))
    assert f"[0.6, 1.2] needs {narrow[0]} to {narrow[-1]} times the updates" in TEXT["small_networks"]
    seeds = set(analysis.at_place(frame, PARTIAL_128, WIDE)["seed"])
    assert len(seeds) == 160
    said = f"it fails in {failed(frame, NARROW)} of 160 runs where exact BAPO fails in {failed(frame, EXACT, seeds)}."
    assert said in TEXT["small_networks"] and f"fail in {failed(frame, WIDE)} of the 160" in TEXT["small_networks"]
    faster = [np.exp(analysis.interval(differences)[1]) < 1 for differences in speed(frame, WIDE)]
    assert faster == [True, False, True, True]  # "faster than exact BAPO at three places"
    epochs, one_epoch, delay, partial = ratios(frame, WIDE)
    assert f"fixed [0.8, 3.0] needed {epochs}, {one_epoch}, {delay} and {partial} times" in TEXT["choosing"]


def test_how_far_the_bounds_are(frame):
    rows = [tables.lag_row(frame, cell) for place in PLACES for cell in place.cells([LAGGED])]
    differ = sorted(round(100 * float(row[3])) for row in rows)
    for page in ("small_networks", "log"):
        assert f"in {differ[0]} to {differ[-1]} % of the updates of a cell" in TEXT[page]
    distances = sorted(float(row[4]) for row in rows)
    assert f"by {distances[0]:.2f} to {distances[-1]:.2f} in `c_high`" in TEXT["small_networks"]


def test_the_other_tasks(frame):
    found = []
    for place, exact in DESCRIBED:
        lagged = f"previous_batch:{exact}"
        counts = [int(analysis.at_place(frame, place, method)["failed"].sum()) for method in (lagged, exact)]
        found.append((tables.ratio(tables.against(frame, place, lagged, exact)), *counts))
    hard, partial, larger = found
    assert f"the ratio is {hard[0]} with epochs and {partial[0]} with partial rollout" in TEXT["small_networks"]
    assert f"and {hard[1]} and {partial[1]} of 80 lagged runs fail and no exact ones" in TEXT["small_networks"]
    assert hard[2] == partial[2] == 0
    assert f"10 seeds) the ratio is {larger[0]}" in TEXT["small_networks"]


def test_the_follow_up():
    frame = tables.read_table(FOLLOW_UP_TABLE)
    assert not set(frame.loc[frame["source"] != "fresh", "seed"]) ^ set(FOLLOW_UP_SEEDS)
    speed, failing = (
        tables.against(frame, HARD[0], HARD_LAGGED, HARD_EXACT, measure) for measure in ("speed", "failing")
    )
    assert len(speed) == 60 and tables.within_margin(speed)
    verdicts = tables.failing_verdicts(failing, FOLLOW_UP_FAILING_MARGIN)
    assert verdicts == {"fails more": False, "not much more": True}  # "The hint did not hold."
    lagged, exact = (analysis.at_place(frame, HARD[0], m)["failed"].sum() for m in (HARD_LAGGED, HARD_EXACT))
    said = f"their data: {tables.ratio(speed)}, and {lagged} of 240 lagged runs fail and {exact} exact ones"
    assert said in TEXT["small_networks"]
    assert f"epochs it needed {np.exp(speed.mean()):.2f} times the updates" in TEXT["choosing"]
