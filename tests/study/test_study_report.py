# SPDX-License-Identifier: Apache-2.0
"""The study resumes, judges and reports as planned: on rows made by hand and on tables with planted effects."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.study import analysis, plan, report, run
from scripts.study.agreement import agreement
from scripts.study.measures import PATH_PARTS, POINTS
from scripts.study.methods import config_of
from scripts.study.train import Cell

TINY = [Cell("A", "chain", "block", 8, "adamw", 8e-3, 1.0, None, method, 16) for method in ("grpo", "bapo@0.4")]


def row(cell, seed, **measured):
    """A row of the table in which nothing failed."""
    values = dict(final_reward=0.9, unsolved=0.0, truncated=0.0, finite=True, mean_reward=0.7, weights="same")
    columns = (name for name, _ in analysis.COLUMNS.values() if name not in ("failed", *values))
    values |= {name: 0.5 for name in columns} | measured
    for name in ("reward", "entropy"):
        values[f"{name}_series"] = np.linspace(0.1, 0.9, POINTS + 1)
    for name in ("grad_norm", "rho", "c_low", "c_high"):
        values[f"{name}_series"] = np.linspace(1, 2, POINTS)
    path = [1] * (PATH_PARTS + 2) if cell.method.startswith("bapo") else []
    return {"cell": cell.name, **vars(cell), "seed": seed, **values, "search_path": path}


def table_of(rows):
    frame = pd.DataFrame(rows)
    return analysis.with_failures(
        frame.astype({"norm_clip": float, "dual_clip": float}).fillna({"norm_clip": 0, "dual_clip": 0})
    )


def planted(effect, seeds=20, noise=0.05):
    """Map C and its controls: BAPO 0.4 fails less than GRPO by ``effect``, and its reward is higher by as much."""
    rng = np.random.default_rng(1)
    rows = [row(cell, seed) for cell in plan.controls() for seed in range(seeds)]
    for cell, seed in itertools.product(plan.map_c(), range(seeds)):
        gain = effect if cell.method == "bapo@0.4" else 0.0
        hard = cell.learning_rate > 0.03
        fails = hard and rng.random() < 0.5 - gain
        rows.append(row(cell, seed, unsolved=1.0 if fails else 0.0, mean_reward=0.5 + gain + noise * rng.normal()))
    return table_of(rows)


def test_the_failure_rule_row_by_row():
    control = Cell("control", "chain", "block", 1, "sgd", 1.0, None, None, "grpo", 256)
    cell = Cell("A", "chain", "block", 32, "sgd", 1.0, None, 3.0, "grpo", 256)
    rows = [row(control, 1, final_reward=0.7), row(control, 2, final_reward=0.9)]  # mean 0.8, so the bar is 0.4
    rows += [row(cell, 1, final_reward=0.41), row(cell, 2, final_reward=0.39)]
    rows += [row(cell, 3, unsolved=0.2), row(cell, 4, unsolved=0.21), row(cell, 5, truncated=0.9)]
    rows += [row(cell, 6, truncated=0.91), row(cell, 7, finite=False)]
    assert table_of(rows)["failed"].tolist() == [False, False, False, True, False, True, False, True, True]


def test_a_run_without_control_is_named():
    cell = Cell("A", "chain", "block", 32, "sgd", 1.0, None, 3.0, "grpo", 256)
    with pytest.raises(ValueError, match="no control: A-chain-sgd-nonorm-dual3-block32-lr1-grpo"):
        table_of([row(cell, 1)])


def test_the_permutation_test_by_hand():
    assert analysis.sign_flip_test(np.array([1.0, 1.0, 1.0])) == 2 / 8
    assert analysis.sign_flip_test(np.array([1.0, -1.0])) == 1  # sums 0, 2, -2, 0: all as far from 0 as 0
    assert analysis.sign_flip_test(np.array([3.0, 1.0])) == 2 / 4
    assert analysis.sign_flip_test(np.zeros(3)) == 1


def test_it_is_scipys():
    from scipy.stats import permutation_test

    differences = np.random.default_rng(1).normal(0.3, 1, 10)
    found = permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert analysis.sign_flip_test(differences) == pytest.approx(found.pvalue)


def test_a_planted_difference_is_found_and_a_null_one_is_not():
    for effect, finds in ((0.4, True), (0.0, False)):
        tests = {(entry["map"], entry["other"]): entry for entry in analysis.primary_tests(planted(effect))}
        assert set(tests) == {("C, delay", "grpo"), ("C, delay", "widest")}
        entry = tests["C, delay", "grpo"]
        assert (entry["failing"]["p"] < 0.001) == finds and (entry["reward"]["p"] < 0.001) == finds
        assert entry["failing"]["difference"] == pytest.approx(-effect / 3, abs=0.08)  # a third of the cells is hard
        assert entry["reward"]["difference"] == pytest.approx(effect, abs=0.02)
        assert entry["stable"] == (6, 9)


def test_differences_are_paired_by_seed():
    frame = planted(0.0)
    frame["mean_reward"] = frame["seed"].to_numpy() + np.where(frame["method"] == "bapo@0.4", 0.1, 0.0)
    found = analysis.compare(analysis.of_map(frame, "C", "chain"), "bapo@0.4", "grpo", "mean_reward")
    assert found["difference"] == pytest.approx(0.1) and found["p"] == pytest.approx(2 / 2**20)
    with pytest.raises(ValueError, match="other seeds"):
        analysis.compare(frame[(frame["seed"] > 0) | (frame["method"] == "grpo")], "bapo@0.4", "grpo", "mean_reward")


def test_the_report_is_written_and_says_what_the_table_says(tmp_path):
    chosen = ("grpo", "widest", "bapo@0.4", "bapo_gradient@0.4", "figure7_low", "figure7_high", "topr")
    cells = [cell for cell in plan.cells() if cell.method in chosen and cell.map in ("control", "B", "partial")]
    rows = [row(cell, seed) for cell in cells for seed in range(3)]
    for broken in rows[-6:]:  # of 84 runs of their panel
        broken["unsolved"] = 1.0
    rows[0]["unsolved"] = 1.0  # too few for a map of failures
    pd.DataFrame(rows).to_parquet(tmp_path / "table.parquet")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    report.report(tmp_path / "table.parquet", page, tmp_path)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n")
    assert (
        "| B, epochs | GRPO [0.8, 1.2] | 0.000 : 0.000 | +0.0000 | 1 | 0.7000 : 0.7000 | +0.0000 | 1 | 18 of 18 |"
        in text
    )
    assert "end with bit-identical weights in 3 of 3 seeds" in text
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    named = {line.split("results/")[1].split(")")[0] for line in text.splitlines() if line.startswith("![")}
    assert sorted(named | {"summary.png"}) == pictures  # the summary stands in the part that is written by hand
    assert {f"figure{number}.png" for number in (2, 7, 8, 9, 11, 12)} <= set(pictures)
    assert (
        sum(name.startswith("failing") for name in pictures) == 1
        and sum(name.startswith("speed") for name in pictures) == 3
    )
    again = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    report.report(tmp_path / "table.parquet", page, tmp_path)
    assert page.read_text() == text and again == {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}


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
    run.run_missing(TINY[:1], [1000, 1001], 1, table, folder)
    run.run_missing(TINY, [1000, 1001], 1, table, folder)
    run.run_missing(TINY, [1000, 1001], 1, table, folder)
    folder.mkdir(exist_ok=True)
    assert "1 of 2 cells are there, 1 to run" in (said := capsys.readouterr().out) and "2 of 2 cells are there" in said
    assert run.finished(table, folder) == {cell.name for cell in TINY}
    frame = pd.read_parquet(table)
    assert frame["cell"].tolist() == [cell.name for cell in TINY for _ in range(2)]
    assert frame["seed"].tolist() == [1000, 1001] * 2 and not list(folder.iterdir())
    assert run.run_again(TINY, frame)
    frame["weights"] = "others"
    assert not run.run_again(TINY[:1], frame)


def test_what_was_not_finished_is_run_again(tmp_path):
    (tmp_path / f"{TINY[0].name}.unfinished").write_text("half a ro")
    assert run.finished(tmp_path / "none.parquet", tmp_path) == set()


def test_the_plan():
    cells = plan.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert len(plan.SEEDS) == 20 and max(plan.SEEDS) < 1000
    for cell in cells:
        config_of(cell.method)
        reuse = 4 * cell.staleness if cell.source == "epochs" else cell.staleness if cell.source == "block" else 1
        assert cell.updates % reuse == 0 and cell.updates % POINTS == 0, cell
        assert cell.method in analysis.LABELS
    for kind, places in (("A", 60 + 8), ("B", 18), ("C", 9), ("partial", 4)):
        of_map = [cell for cell in cells if cell.map == kind]
        assert len(of_map) == places * len(plan.METHODS)
        assert {cell.method for cell in of_map} == set(plan.METHODS)
    assert {(cell.optimizer, cell.norm_clip, cell.dual_clip) for cell in plan.map_a()} == {
        (optimizer, *clips) for optimizer in ("sgd", "adamw") for clips in plan.CLIPS
    }


def test_every_cell_has_its_control():
    frame = pd.DataFrame([row(cell, seed) for cell in plan.cells() for seed in (1, 2)])
    assert not table_of(frame)["failed"].any()


def test_methods_that_lack_cells_are_left_out_and_it_is_said():
    cells = [cell for cell in plan.cells() if cell.map in ("control", "C") and cell.method in ("grpo", "widest")]
    frame = table_of([row(cell, 1) for cell in cells])
    whole, said = report.without_unfinished(frame)
    assert len(whole) == len(frame) and said.startswith(f"{len(cells)} of {len(plan.cells()):,} cells are there")
    without_one = frame[frame["cell"] != next(cell.name for cell in cells if cell.map == "C")]
    whole, _ = report.without_unfinished(without_one)
    assert set(whole[whole["map"] == "C"]["method"]) == {"widest"}
    frame = table_of([row(cell, 1) for cell in plan.cells()])
    whole, said = report.without_unfinished(frame)
    assert len(whole) == len(frame) and said == ""


def test_a_table_of_means_is_over_the_same_cells():
    chosen = ("grpo", "bapo@0.4", "widest", "topr")
    cells = [cell for cell in plan.cells() if cell.map in ("control", "C") and cell.method in chosen]
    rows = [row(cell, seed) for cell in cells for seed in (1, 2)]
    fewer = next(cell.name for cell in cells if cell.map == "C" and cell.method == "topr")
    for left_out, there in (((), True), ((fewer,), False)):
        text = report.generated(table_of([entry for entry in rows if entry["cell"] not in left_out]), [])
        means = text.split(": means")[1].split("### Pictures")[0]
        assert "| GRPO [0.8, 1.2] |" in means and ("TOPR" in means) == there


def anchor(method, seed, reward, entropy=0.5):
    """A run of the anchors of two windows."""
    series = {"reward": [reward - 0.1, reward + 0.1], "entropy": [1.0, entropy], "grad_norm": [0.0, 2.0, 1.0, 6.0]}
    series |= {"positive_contribution_start": [0.2, 0.3], "positive_contribution": [0.3, None]}
    series |= {"clipfrac_positive": [0.0, 0.1], "clipfrac_negative": [0.2, 0.2], "saturated": [1.0, 0.5]}
    return {"method": method, "seed": seed, "final_reward": reward, "series": series}


def test_the_anchors_are_held_against_map_b(tmp_path):
    chosen, rewards = plan.RATES["B", "adamw"][1], {"grpo": 0.5, "widest": 0.6, "bapo@0.4": 0.7, "topr": 0.9}
    cells = [cell for cell in plan.cells() if cell.map in ("control", "B") and cell.method in rewards]
    frame = table_of(
        row(cell, 1, mean_reward=rewards[cell.method] * (1 if cell.learning_rate == chosen else -1)) for cell in cells
    )
    runs = [anchor("grpo", 2, 0.3), anchor("grpo", 1, 0.2), anchor("widest", 1, 0.5), anchor("widest", 2, 0.5)]
    runs += [
        anchor("bapo@0.4", 1, 0.25),
        anchor("bapo@0.4", 2, 0.45),
        anchor("control", 1, 0.8),
        anchor("control", 2, 0.8),
    ]
    runs += [anchor("bapo@0.4", 3, 0.9)]  # a seed that the others do not have yet
    path = tmp_path / "loop.jsonl"
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    text = "\n".join(agreement(frame, path, tmp_path / "none.jsonl"))
    measured = "0.50 | 3.0 | 0.250 | 0.300 | 0.05 | 0.20"  # norms 2, 1 and 6
    assert f"| GRPO [0.8, 1.2] | 0.250 | 0.250 | {measured} | - |" in text
    assert f"| BAPO 0.4 | 0.350 | 0.350 | {measured} | 0.75 |" in text and "over the seeds 1, 2." in text
    assert "BAPO 0.4 minus GRPO [0.8, 1.2], by seed: +0.050, +0.150." in text
    assert "BAPO 0.4 minus [0.9, 3.0], by seed: -0.250, -0.050." in text
    assert "over 3 methods 0.50." in text and "real stack" not in text  # ranks 1, 3, 2 against 1, 2, 3
    assert "### Anchors: the real stack" in "\n".join(agreement(frame, tmp_path / "none.jsonl", path))
