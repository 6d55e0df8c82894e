# SPDX-License-Identifier: Apache-2.0
"""The README's picture: its updates are a stored run's."""

import json

import pytest
from matplotlib import image

from scripts.figures.first_screen import draw, recorded_run
from scripts.study.example import PICTURED, RESULTS, example_settings


def test_its_updates_are_the_first_of_the_first_seed_and_meet_the_target_in_every_way():
    config, settings = example_settings()
    rows, per_batch = recorded_run(), settings.mini_batches * settings.epochs
    assert len(rows) == PICTURED and PICTURED % per_batch == 0
    seed = next(row for line in RESULTS.read_text().splitlines() if (row := json.loads(line))["seed"] == 1)
    for key in ("clip_low", "clip_high"):  # means over each rollout batch
        means = [sum(row[key] for row in rows[i : i + per_batch]) / per_batch for i in range(0, PICTURED, per_batch)]
        assert means == pytest.approx(seed[key][: len(means)], abs=2e-4)
    assert {(row["search_steps"] > 0, bool(row["saturated"])) for row in rows} == {(0, 0), (1, 0), (1, 1)}
    for row in rows:
        assert (row["positive_contribution"] < config.positive_contribution_target - 1e-4) <= row["saturated"]


def test_the_picture_is_drawn(tmp_path):
    draw(tmp_path / "bapo.png")
    height, width, _ = image.imread(tmp_path / "bapo.png").shape
    assert width < height  # one half above the other: a narrow screen shows both
