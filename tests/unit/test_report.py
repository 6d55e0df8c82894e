# SPDX-License-Identifier: Apache-2.0
"""The report on records: its figures by their definitions, which starts make a run, and what the command prints."""

import math
import re
import sys
from dataclasses import replace
from statistics import fmean, median

import pytest
import torch
from matplotlib import image
from support.batches import CHANGED
from support.commands import ROOT
from support.oracle import contribution, response_tokens, sequential_search, share
from support.records import OWN_CLIP, make_tokens, measure, read_updates, write_start

from bapo import BAPOConfig
from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.record import Record, Start
from recipe.bapo.report import panels as picture_module
from recipe.bapo.report.__main__ import main
from recipe.bapo.report.columns import Table, join
from recipe.bapo.report.findings import (
    BOUNDS,
    clipped_by_bounds,
    clipped_by_loss,
    ends_of_search,
    fixed_bounds,
    read_runs,
    tail,
)
from recipe.bapo.report.panels import picture
from recipe.bapo.report.record_report import TARGETS

CONFIGS = [
    BAPOConfig(),
    BAPOConfig(0.37, token_weight="uniform", search_order="lower_first"),
    BAPOConfig(0.5, contribution="gradient", ratio_lower_max=0.8, ratio_lower_step=0.05, ratio_upper_max=2.0),
]


def steps_of(run):
    return list(zip(run.recorded["step"].tolist(), run.recorded["update"].tolist(), strict=True))


def clipped_by(batches, rule):
    """Count the tokens of each sign that a rule for ratio and advantage clips, one token at a time."""
    counts = {True: [0, 0], False: [0, 0]}
    for batch in batches:
        ratio, advantages, *_ = response_tokens(*batch)
        for r, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
            counts[a > 0][0] += rule(r, a)
            counts[a > 0][1] += 1
    return [share(*counts[positive]) for positive in (True, False)]


@pytest.mark.parametrize(
    "config", [*CONFIGS, BAPOConfig(**CHANGED)], ids=["default", "uniform", "gradient", "every option changed"]
)
@pytest.mark.parametrize("measure_of", ["value", "gradient"])
def test_searches_for_every_target_are_those_of_the_literal_loop(tmp_path, config, measure_of):
    _, batches = write_start(tmp_path, steps=range(1, 5), config=config)
    (run,) = read_runs(tmp_path)
    found = ends_of_search(run, measure_of)
    for target in {*TARGETS, 0.42, config.positive_contribution_target}:
        literal = torch.zeros(3)
        for batch in batches:
            searched = replace(config, positive_contribution_target=target, contribution=measure_of)
            *_, steps, saturated = sequential_search(*batch, searched, clip_ratio_c=3.0)
            literal[2 if saturated else min(steps, 1)] += 1
        assert found[target] == pytest.approx((literal / len(batches)).tolist())
    assert any(ends[1] > 0 for ends in found.values()) and any(ends[2] > 0 for ends in found.values())


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["default", "uniform"])
@pytest.mark.parametrize("low, high", [*BOUNDS, (0.7, 1.5)])
def test_fixed_bounds_are_measured_by_their_definition(tmp_path, config, low, high):
    _, batches = write_start(tmp_path, steps=range(1, 5), config=config, own_clip=OwnClip("clip", 0.7, 1.5))
    (run,) = read_runs(tmp_path)
    found = fixed_bounds(run, low, high)
    assert [found.positive, found.negative] == pytest.approx(
        clipped_by(batches, lambda r, a: r >= high if a > 0 else r <= low)
    )
    for measure_of, rho in found.rho.items():
        literal = []
        for batch in batches:
            ratio, advantages, old, _ = response_tokens(*batch)
            weight = old.exp() if config.token_weight == "rollout_prob" else torch.ones_like(old)
            p, n = contribution(ratio, advantages, weight, low, high, measure_of, 3.0)
            literal.append(p / (p + n))
        assert rho == pytest.approx(median(literal))


def test_bounds_that_the_search_never_tries_are_not_measured(tmp_path):
    write_start(tmp_path, steps=[1], config=BAPOConfig(ratio_lower_max=0.7))
    (run,) = read_runs(tmp_path)
    assert fixed_bounds(run, 0.8, 1.2) is None and fixed_bounds(run, 0.6, 1.28) is None
    assert fixed_bounds(run, 0.6, 1.2) is not None


