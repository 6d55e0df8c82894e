# SPDX-License-Identifier: Apache-2.0
"""The third study resumes where it was stopped, repeats a cell bit for bit, and finds planted effects in its table."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.study import analysis, plan, run
from scripts.study.plan import CONTROLS, EPOCHS, RATES, Comparison
from scripts.study.tasks import warmed_up
from scripts.study.train import Cell

TINY = [Cell("chain", "delay", 8, 8e-3, None, method, 16) for method in ("grpo", "bapo@0.4", "other_seed:bapo@0.4")]
TINY_SEEDS = [1000, 1001]


def row(cell, seed, **measured):
    """Make a row of the table without a failure."""
    values = dict(final_reward=0.9, start_reward=0.1, unsolved=0.0, finite=True, mean_reward=0.7, entropy=1.0)
    values |= dict(updates_to_target=100.0, no_gradient_positive=0.1, no_gradient_negative=0.2)
    return {"cell": cell.name, **vars(cell), "seed": seed, **values, **measured}


def table_of(rows):
    return analysis.with_failures(pd.DataFrame(rows).astype({"dual_clip": float}).fillna({"dual_clip": 0}))


def controls(seeds=2, **measured):
    return [row(cell, seed, **measured) for cell in plan.controls() for seed in range(seeds)]


def planted(effects, seeds=40, noise=0.1):
    """Make runs with epochs on the retry task: updates by method, best at the middle rate, with shared noise."""
    rng = np.random.default_rng(1)
    shared = {key: rng.normal(0, 0.3) for key in itertools.product(range(seeds), EPOCHS.stalenesses, RATES["chain"])}
    rows = controls()
    for cell, seed in itertools.product(EPOCHS.cells(list(effects)), range(seeds)):
        log = np.log(100) + effects[cell.method] + 0.3 * (cell.learning_rate != 8e-3)
        log += shared[seed, cell.staleness, cell.learning_rate] + noise * rng.normal()
        rows.append(row(cell, seed, updates_to_target=float(np.exp(log))))
    return table_of(rows)


def test_planted_effects_are_found_and_null_ones_are_not():
    effects = {"bapo@0.4": -0.2, "grpo": 0.0, "other_seed:bapo@0.4": -0.2, "topr": -0.19, "widest": -0.28}
    frame = planted(effects)
    compared = [Comparison(EPOCHS, "bapo@0.4", name) for name in ("grpo", "other_seed:bapo@0.4")]
    compared += [Comparison(EPOCHS, "bapo@0.4", name, claim="equivalence") for name in (*CONTROLS[:1], "widest")]
    tests = analysis.primary_tests(frame, compared)
    assert tests["difference"].tolist() == pytest.approx([-0.2, 0.0, 0.0, 0.08], abs=0.04)
    assert (tests["holm"] < 0.05).tolist() == [True, False, True, False]
    for test, truth in zip(tests.itertuples(), (-0.2, 0, 0, 0.08), strict=True):
        assert test.low < truth < test.high and test.low < test.difference < test.high
    assert tests["both"].tolist() == [1.0] * 4
    assert tests["conditional"].tolist() == pytest.approx(tests["difference"].tolist())


@pytest.fixture
def process_settings():
    """Restore the settings that a cell makes in its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("process_settings")
def test_a_study_that_was_stopped_goes_on_and_repeats_to_the_bit(tmp_path, capsys):
    table, folder = tmp_path / "table.parquet", tmp_path / "cells"
    warmed_up("chain", tuple(TINY_SEEDS))  # once here, not once in every process
    run.run_missing(TINY[:1], 1, table, folder, lambda cell: TINY_SEEDS)
    run.gather(TINY, table, folder)
    run.run_missing(TINY[::-1], 1, table, folder, lambda cell: TINY_SEEDS)  # the cell with a donor waits for it
    run.run_missing(TINY, 1, table, folder, lambda cell: TINY_SEEDS)
    said = capsys.readouterr().out
    assert "1 of 3 cells are there, 2 to run" in said and "3 of 3 cells are there, 0 to run" in said
    assert said.index("1/2") < said.index(TINY[1].name) < said.index("2/2") < said.index(TINY[2].name)
    assert run.finished(table, folder) == {cell.name for cell in TINY}
    assert run.run_again(TINY[2:], table, folder)  # its donor is in a file
    run.gather(TINY, table, folder)
    frame = pd.read_parquet(table)
    assert frame["cell"].tolist() == [cell.name for cell in TINY for _ in range(2)]
    assert frame["seed"].tolist() == [1000, 1001] * 3 and not list(folder.iterdir())
    assert set(frame["code"]) == {run.code_hash()} and len(frame["code"][0].split()) == 2
    assert run.run_again(TINY, table, folder)  # its donor is in the table
    frame["weights"] = "others"
    frame.to_parquet(table)
    assert not run.run_again(TINY[:1], table, folder)
