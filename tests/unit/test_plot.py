# SPDX-License-Identifier: Apache-2.0
"""The pictures: what they need, and that seeds become a band."""

import json

import pytest
from matplotlib import image

from recipe.bapo import plot
from recipe.bapo.plot import PANELS, main, picture


def rewards(folder, *values):
    """A run's folder, with the mean reward of each step."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step, value in enumerate(values, 1):
            data = {"training/global_step": step, "critic/rewards/mean": value}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return folder


def test_methods_are_lines_and_their_seeds_a_band(tmp_path):
    seeds = [rewards(tmp_path / "1", 0.1, 0.2), rewards(tmp_path / "2", 0.2, 0.4)]
    figure = picture({"GRPO": seeds, "BAPO": [rewards(tmp_path / "4", 0.4, 0.8, 0.9)]})
    reward = figure.axes[0]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in reward.lines}
    assert lines == {
        "GRPO": ([1, 2], pytest.approx([0.15, 0.3])),
        "BAPO": ([1, 2, 3], pytest.approx([0.4, 0.8, 0.9])),
    }
    band = reward.collections[0]
    assert {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices} == {(1, 0.1), (1, 0.2), (2, 0.2), (2, 0.4)}


def test_runs_in_folders_of_one_name_keep_their_curves(tmp_path, monkeypatch):
    runs = [rewards(tmp_path / name / "run", 0.1, 0.2) for name in "ab"]
    drawn = []
    monkeypatch.setattr(plot, "picture", lambda methods: drawn.append(picture(methods)) or drawn[0])
    monkeypatch.setattr("sys.argv", ["plot", *map(str, runs)])
    main()
    assert [line.get_label() for line in drawn[0].axes[0].lines] == [str(run) for run in runs]
    assert image.imread(runs[0] / "dynamics.png").shape[0] > 500


@pytest.mark.parametrize(
    "text, message",
    [
        ("nonsense\n", "metrics.jsonl has a line that verl's file logger did not write"),
        ("5\n", "metrics.jsonl has a line that verl's file logger did not write"),
        ("", "run has no metrics: give the folder of a run"),
        (None, "run has no metrics: give the folder of a run"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_named_in_a_line(tmp_path, capsys, monkeypatch, text, message):
    if text is not None:
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