def test_what_the_runs_loss_clips_is_counted_by_sign_and_position(tmp_path):
    _, batches = write_start(tmp_path, steps=range(1, 5))
    (run,) = read_runs(tmp_path)

    def rule(r, a):
        return r > OWN_CLIP.high if a > 0 else r < OWN_CLIP.low or r > OWN_CLIP.dual_clip

    assert clipped_by_loss(run, run.updates) == pytest.approx(clipped_by(batches, rule))
    (first, _, at_first), (second, _, at_second) = run.by_position(8)
    assert (first, second) == (1, 2) and clipped_by_loss(run, at_first) == (0, 0)
    assert clipped_by_loss(run, at_second) == pytest.approx(clipped_by(batches[1::2], rule))
    unit, halves = run.by_step(2)
    assert unit == "training step" and [(first, last) for first, last, _ in halves] == [(1, 2), (3, 4)]
    assert clipped_by_loss(run, halves[1][-1]) == pytest.approx(clipped_by(batches[4:], rule))


@pytest.mark.parametrize("config", CONFIGS[::2], ids=["default", "other ranges"])
def test_the_tails_of_the_ratios_are_counted(tmp_path, config):
    _, batches = write_start(tmp_path, steps=range(1, 5), config=config)
    (run,) = read_runs(tmp_path)
    above = [ratio for ratio in (1.2, 1.5, 2.0, 3.0) if ratio <= config.ratio_upper_max]
    below = [ratio for ratio in (0.9, 0.8, 0.7, 0.6) if ratio <= config.ratio_lower_max]
    expected = {limit: clipped_by(batches, lambda r, a, limit=limit: r >= limit)[0] for limit in above}
    assert tail(run, "above") == pytest.approx(expected) and len(set(expected.values())) == len(above)
    expected = {limit: clipped_by(batches, lambda r, a, limit=limit: r <= limit)[1] for limit in below}
    assert tail(run, "below") == pytest.approx(expected) and len(set(expected.values())) == len(below)


def test_a_resumed_start_replaces_the_updates_from_its_step_on(tmp_path):
    made = [[1, 2, 3], [3, 4], [2, 3]]  # the third start goes on from the checkpoint of step 1
    paths = [write_start(tmp_path, steps, seed)[0] for seed, steps in enumerate(made)]
    (run,) = read_runs(tmp_path)
    assert steps_of(run) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [start.path for start in run.starts] == paths
    expected = read_updates(paths[0])[:2] + read_updates(paths[2])
    assert run.recorded["effective_sample_size"].tolist() == [one.values["effective_sample_size"] for one in expected]
    assert run.recorded["tokens"].tolist() == [[float(sum_) for sum_ in one.stats.tokens_by_sign] for one in expected]


def test_the_size_of_the_chunks_changes_nothing(tmp_path, monkeypatch, capsys):
    config = BAPOConfig(0.37, contribution="gradient")
    for seed, steps in enumerate(([1, 2, 3], [2, 3, 4, 5])):
        write_start(tmp_path, steps, seed, config, costs=[(1.0, 0.0), (0.0, 1.0)])
    said, pictures = [], []
    for at_once in (250, 1, 3):
        monkeypatch.setattr(Start.updates, "__defaults__", (at_once,))
        said.append(report_of(monkeypatch, capsys, tmp_path))
        pictures.append((tmp_path / "report.png").read_bytes())
    assert said[0] == said[1] == said[2] and "10 updates in 5 training steps (1 to 5), from 2 starts" in said[0]
    assert pictures[0] == pictures[1] == pictures[2]


def test_what_is_kept_of_an_update_is_small(tmp_path):
    write_start(tmp_path, steps=range(1, 5), config=BAPOConfig(ratio_upper_step=0.0005), updates=1)
    (run,) = read_runs(tmp_path)
    kept = sum(column.untyped_storage().nbytes() for column in run.recorded.columns.values())
    assert kept < 4 * 1000  # 3,600 candidates have sums of 100 kB


def test_numbers_that_only_some_updates_have_stay_with_them():
    one, other = Table({"a": torch.tensor([1.0, 2.0])}), Table({"b": torch.tensor([3.0]), "a": torch.tensor([4.0])})
    joined = join([one, other])
    assert joined.dicts(["a", "b"]) == [{"a": 1}, {"a": 2}, {"a": 4, "b": 3}] and len(joined) == 3
    assert joined.rows(~joined["b"].isnan()).dicts(["a", "c"]) == [{"a": 4}]


