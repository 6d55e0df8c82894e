# SPDX-License-Identifier: Apache-2.0
"""The picture of the search is drawn, and fits a narrow screen."""

from matplotlib import image

from scripts.figures.search import UPDATE, draw


def test_the_picture_is_drawn(tmp_path):
    draw(tmp_path / "bapo.png", UPDATE)
    height, width, _ = image.imread(tmp_path / "bapo.png").shape
    assert width < 1.5 * height  # readable on a narrow screen
