# SPDX-License-Identifier: Apache-2.0
"""The pictures of runs: their input, and what they show."""

import json

import pytest
from matplotlib import image

from recipe.bapo.run.dynamics import PANELS, main, picture


def rewards(folder, *values):
    """Make a run's folder with the mean reward of each step."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step, value in enumerate(values, 1):
            data = {"training/global_step": step, "critic/rewards/mean": value}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return folder


def test_runs_are_lines_over_each_other_also_from_folders_of_one_name(tmp_path, monkeypatch):
    runs = [rewards(tmp_path / "a" / "run", 0.1, 0.2), rewards(tmp_path / "b" / "run", 0.4, 0.8, 0.9)]
    figure = picture(runs)
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]
    assert lines == [([1, 2], [0.1, 0.2]), ([], []), ([1, 2, 3], [0.4, 0.8, 0.9]), ([], [])]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a/run", "b/run"]  # without the folder of both
    monkeypatch.setattr("sys.argv", ["plot", *map(str, runs)])
    main()
    assert image.imread(runs[0] / "dynamics.png").shape[0] > 500
    (tmp_path / "pictures").mkdir()
    monkeypatch.setattr("sys.argv", ["plot", str(runs[0]), "--out", str(tmp_path / "pictures")])
    main()
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["dynamics.png"]


def test_the_validation_reward_is_beside_that_of_training(tmp_path):
    run = rewards(tmp_path / "run", 0.1, 0.2)
    with open(run / "metrics.jsonl", "a") as file:
        for step, value in ((0, 0.3), (2, 0.5)):  # before training, and with the second step
            file.write(json.dumps({"step": step, "data": {"val-core/sums/reward/mean@1": value}}) + "\n")
    training, validation = picture([run]).axes[0].lines
    assert list(training.get_ydata()) == [0.1, 0.2]
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([0, 2], [0.3, 0.5])


@pytest.mark.parametrize(
    "text, message",
    [
        ("nonsense\n", "metrics.jsonl has a line that is not in the format of verl's file logger"),
        ("", "run has no metrics: give the folder of a run"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_named_in_a_line(tmp_path, capsys, monkeypatch, text, message):
    (rewards(tmp_path / "run", 0.1) / "metrics.jsonl").write_text(text)
    monkeypatch.setattr("sys.argv", ["plot", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and error.count("\n") == 1


def test_every_panel_shows_a_metric_that_a_run_logs():
    from support.metrics import METRICS

    shown = {metric for curves in PANELS.values() for metric in curves if metric.startswith("actor/bapo/")}
    assert shown and shown <= METRICS