@pytest.mark.parametrize(
    "second",
    [
        dict(steps=[1, 2]),  # from the beginning
        dict(steps=[3], config=BAPOConfig(0.45)),
        dict(steps=[3], loss_mode="cispo"),
        dict(steps=[None]),  # another trainer
    ],
)
def test_two_runs_in_a_folder_do_not_mix(tmp_path, second):
    write_start(tmp_path, steps=[1, 2])
    write_start(tmp_path, **second)
    assert [len(run.recorded) for run in read_runs(tmp_path)] == [4, 2 * len(second["steps"])]


def test_a_resumed_start_goes_on_from_the_newest_run_with_its_settings(tmp_path):
    first, newest, other = (write_start(tmp_path, [1, 2], loss_mode=mode)[0] for mode in ("grpo", "grpo", "cispo"))
    resumed, _ = write_start(tmp_path, [3], loss_mode="grpo")
    starts = [[start.path for start in run.starts] for run in read_runs(tmp_path)]
    assert starts == [[first], [newest, resumed], [other]]


def test_a_start_that_died_at_its_first_line_costs_no_other(tmp_path):
    path, _ = write_start(tmp_path, steps=[1, 2])
    (tmp_path / "record-1.jsonl").write_text("")
    (tmp_path / "record-2.jsonl").write_text(path.read_text().split("\n")[0][:-5])
    (run,) = read_runs(tmp_path)
    assert [start.path for start in run.starts] == [path]


def write_broken(folder, batches, **numbers):
    """Record updates of these batches, the first in step 1 and so on."""
    record = Record(folder, BAPOConfig(), {"applied": False})
    for step, batch in enumerate(batches, start=1):
        record.write(*measure(batch, BAPOConfig()), step=step, **numbers)


def test_updates_that_are_not_finite_are_counted_and_left_out(tmp_path, monkeypatch, capsys):
    good, bad, none = make_tokens(1), make_tokens(2), make_tokens(3)
    bad[1][0] = float("-inf")  # the sums stay finite, since the log-ratio is clamped
    write_broken(tmp_path, [good, bad, (*none[:2], torch.zeros_like(none[2]), none[3]), good])
    (run,) = read_runs(tmp_path)
    assert (len(run.recorded), run.valid.tolist(), len(run.updates)) == (4, [True, False, True, True], 2)
    said = report_of(monkeypatch, capsys, tmp_path)
    assert f"{int(run.recorded['invalid_tokens'][1])} log-probs or advantages were not finite, in 1 of 4" in said
    assert "nan" not in said and "4 updates in 4 training steps (1 to 4)" in said
    share_without = none[3].sum() / (none[3].sum() + 2 * good[3].sum())
    assert f", none on {100 * share_without:.1f}%.\n" in said


FAULTS = ["a log-prob is NaN", "no old log-prob is usable", "the same weights give other ratios than 1", None]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_broken_numbers_gets_no_figures_of_bounds(tmp_path, monkeypatch, capsys, fault):
    old, log_prob, advantages, mask = make_tokens(2)
    if fault == "a log-prob is NaN":
        log_prob[0] = float("nan")
    elif fault == "no old log-prob is usable":  # as a kernel that returns log-probs above 0 gives them
        old = old + 4
    numbers = {"on_policy": 1} if fault == FAULTS[2] else {}
    write_broken(tmp_path, [(old, log_prob, advantages, mask)] * 10, **numbers)
    said, broken = report_of(monkeypatch, capsys, tmp_path), fault is not None
    assert ("the numbers cannot be used" in said) == broken == ("2. Does the run clip?" not in said)
    assert (tmp_path / "report.png").exists() != broken and not (broken and "_target_=" in said)


def report_of(monkeypatch, capsys, *arguments):
    """Run the command, and return what it prints."""
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    main()
    return capsys.readouterr().out


def test_a_longer_record_has_rows_of_steps_and_a_picture(tmp_path, monkeypatch, capsys):
    path, _ = write_start(tmp_path, steps=range(1, 11), updates=3)
    said = report_of(monkeypatch, capsys, path)
    assert "training steps 1 to 3 " in said and "training step 10 " in said
    sums = [update.stats.sums for update in read_updates(path)]
    unbounded = sum(one.unbounded_gradient.item() for one in sums) / sum(one.gradient.item() for one in sums)
    assert f"by the dual clip, made up {100 * unbounded:.1f}% of the gradient" in said and unbounded > 0.01
    assert said.endswith(f"Picture: {tmp_path / 'report.png'}\n")
    assert image.imread(tmp_path / "report.png").shape[0] > 800


