# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: its input, and what it shows."""

import json

import pytest
from matplotlib import image
from support.metrics import METRICS

from recipe.bapo.run.dynamics import PANELS, main, picture


def rewards(folder, *values):
    """Make a run's folder with the mean reward of each step."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step, value in enumerate(values, 1):
            data = {"training/global_step": step, "critic/rewards/mean": value}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return folder


def test_a_run_is_drawn_into_its_folder(tmp_path):
    run = rewards(tmp_path / "run", 0.1, 0.2)
    main(run)
    assert image.imread(run / "dynamics.png").shape[0] > 500


def test_the_validation_reward_is_beside_that_of_training(tmp_path):
    run = rewards(tmp_path / "run", 0.1, 0.2)
    with open(run / "metrics.jsonl", "a") as file:
        for step, value in ((0, 0.3), (2, 0.5)):  # before training, and with the second step
            file.write(json.dumps({"step": step, "data": {"val-core/sums/reward/mean@1": value}}) + "\n")
    training, validation = picture(run).axes[0].lines
    assert list(training.get_ydata()) == [0.1, 0.2]
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([0, 2], [0.3, 0.5])


@pytest.mark.parametrize(
    "text, message",
    [
        ("nonsense\n", "metrics.jsonl has a line that is not in the format of verl's file logger"),
        ("", "run has no metrics: give the folder of a run"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_named_in_a_line(tmp_path, text, message):
    (rewards(tmp_path / "run", 0.1) / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=f"^Error: .*{message}.*$"):
        main(tmp_path / "run")


def test_every_panel_shows_a_metric_that_a_run_logs():
    shown = {metric for curves in PANELS.values() for metric in curves if metric.startswith("actor/bapo/")}
    assert shown and shown <= METRICS
