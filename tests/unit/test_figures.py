# SPDX-License-Identifier: Apache-2.0
"""The README's picture shows an update whose target is met by moving the upper bound alone."""

from matplotlib import image

from bapo import BAPOConfig
from scripts.figures.first_screen import draw, searched_update


def test_the_upper_bound_was_opened_until_the_target_was_met():
    config, update = BAPOConfig(), searched_update()
    assert update["before"] < config.positive_contribution_target <= update["after"]
    assert update["low"] == config.ratio_lower_start
    assert config.ratio_upper_start < update["high"] < config.ratio_upper_max


def test_the_picture_is_drawn(tmp_path):
    draw(tmp_path / "bapo.png", {"before": 0.28, "after": 0.4, "low": 0.6, "high": 2.3})
    height, width, _ = image.imread(tmp_path / "bapo.png").shape
    assert width < 1.5 * height  # readable on a narrow screen
