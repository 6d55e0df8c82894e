# SPDX-License-Identifier: Apache-2.0
"""The tables of the study of ``previous_batch`` find planted effects in a raw table, by the plan's rules."""

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.study import previous_batch_tables as tables
from scripts.study.methods import config_of, path_of
from scripts.study.previous_batch import (
    BESIDE,
    DELAY,
    EPOCHS,
    EXACT,
    FAILING_SEEDS,
    LAGGED,
    NARROW,
    OTHER_SEED,
    PARTIAL,
    PARTIAL_128,
    SEEDS,
    WIDE,
)
from scripts.study.train import Cell, Trainer


def row(cell, seed, **measured):
    """Make a row of a run that did not fail."""
    values = dict(final_reward=0.9, start_reward=0.1, unsolved=0.0, finite=True, updates_to_target=100.0)
    return {"cell": cell.name, **vars(cell), "seed": seed, **values, **measured}


def table_of(rows, tmp_path):
    """Write these rows to a parquet file and read it as a table."""
    pd.DataFrame(rows).to_parquet(tmp_path / "table.parquet")
    return tables.read_table(tmp_path / "table.parquet")


def planted(place, effects, tmp_path, noise=0.2):
    """Make updates by method, with noise that all methods of a seed share, and noise of each method alone."""
    rng, rows = np.random.default_rng(1), []
    shared = dict(zip(SEEDS["chain"], rng.normal(0, 0.5, 160), strict=True))
    for cell in place.cells(list(effects)):
        for seed in SEEDS["chain"]:
            log = np.log(60) + effects[cell.method] + shared[seed] + noise * rng.normal()
            rows.append(row(cell, seed, updates_to_target=float(np.exp(log))))
    return table_of(rows, tmp_path)


def test_planted_ratios_are_found(tmp_path):
    effects = {EXACT: 0.0, LAGGED: 0.03, OTHER_SEED: 0.02, NARROW: 0.3, WIDE: 0.09}
    frame = planted(EPOCHS, effects, tmp_path)
    for method in (LAGGED, *BESIDE):
        found = tables.against(frame, EPOCHS, method)
        assert len(found) == 160 and found.mean() == pytest.approx(effects[method], abs=0.05)
    within = {method: tables.within_margin(tables.against(frame, EPOCHS, method)) for method in (LAGGED, *BESIDE)}
    # The upper end has to be below log(1.1) = 0.095: 0.09 with a standard error of 0.016 is not.
    assert within == {LAGGED: True, OTHER_SEED: True, NARROW: False, WIDE: False}
    assert not len(tables.against(frame, DELAY, LAGGED))  # the table has no run of this place
    text = "\n".join(tables.speed_table(frame))
    assert "wrong bounds from right ones, not whether they are the run's own" in text


def test_a_place_uses_its_own_learning_rates_only(tmp_path):
    """Partial rollout at 128 also ran at 0.016, for the test of failed runs. These runs must not count for speed."""
    rows = [row(cell, seed) for cell in PARTIAL.cells([EXACT, LAGGED]) for seed in SEEDS["chain"]]
    rows += [row(cell, seed, updates_to_target=1.0) for cell in PARTIAL_128.cells([LAGGED]) for seed in FAILING_SEEDS]
    frame = table_of(rows, tmp_path)
    assert tables.against(frame, PARTIAL, LAGGED).tolist() == [0.0] * 160


@pytest.mark.parametrize("excess, verdicts", [(0.0, (False, True)), (0.19, (True, False)), (0.05, (True, True))])
def test_planted_failures_are_found(tmp_path, excess, verdicts):
    """A run fails if it ends below half of its control's reward, which is 0.92 at this rate."""
    rows = []
    for method, share in ((EXACT, 0.4), (LAGGED, 0.4 + excess)):
        (cell,) = PARTIAL_128.cells([method])
        failed = np.random.default_rng(1).random(len(FAILING_SEEDS)) < share
        rows += [row(cell, s, final_reward=0.45 if f else 0.47) for s, f in zip(FAILING_SEEDS, failed, strict=True)]
    found = tables.against(table_of(rows, tmp_path), PARTIAL_128, LAGGED, measure="failing")
    assert len(found) == 480 and found.mean() == pytest.approx(excess, abs=0.04)
    assert tuple(tables.failing_verdicts(found).values()) == verdicts


def test_what_a_place_can_tell():
    def told(*within):
        return tables.what_the_task_tells(dict(zip(BESIDE, within, strict=True)))

    assert told(True, True, True) == "nothing about bounds"
    assert told(True, False, True) == told(True, False, False) != told(True, True, True)
    assert told(False, True, True) == told(False, False, True) == "whether bounds are the run's own"


@pytest.mark.parametrize("source, staleness, updates", [("once", 4, 64), ("epochs", 2, 24), ("delay", 8, 16)])
def test_the_bounds_that_the_tables_compute_are_those_that_were_used(source, staleness, updates):
    cell = Cell("chain", source, staleness, 1.6e-2, 3.0, LAGGED, updates)
    trainer = Trainer(cell, [1000, 1001])
    trainer.train()
    own, low, high = (
        torch.stack([update[key] for update in trainer.updates], 1) for key in ("search_steps", "low", "high")
    )
    used = tables.used_steps(own.long().numpy(), cell.updates_on_a_batch)
    path = path_of(config_of(EXACT))
    assert np.array_equal(path[0].numpy()[used], low) and np.array_equal(path[1].numpy()[used], high)
    assert (used != own.numpy()).any()
