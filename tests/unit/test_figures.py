# SPDX-License-Identifier: Apache-2.0
"""The README's picture: its curves by hand, and that its run is one of the study's."""

import pytest
from matplotlib import image

from scripts.figures.first_screen import TARGET, draw, recorded_run, surrogate


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [(0.5, 1, 0.5), (1.1, 1, 1.1), (2.0, 1, 1.2), (0.5, -1, -0.8), (0.9, -1, -0.9), (2.0, -1, -2.0)],
)
def test_the_surrogate_by_hand(ratio, advantage, expected):
    assert surrogate(ratio, advantage, 0.8, 1.2) == expected


def test_its_run_is_one_of_the_studys():
    series = recorded_run()
    assert TARGET == 0.38 and len(series["clip_high"]) == 40
    assert min(series["clip_low"]) >= 0.6 and max(series["clip_high"]) <= 3.0


def test_the_picture_is_drawn(tmp_path):
    draw(tmp_path / "bapo.png")
    height, width, _ = image.imread(tmp_path / "bapo.png").shape
    assert (width, height) == (1430, 616)
