# SPDX-License-Identifier: Apache-2.0
"""The table of methods: which runs are one row, its numbers, what it says of runs that do not fit, and its picture."""

import csv
import json
import math

import pandas as pd
import pytest
import yaml
from matplotlib import image
from scipy import stats

from recipe.bapo.table.__main__ import main
from recipe.bapo.table.picture import picture
from recipe.bapo.table.runs import Measure, by_method, read_runs
from recipe.bapo.table.statistics import cells, half_width
from recipe.bapo.table.tables import doubts, markdown

MEAN = "val-core/aime/acc/mean@2"
BEST = "val-core/aime/acc/best@2/mean"
AIME = Measure("aime", "acc", "mean@2")


def lines(values, key=MEAN, **more):
    """Format a validation every ten steps, as verl's file logger does; the first one is before training."""
    records = []
    for number, value in enumerate(values):
        data = {key: value, **{name: series[number] for name, series in more.items()}}
        if number:
            data |= {"training/global_step": 10 * number, "critic/rewards/mean": value / 2, "actor/entropy": 1.0}
        records.append({"step": 10 * number, "data": data})
    return "".join(json.dumps(record) + "\n" for record in records)


def folder(path, values, config=None, **more):
    """Make a folder of a run of ours."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(lines(values, **more))
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def answers(run, step, scores, variable="acc"):
    """Write the responses of a validation as verl does: ``scores`` has those of each prompt."""
    (run / "validation").mkdir(exist_ok=True)
    rows = [
        {"input": f"user\n{prompt}\nassistant\n", "output": "x", "score": 2 * score - 1, variable: score}
        for prompt, values in scores.items()
        for score in values
    ]
    (run / "validation" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_of(*runs, baseline=None):
    methods = by_method(read_runs([str(run) for run in runs]))
    return methods, {(cell.method, cell.measure, cell.at): cell for cell in cells(methods, baseline)}


def test_mean_and_interval_over_seeds_at_the_last_and_the_best_step(tmp_path):
    """The best step is the first of equal ones. The reward has one of its own."""
    rewards = {"val-core/aime/reward/mean@2": [0, 0.1, 0.2, 0.9]}
    values = [[0, 0.5, 0.5, 0.3], [0, 0.7, 0.7, 0.4]]
    _, found = table_of(*(folder(tmp_path / f"bapo-{k}", values[k], **rewards) for k in range(2)))
    last, best = found["bapo", AIME, "last"], found["bapo", AIME, "best"]
    assert (last.step, last.runs, best.step) == (30, 2, 10)
    assert found["bapo", Measure("aime", "reward", "mean@2"), "best"].step == 30
    assert last.mean == pytest.approx(0.35) and best.mean == pytest.approx(0.6)
    # Student's t with one degree of freedom, times the standard error of 0.3 and 0.4.
    assert last.over_seeds == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert last.problems == 0 and math.isnan(last.over_problems) and math.isnan(last.difference)


def test_one_run_has_no_interval_over_seeds(tmp_path):
    methods, found = table_of(folder(tmp_path / "bapo-1", [0.1, 0.2]))
    assert math.isnan(found["bapo", AIME, "last"].over_seeds)
    assert list(doubts(methods)) == ["bapo: one run, so there is no interval over seeds."]


def test_the_difference_from_the_baseline_is_welchs(tmp_path):
    ends = {"grpo": [0.3, 0.32, 0.4], "bapo": [0.5, 0.7]}
    runs = [folder(tmp_path / f"{name}-{k}", [0, end]) for name, of in ends.items() for k, end in enumerate(of)]
    _, found = table_of(*runs, baseline="grpo")
    cell = found["bapo", AIME, "last"]
    interval = stats.ttest_ind(ends["bapo"], ends["grpo"], equal_var=False).confidence_interval(0.95)
    assert cell.difference == pytest.approx(0.26)
    assert (interval.low, interval.high) == pytest.approx((0.26 - cell.of_difference, 0.26 + cell.of_difference))
    assert math.isnan(found["grpo", AIME, "last"].difference)


def test_the_interval_over_problems_is_of_each_problems_mean_over_runs(tmp_path):
    runs = [folder(tmp_path / f"bapo-{k}", [0, mean]) for k, mean in enumerate([0.5, 0.75])]
    answers(runs[0], 10, {"a": [1, 1], "b": [0, 0]})
    answers(runs[1], 10, {"b": [0, 1], "a": [1, 1]})
    cell = table_of(*runs)[1]["bapo", AIME, "last"]
    assert cell.problems == 2 and cell.over_problems == pytest.approx(half_width([1, 0.25]))
    runs.append(folder(tmp_path / "bapo-3", [0, 0.5]))  # its responses were not kept
    assert table_of(*runs)[1]["bapo", AIME, "last"].problems == 0


def test_of_a_reward_the_score_counts(tmp_path):
    run = folder(tmp_path / "bapo-1", [0, 0.0], key="val-core/aime/reward/mean@2")
    answers(run, 10, {"a": [1, 1], "b": [0, 0]})  # scores of 1 and -1
    cell = table_of(run)[1]["bapo", Measure("aime", "reward", "mean@2"), "last"]
    assert cell.over_problems == pytest.approx(half_width([1, -1]))


def test_responses_that_do_not_have_the_logged_mean_give_no_interval(tmp_path):
    run = folder(tmp_path / "bapo-1", [0, 0.9])
    answers(run, 10, {"a": [1, 1], "b": [0, 0]})
    assert table_of(run)[1]["bapo", AIME, "last"].problems == 0


def test_problems_of_several_data_sets_are_told_apart_by_their_files(tmp_path):
    texts = {"aime": ["a one", "a two"], "math": ["m one"]}
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": f" {text} "}]}
        for source, of in texts.items()
        for text in of
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "test.parquet")
    config = {"data": {"val_files": [str(tmp_path / "test.parquet"), "/gone.parquet"]}}
    run = folder(tmp_path / "bapo-1", [0, 0.5], config, **{"val-core/math/acc/mean@2": [0, 1.0]})
    answers(run, 10, {"a one": [1, 1], "a two": [0, 0], "m one": [1, 1]})
    _, found = table_of(run)
    assert found["bapo", AIME, "last"].problems == 2
    assert found["bapo", Measure("math", "acc", "mean@2"), "last"].problems == 1


def test_methods_are_named_by_folder_or_by_hand_and_files_of_verl_alone_are_runs(tmp_path):
    ours = folder(tmp_path / "runs" / "bapo-1", [0, 0.5])
    (tmp_path / "project").mkdir()
    for name in ("grpo-1", "grpo_seed2", "example-20261127-101010"):
        (tmp_path / "project" / f"{name}.jsonl").write_text(lines([0, 0.4]))
    runs = read_runs([str(ours), str(tmp_path / "project"), f"mine={tmp_path / 'project' / 'grpo-1.jsonl'}"])
    names = [run.method for run in runs]
    assert names == ["bapo", "example-20261127-101010", "grpo", "grpo", "mine"]
    assert {tuple(run.validations[AIME].items()) for run in runs[1:]} == {((0, 0), (10, 0.4))}


def test_the_last_step_is_one_that_all_runs_have_and_other_ends_are_said(tmp_path):
    runs = [folder(tmp_path / "bapo-1", [0, 0.5, 0.9]), folder(tmp_path / "bapo-2", [0, 0.3])]
    methods, found = table_of(*runs)
    cell = found["bapo", AIME, "last"]
    assert (cell.step, cell.mean) == (10, pytest.approx(0.4))
    assert list(doubts(methods)) == [f"Runs end at different steps: 10: {runs[1]}; 20: {runs[0]}."]


def test_runs_whose_configs_differ_are_named(tmp_path):
    def config(seed, rate, loss, batch=64):
        actor = {"optim": {"lr": rate}, "clip_ratio_high": loss, "policy_loss": {"record_dir": f"/{seed}"}}
        return {"seed": seed, "data": {"train_batch_size": batch}, "actor_rollout_ref": {"actor": actor}}

    runs = [
        folder(tmp_path / "grpo-1", [0, 0.5], config(1, 1e-6, 0.2)),
        folder(tmp_path / "grpo-2", [0, 0.5], config(2, 2e-6, 0.2)),
        folder(tmp_path / "dapo-1", [0, 0.5], config(1, 1e-6, 0.28, batch=32)),
        folder(tmp_path / "dapo-2", [0, 0.5], config(2, 1e-6, 0.28, batch=32)),
    ]
    methods, _ = table_of(*runs)
    assert list(doubts(methods)) == [
        "Runs of grpo differ in more than their seed: actor_rollout_ref.actor.optim.lr.",
        "Methods differ in more than their loss and its sampling: data.train_batch_size.",
    ]


def test_runs_that_validated_different_problems_have_no_interval_over_them_and_it_is_said(tmp_path):
    runs = [folder(tmp_path / f"bapo-{k}", [0, 0.5]) for k in (1, 2)]
    answers(runs[0], 10, {"a": [0, 1], "b": [1, 0]})
    answers(runs[1], 10, {"a": [0, 1], "b": [1, 0]})
    methods, found = table_of(*runs)
    assert list(doubts(methods)) == [] and found["bapo", AIME, "last"].problems == 2
    answers(runs[1], 10, {"a": [0, 1], "c": [1, 0]})
    methods, found = table_of(*runs)
    (doubt,) = doubts(methods)
    assert doubt.startswith(
        "bapo: the runs validated different problems of aime, so there is no interval over problems"
    )
    assert math.isnan(found["bapo", AIME, "last"].over_problems)


def test_the_markdown_with_best_of_k_at_the_step_of_the_best_mean(tmp_path):
    runs = [
        folder(tmp_path / "grpo-1", [0, 0.3], **{BEST: [0, 0.5]}),
        folder(tmp_path / "bapo-1", [0, 0.5, 0.25], **{BEST: [0, 0.6, 0.75]}),
    ]
    methods, found = table_of(*runs, baseline="grpo")
    assert markdown(list(found.values()), "grpo").splitlines() == [
        "**aime, last step**",
        "",
        "| method | runs | step | mean@2 | ± problems | minus grpo | best@2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| grpo | 1 | 10 | 0.300 | - | - | 0.500 |",
        "| bapo | 1 | 20 | 0.250 | - | -0.050 | 0.750 |",
        "",
        "**aime, best step**",
        "",
        "| method | runs | step | mean@2 | ± problems | minus grpo | best@2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| grpo | 1 | 10 | 0.300 | - | - | 0.500 |",
        "| bapo | 1 | 10 | 0.500 | - | +0.200 | 0.600 |",
    ]


def test_the_command_writes_table_and_picture(tmp_path, monkeypatch, capsys):
    for method, ends in {"grpo": (0.3, 0.4), "bapo": (0.5, 0.6)}.items():
        for seed, end in enumerate(ends):
            folder(tmp_path / "runs" / f"{method}-{seed}", [0, end])
    runs = sorted(map(str, (tmp_path / "runs").iterdir()))
    monkeypatch.setattr("sys.argv", ["table", *runs, "--out", str(tmp_path / "paper")])
    main()
    printed = capsys.readouterr()
    assert "| bapo | 2 | 10 | 0.550 ± 0.635 | - | +0.200 ± 0.304 |" in printed.out and not printed.err
    assert (tmp_path / "paper/table.md").read_text() in printed.out
    with open(tmp_path / "paper/table.csv") as file:
        rows = list(csv.DictReader(file))
    (row,) = [row for row in rows if (row["method"], row["at"]) == ("grpo", "last")]
    assert (row["data_set"], row["measure"], row["step"], row["runs"]) == ("aime", "mean@2", "10", "2")
    assert float(row["mean"]) == pytest.approx(0.35) and row["over_problems"] == row["difference"] == ""
    assert image.imread(tmp_path / "paper/table.png").shape[1] == pytest.approx(6.75 * 300, abs=2)
    assert (tmp_path / "paper/table.pdf").read_bytes().startswith(b"%PDF")


def test_the_picture_has_the_mean_of_each_method_and_its_interval(tmp_path):
    runs = [folder(tmp_path / f"bapo-{k}", [0, end, end]) for k, end in enumerate([0.3, 0.4])]
    runs.append(folder(tmp_path / "grpo-1", [0, 0.2, 0.2]))
    methods, _ = table_of(*runs)
    validation, reward, entropy = picture(methods).axes
    assert [axis.get_title() for axis in (validation, reward, entropy)] == [
        "aime, mean@2",
        "training reward",
        "entropy, nats a token",
    ]
    bapo, grpo = validation.lines
    assert list(bapo.get_xdata()) == [0, 10, 20] and list(bapo.get_ydata()) == pytest.approx([0, 0.35, 0.35])
    assert list(grpo.get_ydata()) == pytest.approx([0, 0.2, 0.2])
    (band,) = validation.collections  # one run has none
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(0.35 + half_width([0.3, 0.4]))
    assert list(reward.lines[0].get_xdata()) == [10, 20]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["empty"], "empty holds no run: give a folder with metrics.jsonl, or a file of verl's file logger."),
        (
            ["none.jsonl"],
            "none.jsonl has no validation (val-core/*): set trainer.test_freq and data.val_files in the run.",
        ),
        (["bad.jsonl"], "bad.jsonl has a line that is not in the format of verl's file logger"),
        (["run-1", "--baseline", "ppo"], "--baseline ppo is not usable: the methods are run."),
        (
            ["apart-1", "apart-2"],
            "the runs of apart were validated at no common step: give them one trainer.test_freq",
        ),
    ],
)
def test_what_is_no_run_is_named_in_a_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text(json.dumps({"step": 1, "data": {"actor/entropy": 1.0}}) + "\n")
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    folder(tmp_path / "run-1", [0, 1])
    for number, step in ((1, 5), (2, 7)):
        path = folder(tmp_path / f"apart-{number}", [])
        (path / "metrics.jsonl").write_text(json.dumps({"step": step, "data": {MEAN: 0.5}}) + "\n")
    monkeypatch.setattr("sys.argv", ["table", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and error.count("\n") == 1
