# SPDX-License-Identifier: Apache-2.0
"""The third study runs what its plan says, resumes, and finds what is planted in a table made by hand."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.study import analysis, plan, run
from scripts.study.measures import POINTS
from scripts.study.plan import CONTROLS, EPOCHS, METHODS, PLACES, RATES, SEEDS, Comparison
from scripts.study.tasks import warmed_up
from scripts.study.train import MINI_BATCHES, Cell

TINY = [Cell("chain", "delay", 8, 8e-3, None, method, 16) for method in ("grpo", "bapo@0.4", "other_seed:bapo@0.4")]
TINY_SEEDS = {"chain": [1000, 1001]}


def row(cell, seed, **measured):
    """A row of the table in which nothing failed."""
    values = dict(final_reward=0.9, start_reward=0.1, unsolved=0.0, finite=True, mean_reward=0.7, entropy=1.0)
    values |= dict(updates_to_target=100.0, no_gradient_positive=0.1, no_gradient_negative=0.2)
    return {"cell": cell.name, **vars(cell), "seed": seed, **values, **measured}


def table_of(rows):
    return analysis.with_failures(pd.DataFrame(rows).astype({"dual_clip": float}).fillna({"dual_clip": 0}))


def controls(seeds=2, **measured):
    return [row(cell, seed, **measured) for cell in plan.controls() for seed in range(seeds)]


def planted(effects, seeds=40, noise=0.1):
    """Epochs on the retry task: updates by method, best at the middle rate, with noise that all methods share."""
    rng = np.random.default_rng(1)
    shared = {key: rng.normal(0, 0.3) for key in itertools.product(range(seeds), EPOCHS.stalenesses, RATES["chain"])}
    rows = controls()
    for cell, seed in itertools.product(EPOCHS.cells(list(effects)), range(seeds)):
        log = np.log(100) + effects[cell.method] + 0.3 * (cell.learning_rate != 8e-3)
        log += shared[seed, cell.staleness, cell.learning_rate] + noise * rng.normal()
        rows.append(row(cell, seed, updates_to_target=float(np.exp(log))))
    return table_of(rows)


def test_the_failure_rule_row_by_row():
    cell = Cell("chain", "epochs", 4, 4e-3, 3.0, "grpo", 256)
    rows = [row(cell, 1, final_reward=0.46), row(cell, 2, final_reward=0.44)]  # the control's mean is 0.9
    rows += [row(cell, 3, final_reward=0.5, start_reward=0.51), row(cell, 4, unsolved=0.2)]
    rows += [row(cell, 5, unsolved=0.21), row(cell, 6, finite=False)]
    hard = dataclasses.replace(cell, task="hard_chain")
    rows += [row(hard, 1, unsolved=0.5)]  # where most prompts start so
    fresh = [row(control, 1) for control in plan.controls()]
    fresh += [row(dataclasses.replace(c, learning_rate=4e-3), 2) for c in plan.controls() if c.task == "hard_chain"][:1]
    failed = table_of(rows + fresh)["failed"].tolist()
    assert failed[: len(rows)] == [False, True, True, False, True, True, False]


def test_a_run_without_control_is_named():
    cell = Cell("chain", "epochs", 4, 4e-3, 3.0, "grpo", 256)
    with pytest.raises(ValueError, match="no control: chain-epochs4-lr0.004-dual3-grpo"):
        table_of([row(cell, 1)])


def test_a_rate_is_left_out_where_one_control_failed():
    bad = next(cell for cell in plan.controls() if cell.task == "chain" and cell.learning_rate == 1.6e-2)
    rows = [*controls(), row(bad, 9, final_reward=0.1)]
    rows += [row(cell, seed) for cell in EPOCHS.cells(["grpo"]) for seed in (1, 2)]
    frame = table_of(rows)
    assert set(analysis.at_place(frame, EPOCHS)["learning_rate"]) == {4e-3, 8e-3}
    assert frame["stable"].sum() == len(frame) - 3 - 4  # three controls and two runs at two stalenesses


def test_the_best_rate_is_chosen_on_the_other_half():
    cells = EPOCHS.cells(["grpo"])
    # The seeds 0, 2, 4, 6 are fast at 0.004, the others at 0.016: each half is judged at the other's rate.
    rows = controls()
    for cell, seed in itertools.product(cells, range(8)):
        fast = 4e-3 if seed % 2 == 0 else 1.6e-2
        rows.append(row(cell, seed, updates_to_target=50.0 if cell.learning_rate == fast else 80.0 + seed))
    part = analysis.at_place(table_of(rows), EPOCHS, "grpo")
    assert analysis.best_rates(part) == {seed: 1.6e-2 if seed % 2 == 0 else 4e-3 for seed in range(8)}
    assert np.exp(analysis.at_best_rate(part)).tolist() == pytest.approx([80.0 + seed for seed in range(8)])


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


def test_failing_shares_are_compared_seed_by_seed():
    rows = controls()
    for cell, seed in itertools.product(EPOCHS.cells(["grpo", "bapo@0.4"]), range(20)):
        rows.append(row(cell, seed, unsolved=float(cell.method == "grpo" and cell.staleness == 16 and seed < 15)))
    tests = analysis.primary_tests(table_of(rows), [Comparison(EPOCHS, "bapo@0.4", "grpo", "failing")])
    assert (tests["first"][0], tests["second"][0]) == (0, 15 / 40)
    assert tests["difference"][0] == pytest.approx(-15 / 40) and tests["p"][0] < 1e-4


def test_a_run_that_fails_or_never_gets_there_took_all_updates():
    rows = controls()
    for cell, seed in itertools.product(EPOCHS.cells(["grpo", "bapo@0.4"]), range(4)):
        updates = {"grpo": 100.0, "bapo@0.4": 80.0}[cell.method]
        ends = {2: {"unsolved": 1.0}, 3: {"updates_to_target": np.nan}} if cell.method == "bapo@0.4" else {}
        rows.append(row(cell, seed, **{"updates_to_target": updates, **ends.get(seed, {})}))
    test = analysis.primary_tests(table_of(rows), [Comparison(EPOCHS, "bapo@0.4", "grpo")]).iloc[0]
    assert test["difference"] == pytest.approx((2 * np.log(0.8) + 2 * np.log(2.56)) / 4)  # of 256 updates
    assert test["both"] == 0.5 and np.exp(test["conditional"]) == pytest.approx(0.8)  # of the others alone


def test_holm_by_hand():
    assert analysis.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert analysis.holm([0.5, 0.9]) == [1, 1]


def test_tests_whose_cells_are_missing_count_in_the_correction():
    frame = planted({"bapo@0.4": -0.2, "grpo": 0.0}, seeds=10)
    tests = analysis.primary_tests(frame)
    assert len(tests) == len(plan.comparisons()) and tests["p"].notna().sum() == 2  # the speed and the failing share
    first = tests[tests["p"].notna()].iloc[0]
    assert first["holm"] == pytest.approx(min(1, first["p"] * len(tests)))
    assert len(analysis.primary_table(tests)) == len(tests) + 3


def test_the_tables_say_what_the_rows_say(tmp_path, capsys):
    rows = controls()
    for cell, seed in itertools.product(EPOCHS.cells(["grpo", "bapo@0.4"]), range(4)):
        rows.append(row(cell, seed, updates_to_target={"grpo": 100.0, "bapo@0.4": 80.0}[cell.method]))
    pd.DataFrame(rows).to_parquet(tmp_path / "table.parquet")
    analysis.print_tables(tmp_path / "table.parquet")
    said = capsys.readouterr().out
    assert "| retry task | 0.004 | 0 of 2 | 0.900 (0.900) |" in said
    against = "| retry task, epochs | BAPO 0.40 : GRPO [0.8, 1.2] | speed, difference | 0.800 | [0.800, 0.800] | 0 |"
    assert against in said
    assert "| method | retry task, epochs |\n" in said  # no column of a place that was not run
    assert "| BAPO 0.40 | 0.80 [0.80, 0.80] |\n" in said and "| GRPO [0.8, 1.2] | 0 of 24 |\n" in said
    assert "| BAPO 0.40 | 0.80 [0.80, 0.80] | 0.004 | 0.900 | 1.000 | 0.10 | 0.20 | 0.000 | 0.700 | 0.900 |" in said


@pytest.fixture
def process_settings():
    """What a cell sets for its process is taken back."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("process_settings")
