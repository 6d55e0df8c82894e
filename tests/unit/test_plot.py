# SPDX-License-Identifier: Apache-2.0
"""The pictures: what they need, and that seeds become a band."""

import json

import pytest
from matplotlib import image

from recipe.bapo.plot import PANELS, main, picture


def make_run(folder, **metrics):
    """A run's folder, with the values of each metric in its steps."""
    folder.mkdir()
    steps = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    lines = [
        json.dumps({"step": number, "data": {"training/global_step": number, **data}})
        for number, data in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def rewards(folder, *values):
    return make_run(folder, **{"critic/rewards/mean": values})


def test_methods_are_lines_and_their_seeds_a_band(tmp_path):
    seeds = [rewards(tmp_path / "1", 0.1, 0.2), rewards(tmp_path / "2", 0.2, 0.4)]
    methods = {"GRPO": seeds, "BAPO": [rewards(tmp_path / "4", 0.4, 0.8, 0.9)]}
    reward = picture(methods).axes[0]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in reward.lines}
    assert lines == {
        "GRPO": ([1, 2], pytest.approx([0.15, 0.3])),
        "BAPO": ([1, 2, 3], pytest.approx([0.4, 0.8, 0.9])),
    }
    band = reward.collections[0]
    assert {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices} == {(1, 0.1), (1, 0.2), (2, 0.2), (2, 0.4)}
    picture(methods).savefig(tmp_path / "out.png")
    assert image.imread(tmp_path / "out.png").shape[0] > 500


def test_the_curves_of_a_run(tmp_path):
    curves = {"actor/bapo/positive_contribution_start": "start", "actor/bapo/positive_contribution": "at the bounds"}
    values = {metric: [place + 0.1, place + 0.2] for place, metric in enumerate(curves)}
    panels = {axis.get_title(): axis for axis in picture({"a": [make_run(tmp_path / "a", **values)]}).axes}
    drawn = {line.get_label(): list(line.get_ydata()) for line in panels["Positive contribution rho"].lines}
    assert drawn == {label: values[metric] for metric, label in curves.items()}


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

    shown = {metric for curves in PANELS.values() for metric in curves}
    # The tests of the stack see these logged.
    staleness = {"trajectory_staleness/mean", "cut_fraction", "updates_per_rollout_batch"}
    known = {
        "critic/rewards/mean",
        "actor/entropy",
        "actor/grad_norm",
        *(f"training/off_policy/{s}" for s in staleness),
    }
    assert shown <= METRICS | known
