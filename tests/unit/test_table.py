# SPDX-License-Identifier: Apache-2.0
"""The table of methods: which runs are one row, its numbers, what it says of runs that do not fit, and its picture."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib import image
from scipy import stats

from recipe.bapo.table.__main__ import main
from recipe.bapo.table.curves import draw_curves
from recipe.bapo.table.runs import read_methods
from recipe.bapo.table.scores import average, compare, half_width
from recipe.bapo.table.tables import doubts, markdown

MEAN = "val-core/aime/acc/mean@2"
BEST = "val-core/aime/acc/best@2/mean"
RECORDS = Path(__file__).parents[2] / "docs/examples"


def lines(values, key=MEAN, **more):
    """Format a validation every ten steps, as verl's file logger does; the first one is before training."""
    records = []
    for number, value in enumerate(values):
        data = {key: value, **{name: series[number] for name, series in more.items()}}
        if number:
            data |= {"training/global_step": 10 * number, "critic/rewards/mean": 0.5, "actor/entropy": 1.0}
        records.append({"step": 10 * number, "data": data})
    return "".join(json.dumps(record) + "\n" for record in records)


def folder(path, values, config=None, **more):
    """Make a folder of a run of ours."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(lines(values, **more))
    (path / "config.yaml").write_text(yaml.safe_dump(config or {}))
    return path


def answers(run, step, scores):
    """Write the responses of a validation as verl does: ``scores`` has the acc of those to each prompt."""
    (run / "validation").mkdir(exist_ok=True)
    with open(run / "validation" / f"{step}.jsonl", "w") as file:
        for prompt, of in scores.items():
            for acc in of:
                row = {"input": f"user\n{prompt}\nassistant\n", "output": "x\u2028\u2029\x85", "acc": acc}
                row["score"] = 2 * (acc or 0) - 1
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def table_of(*runs, baseline=None):
    methods = read_methods([str(run) for run in runs])
    return methods, compare(methods, average(methods), baseline)


def cell(scores, method="bapo", at="last", data_set="aime", measure="mean@2", variable="acc"):
    wanted = {"method": method, "at": at, "data_set": data_set, "variable": variable, "measure": measure}
    (row,) = scores[(scores[list(wanted)] == list(wanted.values())).all(axis=1)].itertuples()
    return row


def test_mean_and_interval_over_seeds_at_last_and_best_step(tmp_path):
    """The best step is the first of equal ones. The reward has one of its own."""
    rewards = {"val-core/aime/reward/mean@2": [0, 0.1, 0.2, 0.9]}
    values = [[0, 0.5, 0.5, 0.3], [0, 0.7, 0.7, 0.4]]
    scores = table_of(*(folder(tmp_path / f"bapo-seed{k}", values[k], **rewards) for k in range(2)))[1]
    last, best = cell(scores), cell(scores, at="best")
    assert (last.step, last.runs, best.step) == (30, 2, 10)
    assert cell(scores, at="best", variable="reward").step == 30
    assert last.mean == pytest.approx(0.35) and best.mean == pytest.approx(0.6)
    # Student's t with one degree of freedom, times the standard error of 0.3 and 0.4.
    assert last.over_seeds == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert last.problems == 0 and math.isnan(last.over_problems) and math.isnan(last.difference)


def test_one_run_has_no_interval_over_seeds(tmp_path):
    methods, scores = table_of(folder(tmp_path / "bapo", [0.1, 0.2]))
    (doubt,) = doubts(methods, scores)
    assert math.isnan(cell(scores).over_seeds) and doubt.startswith("bapo: one run")


def test_the_difference_from_the_baseline_is_welchs(tmp_path):
    ends = {"grpo": [0.3, 0.32, 0.4], "bapo": [0.5, 0.7]}
    runs = [folder(tmp_path / f"{name}-seed{k}", [0, end]) for name, of in ends.items() for k, end in enumerate(of)]
    scores = table_of(*runs, baseline="grpo")[1]
    interval = stats.ttest_ind(ends["bapo"], ends["grpo"], equal_var=False).confidence_interval(0.95)
    found = cell(scores).difference, cell(scores).of_difference
    assert found == pytest.approx((0.26, (interval.high - interval.low) / 2))
    assert math.isnan(cell(scores, "grpo").difference)


def test_the_difference_is_to_the_baseline_at_the_same_step(tmp_path):
    runs = [folder(tmp_path / "grpo-seed1", [0, 0.3, 0.4, 0.6]), folder(tmp_path / "grpo-seed2", [0, 0.3, 0.4])]
    runs += [folder(tmp_path / "bapo", [0, 0.5, 0.2, 0.2]), folder(tmp_path / "cispo", [0, 0.1, 0.7])]
    scores = table_of(*runs, baseline="grpo")[1]
    assert cell(scores, at="best").difference == pytest.approx(0.2)  # 0.3 of step 10; the best of grpo is step 20
    assert cell(scores, "cispo").difference == pytest.approx(0.3)
    assert cell(scores).step == 30 and math.isnan(cell(scores).difference)  # one run of grpo has no step 30


def test_a_value_that_is_no_number_is_shown_and_never_the_best(tmp_path):
    scores = table_of(folder(tmp_path / "bapo", [None, 0.5, 0.4, None]))[1]
    assert cell(scores).step == 30 and math.isnan(cell(scores).mean) and cell(scores, at="best").step == 10


def test_interval_over_problems_is_of_their_means_over_runs(tmp_path):
    runs = [folder(tmp_path / f"bapo-seed{k}", [0, mean]) for k, mean in enumerate([0.5, 0.75])]
    answers(runs[0], 10, {"a": [1, 1], "b": [0, 0], "c": [None, None]})  # verl leaves null out of its mean, too
    answers(runs[1], 10, {"b": [0, 1], "a": [1, 1]})
    found = cell(table_of(*runs)[1])
    assert found.problems == 2 and found.over_problems == pytest.approx(half_width([1, 0.25]))
    runs.append(folder(tmp_path / "bapo-seed3", [0, 0.5]))  # its responses were not kept
    assert cell(table_of(*runs)[1]).problems == 0
    answers(runs[2], 10, {"a": [1, 1], "b": [1, 0]})  # and these do not have the logged mean
    assert cell(table_of(*runs)[1]).problems == 0


def test_of_a_reward_the_score_counts(tmp_path):
    moved = {"trainer": {"validation_data_dir": "/where/the/run/was"}}
    run = folder(tmp_path / "bapo", [0, 0.0], moved, key="val-core/aime/reward/mean@2")
    answers(run, 10, {"a": [1, 1], "b": [0, 0]})  # scores of 1 and -1
    assert cell(table_of(run)[1], variable="reward").over_problems == pytest.approx(half_width([1, -1]))


def test_problems_of_data_sets_are_told_apart_by_their_files(tmp_path):
    prompts = [[{"role": "user", "content": f" {text} "}] for text in ("a one", "a two", "m one")]
    pd.DataFrame({"data_source": ["aime", "aime", "math"], "prompt": prompts}).to_parquet(tmp_path / "test.parquet")
    config = {"data": {"val_files": [str(tmp_path / "test.parquet"), "/gone.parquet"]}}
    run = folder(tmp_path / "bapo", [0, 0.5], config, **{"val-core/math/acc/mean@2": [0, 1.0]})
    answers(run, 10, {"a one": [1, 1], "a two": [0, 0], "m one": [1, 1]})
    scores = table_of(run)[1]
    assert cell(scores).problems == 2 and cell(scores, data_set="math").problems == 1


def test_only_what_is_named_as_a_seed_is_merged(tmp_path):
    merged = ("bapo-seed1", "bapo_seed2", "bapo-seed-3", "bapo_seed_1234")
    kept = ("bapo-1", "clip_higher_20", "clip_higher_28", "example-20261127-101010")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "record-1.jsonl").write_text('{"options": {}}\n')  # left out
    for name in (*merged, *kept):
        (tmp_path / "project" / f"{name}.jsonl").write_text(lines([0, 0.4]))
    ours = folder(tmp_path / "ours" / "bapo-seed5", [0, 0.5])
    methods = read_methods([str(tmp_path / "project"), str(ours), f"mine={tmp_path / 'project' / 'bapo-1.jsonl'}"])
    assert {name: len(runs) for name, runs in methods.items()} == {"bapo": 5, **dict.fromkeys(kept, 1), "mine": 1}
    assert methods["mine"][0].validations["value"].tolist() == [0, 0.4]


def test_methods_with_another_k_or_variable_have_their_rows(tmp_path):
    mean_16, reward = "val-core/aime/acc/mean@16", {"val-core/aime/reward/mean@16": [0.9, 0.5]}
    runs = [folder(tmp_path / "bapo", [0, 0.5], key=mean_16, **reward), folder(tmp_path / "grpo", [0, 0.4])]
    text = markdown(table_of(*runs)[1], None)
    assert "| mean@16 of acc | ± problems | mean@2 of acc | ± problems | mean@16 of reward | ± problems |" in text
    assert "| bapo | 1 | 10, 0 | 0.500 | - | - | - | 0.900 | - |\n| grpo | 1 | 10 | - | - | 0.400 | - | - | - |" in text


def test_the_last_step_is_one_of_all_runs_and_ends_are_said(tmp_path):
    runs = [folder(tmp_path / "bapo-seed1", [0, 0.5, 0.9]), folder(tmp_path / "bapo-seed2", [0, 0.3])]
    runs.append(folder(tmp_path / "bapo-seed3", [0, 0.4], **{BEST: [0, 1]}))
    methods, scores = table_of(*runs)
    assert (cell(scores).step, cell(scores).mean) == (10, pytest.approx(0.4))
    assert list(doubts(methods, scores)) == [
        "bapo: no step has best@2/mean of aime in all runs, so it is left out.",
        f"Runs end at different steps: 10: {runs[1]}, {runs[2]}; 20: {runs[0]}.",
    ]


def test_runs_whose_configs_differ_are_named(tmp_path):
    def config(seed, rate, loss, batch=64):
        clip = {"clip_ratio_high": loss, "clip_ratio_c": 3.0 if loss == 0.2 else 10.0}
        actor = {"optim": {"lr": rate}, **clip, "policy_loss": {"record_dir": f"/{seed}"}}
        return {"seed": seed, "data": {"train_batch_size": batch}, "actor_rollout_ref": {"actor": actor}}

    given = {"grpo": [config(k, k * 1e-6, 0.2) for k in (1, 2)], "dapo": [config(k, 1e-6, 0.28, 32) for k in (1, 2)]}
    runs = [folder(tmp_path / f"{name}-seed{k}", [0, 0.5], of[k]) for name, of in given.items() for k in (0, 1)]
    methods, scores = table_of(*runs)
    of_runs, of_methods = doubts(methods, scores)
    assert of_runs.startswith("Runs of grpo ") and of_runs.endswith(": actor_rollout_ref.actor.optim.lr.")
    assert of_methods.endswith(": actor_rollout_ref.actor.clip_ratio_c, data.train_batch_size.")


def test_different_problems_give_no_interval_and_it_is_said(tmp_path):
    runs = [folder(tmp_path / f"bapo-seed{k}", [0, 0.5]) for k in (1, 2)]
    answers(runs[0], 10, {"a": [0, 1], "b": [1, 0]})
    answers(runs[1], 10, {"b": [0, 1], "a": [1, 0]})
    assert list(doubts(*table_of(*runs))) == []
    answers(runs[1], 10, {"a": [0, 1], "c": [1, 0]})
    methods, scores = table_of(*runs)
    (doubt,) = doubts(methods, scores)
    assert doubt.startswith("bapo: the runs validated different problems") and math.isnan(cell(scores).over_problems)
    (runs[1] / "validation/10.jsonl").unlink()
    assert list(doubts(*table_of(*runs))) == []  # nothing is known of its problems


def test_markdown_has_best_of_k_at_the_step_of_the_best_mean(tmp_path):
    runs = [
        folder(tmp_path / "grpo", [0, 0.3], **{BEST: [0, 0.5]}),
        folder(tmp_path / "bapo", [0, 0.5, 0.25], **{BEST: [0, 0.6, 0.75]}),
    ]
    head = ["", "| method | runs | step | mean@2 | ± problems | minus grpo | best@2 |", "|" + " --- |" * 7]
    assert markdown(table_of(*runs, baseline="grpo")[1], "grpo").splitlines() == [
        *("**aime, last step**", *head),
        "| grpo | 1 | 10 | 0.300 | - | - | 0.500 |",
        "| bapo | 1 | 20 | 0.250 | - | - | 0.750 |",
        *("", "**aime, best step**", *head),
        "| grpo | 1 | 10 | 0.300 | - | - | 0.500 |",
        "| bapo | 1 | 10 | 0.500 | - | +0.200 | 0.600 |",
    ]


def test_the_command_writes_table_and_picture(tmp_path, monkeypatch, capsys):
    for method, ends in {"grpo": (0.3, 0.4), "bapo": (0.5, 0.6)}.items():
        for seed, end in enumerate(ends):
            folder(tmp_path / "runs" / f"{method}-seed{seed}", [0, end])
    runs = sorted(map(str, (tmp_path / "runs").iterdir()))
    monkeypatch.setattr("sys.argv", ["table", *runs, "--out", str(tmp_path / "paper")])
    main()
    printed = capsys.readouterr()
    assert "| bapo | 2 | 10 | 0.550 ± 0.635 | - | +0.200 ± 0.304 |" in printed.out and not printed.err
    assert (tmp_path / "paper/table.md").read_text() in printed.out
    row = cell(pd.read_csv(tmp_path / "paper/table.csv"))
    assert (row.step, row.runs, row.problems) == (10, 2, 0)
    assert (row.mean, row.over_seeds) == pytest.approx((0.55, 0.635), abs=5e-4)
    assert (row.difference, row.of_difference) == pytest.approx((0.2, 0.304), abs=5e-4)
    assert image.imread(tmp_path / "paper/table.png").shape[1] == pytest.approx(6.75 * 300, abs=2)
    assert (tmp_path / "paper/table.pdf").read_bytes().startswith(b"%PDF")


def test_the_picture_has_means_and_intervals_of_methods(tmp_path):
    runs = [folder(tmp_path / f"bapo-seed{k}", [0, end, end]) for k, end in enumerate([0.3, 0.4])]
    runs.append(folder(tmp_path / "grpo", [0, 0.2, 0.2]))
    panels = draw_curves(average(read_methods(list(map(str, runs))))).axes
    assert [axis.get_title() for axis in panels] == ["aime, mean@2", "training reward", "entropy, nats a token"]
    bapo, grpo = panels[0].lines
    assert list(bapo.get_xdata()) == [0, 10, 20] and list(bapo.get_ydata()) == pytest.approx([0, 0.35, 0.35])
    assert list(grpo.get_ydata()) == pytest.approx([0, 0.2, 0.2])
    (band,) = panels[0].collections  # one run has none
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(0.35 + half_width([0.3, 0.4]))
    assert list(panels[1].lines[0].get_xdata()) == [10, 20]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["empty"], "empty holds no run: give a folder with metrics.jsonl, or a file of verl's file logger."),
        (["none.jsonl"], "none.jsonl has no validation (val-core/*): set trainer.test_freq and data.val_files"),
        (["run", "--baseline", "ppo"], "--baseline ppo: the methods are run."),
        (["apart-seed1.jsonl", "apart-seed2.jsonl"], "the runs of apart were validated at no common step: give them"),
        ([str(RECORDS)], f"no validations: python -m recipe.bapo.report {RECORDS} reads it."),
    ],
)
def test_what_is_no_run_is_named_in_a_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text(json.dumps({"step": 1, "data": {"actor/entropy": 1.0}}) + "\n")
    folder(tmp_path / "run", [0, 1])
    for k in (1, 2):
        (tmp_path / f"apart-seed{k}.jsonl").write_text(json.dumps({"step": k, "data": {MEAN: 0.5}}) + "\n")
    monkeypatch.setattr("sys.argv", ["table", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and error.count("\n") == 1