def test_the_page_shows_the_report_of_the_record_in_this_repository(tmp_path, monkeypatch, capsys):
    """It has every number of a report, and every line that a run with another loss gets."""
    (shown,) = re.findall(r"^```text\n(docs/examples\n.*?)^```$", (ROOT / "docs/monitor.md").read_text(), re.M | re.S)
    monkeypatch.chdir(ROOT)
    said = report_of(monkeypatch, capsys, "docs/examples", "--out", tmp_path)
    assert said.replace(str(tmp_path / "report.png"), "report.png").strip() == shown.strip()


def test_several_runs_have_sections_and_a_picture_together(tmp_path, monkeypatch, capsys):
    for name, applied in (("grpo", False), ("bapo", True)):
        write_start(tmp_path / name, steps=[1, 2], applied=applied)
    said = report_of(monkeypatch, capsys, tmp_path / "grpo", tmp_path / "bapo", "--out", tmp_path)
    out = tmp_path / "report.png"
    assert said.endswith(f"Picture: {out}\n")
    assert said.index(f"{tmp_path / 'grpo'}\n") < said.index(f"{tmp_path / 'bapo'}\n")
    assert said.count("the run's loss, [0.8, 1.2]") == said.count("which clips ratios to [0.8, 1.2]") == 1
    assert "Would BAPO's bounds move?" in said and "Did BAPO's bounds move?" in said and out.exists()
    runs = {name: read_runs(tmp_path / name)[0] for name in ("grpo", "bapo")}
    assert clipped_by_loss(runs["bapo"], runs["bapo"].updates) == clipped_by_bounds(runs["bapo"].updates) != (0, 0)
    figure = picture(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["grpo", "bapo"]
    assert [len(axis.lines) for axis in figure.axes] == [3, 3, 4, 6, 6, 4]


def test_without_the_trainers_steps_calls_or_updates_are_counted(tmp_path):
    path, _ = write_start(tmp_path, steps=[None, None])
    unit, groups = read_runs(path)[0].by_step(4)
    assert (unit, [(first, len(updates)) for first, _, updates in groups]) == ("training call", [(1, 2), (2, 2)])
    path.write_text(path.read_text().replace('"call": 1, ', "", 1))
    unit, groups = read_runs(path)[0].by_step(4)
    assert (unit, [(first, len(updates)) for first, _, updates in groups]) == ("update", [(k, 1) for k in range(1, 5)])


def test_every_curve_shows_what_its_panel_says(tmp_path, monkeypatch):
    """With many steps, a point is a mean over neighbors."""
    write_start(tmp_path, steps=range(11, 16), config=BAPOConfig(0.57))
    (run,) = read_runs(tmp_path)
    assert picture_module.POINTS <= 500  # a panel is about as many pixels wide
    monkeypatch.setattr(picture_module, "POINTS", 2)  # 5 steps: 3 and 2
    positive, negative, position, rho, ends, targets = picture({"run": run}).axes
    of_steps, of_places = ([updates for *_, updates in groups] for groups in (run.by_step(2)[1], run.by_position(2)))
    assert list(rho.lines[0].get_xdata()) == [12, 14.5] and [len(updates) for updates in of_steps] == [6, 4]

    def means(name):
        return [fmean(updates[name].tolist()) for updates in of_steps]

    def shares(groups, sign, by_bapo=False):
        return [(clipped_by_bounds(updates) if by_bapo else clipped_by_loss(run, updates))[sign] for updates in groups]

    found = ends_of_search(run, "value")
    for axis, expected in (
        (positive, [shares(of_steps, 0), shares(of_steps, 0, by_bapo=True)]),
        (negative, [shares(of_steps, 1), shares(of_steps, 1, by_bapo=True)]),
        (position, [shares(of_places, 0), shares(of_places, 1)]),
        (rho, [means("positive_contribution_start"), means("positive_contribution_highest"), [0.57, 0.57]]),
        (ends, [means("met_at_start"), means("met_by_moving"), means("saturated")]),
        (targets, [[at_start for at_start, *_ in found.values()], [0, 1]]),
    ):
        assert [list(line.get_ydata()) for line in axis.lines] == expected
        assert expected[0] != expected[1]
    (band,) = targets.collections
    target, met = next((target, ends[0] + ends[1]) for target, ends in found.items() if ends[1] > 0)
    assert {y for x, y in band.get_paths()[0].vertices if x == target} == {found[target][0], met}


@pytest.mark.parametrize(
    "about, sentence",
    [
        (dict(own_clip=None), "The run's loss does not clip, or"),
        (dict(own_clip=OwnClip("clip", 0.9, 1.1, of="sequence ratio")), "the mean ratio of a response to [0.9, 1.1]"),
        (dict(own_clip=OwnClip("clip", -0.1, 0.1, of="probability")), "the run's loss, [-0.1, 0.1]"),
        (dict(own_clip=OwnClip("cap", 0.8, 1.2)), "A > 0 capped   A < 0 capped"),
        (dict(config=BAPOConfig(ratio_lower_max=0.7)), "not on the run's grid"),
        (dict(config=BAPOConfig(bound_scope="micro_batch"), applied=True), "clip is a mean over micro-batches"),
    ],
)
def test_other_losses_and_grids_are_told(tmp_path, monkeypatch, capsys, about, sentence):
    write_start(tmp_path, steps=range(1, 5), **about)
    assert sentence in report_of(monkeypatch, capsys, tmp_path)


def test_what_exact_bounds_cost_is_told(tmp_path, monkeypatch, capsys):
    costs = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    write_start(tmp_path, steps=range(1, 5), applied=True, updates=4, costs=costs)
    said = report_of(monkeypatch, capsys, tmp_path)
    assert re.search("25.0% of the updates made an extra forward pass, and 50.0% made .* about 1.57 times", said)


def failure_of(monkeypatch, capsys, *arguments):
    """Run the command, and return its line of error."""
    with pytest.raises(SystemExit) as ended:
        report_of(monkeypatch, capsys, *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("Error: ") and error.count("\n") == 1
    return error


def test_what_cannot_be_reported_is_named_in_a_line(tmp_path, monkeypatch, capsys):
    assert "holds no record-*.jsonl: train with record_dir=" in failure_of(monkeypatch, capsys, tmp_path)
    assert "/no/run: there is no such file" in failure_of(monkeypatch, capsys, "/no/run")
    record = tmp_path / "record-x.jsonl"
    record.write_text("x\n")
    assert f"Error: {record} is not a record" in failure_of(monkeypatch, capsys, tmp_path)
    path, _ = write_start(tmp_path / "run", steps=[1])
    record.write_text(path.read_text().splitlines()[0] + "\n")
    assert "holds no complete update yet" in failure_of(monkeypatch, capsys, tmp_path)


def test_the_lines_for_another_trainer_run(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/monitor.md").read_text(), re.M | re.S)
    assert code.count("/absolute/folder") == 1
    names = {}
    exec(code.replace("/absolute/folder", str(tmp_path)), names)
    for step in (1, 2):
        for update in (0, 1):
            batch = make_tokens(step, spread=0.5 * update)
            names["monitor"](list(zip(*(tensor.split(3) for tensor in batch), strict=True)), step, update)
    (run,) = read_runs(tmp_path)
    assert steps_of(run) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    expected = OwnClip("clip", 0.8, 1.28, 3.0)
    stats, _ = measure(batch, BAPOConfig(), expected)
    assert run.recorded["clipped_positive"][-1] == stats.sums.own_clipped_positive > 0
    said = report_of(monkeypatch, capsys, tmp_path)
    assert "trained with grpo, which clips ratios to [0.8, 1.28]" in said


def test_a_run_without_upper_bound_and_dual_clip_is_reported(tmp_path, monkeypatch, capsys):
    _, batches = write_start(tmp_path, steps=range(1, 5), own_clip=OwnClip("clip", 0.8, math.inf))
    _, negative = clipped_by(batches, lambda r, a: a < 0 and r < 0.8)
    said = report_of(monkeypatch, capsys, tmp_path)
    assert re.search(rf"all updates +0.0% +{100 * negative:.1f}%\n", said) and negative > 0.1
    assert re.search(rf"the run's loss, \[0.8, inf\] +0.0% +{100 * negative:.1f}% +- +-\n", said)
    assert "nan" not in said and "the record does not have it.\n" in said  # and nothing of a dual clip
