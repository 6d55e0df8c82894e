"""The pictures: what they need, and that seeds become a band."""

import json

import pytest
from matplotlib import image

from recipe.bapo.plot import PANELS, draw, series


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
    runs = [make_run(tmp_path / str(seed), [0.1 * seed, 0.2 * seed]) for seed in (1, 2, 3)]
    draw({"GRPO": runs[:2], "BAPO": runs[2:]}, tmp_path / "out.png", target=0.5)
    assert image.imread(tmp_path / "out.png").shape[0] > 500


def test_a_run_without_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing has no metrics"):
        draw({"x": [tmp_path / "nothing"]}, tmp_path / "out.png")


def test_every_panel_shows_a_metric_that_a_run_logs():
    from test_policy_loss import METRICS

    shown = {metric for _, _, curves in PANELS for metric, _, _ in curves}
    known = {"critic/rewards/mean", "actor/entropy", "actor/grad_norm", "response_length/mean"}
    assert shown <= METRICS | known