def test_a_study_that_was_stopped_goes_on_and_repeats_to_the_bit(tmp_path, capsys):
    table, folder = tmp_path / "table.parquet", tmp_path / "cells"
    warmed_up("chain", tuple(TINY_SEEDS["chain"]))  # once, not once in every process
    run.run_missing(TINY[:1], 1, table, folder, TINY_SEEDS)
    run.gather(TINY, table, folder)
    run.run_missing(TINY[::-1], 1, table, folder, TINY_SEEDS)  # the one with a donor waits for it
    run.run_missing(TINY, 1, table, folder, TINY_SEEDS)
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


def test_the_plan_can_be_run():
    cells = plan.cells()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(cells)
    for cell in cells:
        reuse = MINI_BATCHES * cell.staleness if cell.source == "epochs" else 1
        assert cell.updates % reuse == 0 and cell.updates % POINTS == 0 and len(SEEDS[cell.task]) % 2 == 0, cell
        assert cell.donor is None or names.index(cell.donor.name) < names.index(cell.name)
    placed = {cell for place in PLACES for cell in place.cells(METHODS[place])}
    assert set(cells) == placed | set(plan.controls())
    assert {(cell.task, cell.learning_rate) for cell in placed} <= {(c.task, c.learning_rate) for c in plan.controls()}
    for comparison in plan.comparisons():
        assert {comparison.method, comparison.other} <= set(METHODS[comparison.place])


def test_the_larger_model_is_a_row_of_the_same_table(monkeypatch):
    from scripts.study import loop

    monkeypatch.setattr(loop, "WINDOW", 8)
    monkeypatch.setattr(loop, "FINAL_SAMPLES", 2)
    rows = {}
    for method in ("bapo@0.47", "cispo"):
        cell = Cell("larger_model", "epochs", 2, 1e-3, 3.0, method, 16)
        rows[method] = loop.rows_of(cell, [1000])[0]
    assert rows["bapo@0.47"]["weights"] != rows["cispo"]["weights"]
    for entry in rows.values():
        assert len(entry["reward_series"]) == 3 and entry["reward_series"][-1] == entry["final_reward"] > 0.1
    assert len(rows["bapo@0.47"]["search_steps"]) == 16 and rows["cispo"]["no_gradient_negative"] == 0
    assert set(rows["cispo"]) == set(rows["bapo@0.47"])
