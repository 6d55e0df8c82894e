# SPDX-License-Identifier: Apache-2.0
"""The tables, intervals and the picture of the language model follow from its stored runs."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scripts.study.figure import draw
from scripts.study.tables import METHOD_NAMES, comparison, print_tables

SEEDS = (12, 13, 14)  # the whole seeds of the comparison
DOCS = Path(__file__).parents[2] / "docs"
RAW = DOCS / "results" / "language_model"
PAGE = DOCS / "results" / "language_model.md"


def rows_of(method, seed, learning_rate="1e-5"):
    """Return the rows of a run of the study with four epochs."""
    return pd.read_parquet(RAW / f"{method}-epochs-{learning_rate}-seed{seed}.parquet")


def test_the_tables_are_those_of_the_command(capsys):
    print_tables()
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == printed


def test_the_declared_interval():
    rewards = {name: [rows_of(name, seed)["held_out_reward"].mean() for seed in SEEDS] for name in ("bapo", "grpo")}
    ahead = np.subtract(rewards["bapo"], rewards["grpo"])
    ends = stats.t.interval(0.95, len(ahead) - 1, ahead.mean(), stats.sem(ahead))
    row = comparison().loc["bapo"]
    assert ends == pytest.approx((row["difference"] - row["half_width"], row["difference"] + row["half_width"]))
    text = PAGE.read_text()
    assert all(f"{value:+.3f}" in text for value in (ahead.mean(), *ends))


def test_bapos_bounds_in_the_comparison():
    counts = pd.concat(rows_of("bapo", seed) for seed in SEEDS)[["low", "high"]].value_counts()
    assert (counts[0.6, 1.2], counts[0.9, 3.0], counts.sum()) == (67, 123, 192)  # the page's numbers


def test_the_real_stack_learned():
    def values(run, name):
        lines = (json.loads(line)["data"] for line in (RAW / f"stack_{run}.jsonl").read_text().splitlines())
        return [line[name] for line in lines if name in line]

    for run, first, last in (("bapo", 0.36, 0.97), ("bapo_6_steps", 0.38, 0.97)):  # the page's numbers
        held_out = values(run, "val-core/bapo/sort/acc/mean@1")
        assert (round(held_out[0], 2), round(held_out[-1], 2)) == (first, last)
    rewards = [round(reward, 2) for reward in values("bapo_h200", "critic/rewards/mean")]
    assert rewards == [0.38, 0.51, 0.66, 0.72, 0.87]  # those of docs/results/gpu.md
    met, saturated = values("bapo", "actor/bapo/met_at_once"), values("bapo", "actor/bapo/saturated")
    assert (8 * sum(met), 8 * sum(saturated)) == (46, 34)  # of 80 updates


def test_the_picture_shows_each_seed_and_the_mean():
    rewards, entropies = draw().axes
    found = comparison()
    means = {line.get_label(): line.get_ydata() for line in rewards.lines if not line.get_label().startswith("_")}
    assert set(means) == set(METHOD_NAMES.values())
    for method, name in METHOD_NAMES.items():
        assert means[name][1:].mean() == pytest.approx(found.loc[method, "reward"])  # the first is before training
    for axis in (rewards, entropies):
        assert len(axis.lines) == len(METHOD_NAMES) * (found["seeds"].iloc[0] + 1)
    last = {line.get_label(): line.get_ydata()[-1] for line in entropies.lines}
    assert all(last[name] == pytest.approx(found.loc[method, "entropy"]) for method, name in METHOD_NAMES.items())


def test_only_our_own_runs_are_drawn_with_what_they_show(tmp_path):
    with pytest.raises(ValueError, match="is complete with all methods yet"):
        draw(tmp_path)
    mine = tmp_path / "Qwen2.5-mine"
    mine.symlink_to(RAW)
    assert "learn faster" in draw().get_suptitle() and draw(mine).get_suptitle().startswith("Qwen2.5-mine: ")
