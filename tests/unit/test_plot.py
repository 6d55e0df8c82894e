# SPDX-License-Identifier: Apache-2.0
"""The pictures: what they need, and that seeds become a band."""

import json

import pytest
from matplotlib import image

from recipe.bapo.plot import PANELS, draw, main, marks_of, picture, series

SWITCHES = {
    "positive_contribution_target": 0.4,
    "ratio_upper_start": 1.2,
    "ratio_upper_max": 3.0,
    "ratio_lower_start": 0.6,
    "ratio_lower_max": 0.9,
}


def make_run(folder, rewards):
    folder.mkdir()
    lines = [
        json.dumps({"step": step, "data": {"training/global_step": step, "critic/rewards/mean": reward}})
        for step, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_series_joins_the_seeds(tmp_path):
    runs = [make_run(tmp_path / name, rewards) for name, rewards in (("a", [0.1, 0.2]), ("b", [0.3, 0.4, 0.5]))]
    assert series(runs, "critic/rewards/mean") == ([1, 2, 3], [[0.1, 0.3], [0.2, 0.4], [0.5]])


def test_a_picture_of_several_methods(tmp_path):
    runs = [make_run(tmp_path / str(seed), [0.1 * seed, 0.2 * seed]) for seed in (1, 2, 4)]
    methods = {"GRPO": runs[:2], "BAPO": runs[2:]}
    reward = picture(methods).axes[0]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in reward.lines}
    assert lines == {"GRPO": ([1, 2], pytest.approx([0.15, 0.3])), "BAPO": ([1, 2], pytest.approx([0.4, 0.8]))}
    (band,) = reward.collections  # of the two seeds; one run has none
    assert {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices} == {(1, 0.1), (1, 0.2), (2, 0.2), (2, 0.4)}
    draw(methods, tmp_path / "out.png")
    assert image.imread(tmp_path / "out.png").shape[0] > 500


def test_the_curves_of_a_run_and_the_ranges_of_its_bounds(tmp_path):
    curves = {"actor/bapo/positive_contribution_start": "start", "actor/bapo/positive_contribution": "at the bounds"}
    values = {metric: [place + 0.1, place + 0.2] for place, metric in enumerate(["critic/rewards/mean", *curves])}
    steps = [{"training/global_step": n + 1, **{name: of[n] for name, of in values.items()}} for n in range(2)]
    lines = [json.dumps({"step": n, "data": data}) for n, data in enumerate(steps, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"actor": {"policy_loss": SWITCHES}}}))
    panels = {axis.get_title(): axis for axis in picture({"": [tmp_path]}).axes}
    axis = panels["Positive contribution"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines if line.get_linestyle() != ":"}
    assert drawn == {label: values[metric] for metric, label in curves.items()}
    for title, marks in (("Positive contribution", ["target 0.4"]), ("Upper bound", ["start 1.2", "max 3"])):
        assert [text.get_text() for text in panels[title].texts] == marks
        dotted = [line.get_ydata()[0] for line in panels[title].lines if line.get_linestyle() == ":"]
        assert dotted == [float(mark.split()[1]) for mark in marks]


def test_the_target_and_the_ranges_come_from_the_runs_config(tmp_path):
    loss = dict(SWITCHES)
    (tmp_path / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"actor": {"policy_loss": loss}}}))
    assert marks_of(tmp_path)["Upper bound"] == {"start": 1.2, "max": 3.0}
    assert marks_of(tmp_path)["Positive contribution"] == {"target": 0.4}
    assert marks_of(tmp_path / "none") == {}
    for side, bound in (("lower", 0.8), ("upper", 1.2)):
        loss |= {f"ratio_{side}_start": bound, f"ratio_{side}_max": bound}
    (tmp_path / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"actor": {"policy_loss": loss}}}))
    assert marks_of(tmp_path) == {"Upper bound": {"fixed": 1.2}, "Lower bound": {"fixed": 0.8}}


def test_a_run_of_another_loss_has_no_ranges(tmp_path):
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {actor: {policy_loss: {loss_mode: vanilla}}}")
    assert marks_of(tmp_path) == {}


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("config.yaml", "x: [", "config.yaml is not the config of a run"),
        ("config.yaml", "5", "config.yaml is not the config of a run"),
        (
            "config.yaml",
            "actor_rollout_ref: {actor: {policy_loss: {positive_contribution_target: half}}}",
            "config.yaml is not the config of a run",
        ),
        ("metrics.jsonl", "nonsense\n", "metrics.jsonl has a line that verl's file logger did not write"),
        ("metrics.jsonl", "5\n", "metrics.jsonl has a line that verl's file logger did not write"),
    ],
)
def test_a_broken_file_of_a_run_is_named_in_a_line(tmp_path, capsys, monkeypatch, file, text, message):
    run = make_run(tmp_path / "run", [0.1, 0.2])
    (run / file).write_text(text)
    monkeypatch.setattr("sys.argv", ["plot", str(run)])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and error.count("\n") == 1


def test_a_run_without_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing has no metrics"):
        draw({"x": [tmp_path / "nothing"]}, tmp_path / "out.png")


def test_every_panel_shows_a_metric_that_a_run_logs():
    from support.metrics import METRICS

    shown = {metric for _, _, curves in PANELS for metric, _, _ in curves}
    # The tests of the stack see these logged.
    staleness = {"trajectory_staleness/mean", "cut_fraction", "updates_per_rollout_batch"}
    known = {
        "critic/rewards/mean",
        "actor/entropy",
        "actor/grad_norm",
        *(f"training/off_policy/{s}" for s in staleness),
    }
    assert shown <= METRICS | known
