# SPDX-License-Identifier: Apache-2.0
"""The report on records: its figures by their definitions, which starts make a run, and what the command prints."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from matplotlib import image
from support.oracle import contribution, ratios, response_tokens, sequential_search, share
from support.records import OWN_CLIP, make_tokens, measure, write_start

from bapo import BAPOConfig, find_clip_bounds
from recipe.bapo.own_clip import OwnClip
from recipe.bapo.record import Record
from recipe.bapo.report.__main__ import BOUNDS, TARGETS, main
from recipe.bapo.report.findings import clipped, ends_of_search, fixed_bounds, read_runs
from recipe.bapo.report.picture import picture

ROOT = Path(__file__).parents[2]
CONFIGS = [
    BAPOConfig(),
    BAPOConfig(0.37, token_weight="uniform", search_order="lower_first"),
    BAPOConfig(0.5, contribution="gradient", ratio_lower_max=0.8, ratio_lower_step=0.05, ratio_upper_max=2.0),
]


def steps_of(run):
    return [(update.numbers["step"], update.numbers["update"]) for update in run.recorded]


def clipped_by(batches, rule):
    """Count the tokens of each sign that a rule for ratio and advantage clips, one token at a time."""
    counts = {True: [0, 0], False: [0, 0]}
    for batch in batches:
        ratio, advantages, *_ = response_tokens(*batch)
        for r, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
            counts[a > 0][0] += rule(r, a)
            counts[a > 0][1] += 1
    return [share(*counts[positive]) for positive in (True, False)]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "uniform", "gradient"])
@pytest.mark.parametrize("measure_of", ["value", "gradient"])
def test_searches_for_every_target_are_those_of_the_literal_loop(tmp_path, config, measure_of):
    _, batches = write_start(tmp_path, steps=range(1, 5), config=config)
    (run,) = read_runs(tmp_path)
    found = ends_of_search(run, measure_of, [*TARGETS, 0.42])
    for target, ends in found.items():
        literal = torch.zeros(3)
        for batch in batches:
            searched = replace(config, positive_contribution_target=target, contribution=measure_of)
            *_, steps, saturated = sequential_search(*batch, searched, clip_ratio_c=3.0)
            literal[2 if saturated else min(steps, 1)] += 1
            bounds, _ = find_clip_bounds(*batch, searched, clip_ratio_c=3.0)
            assert [bounds.met_at_start, bounds.met_by_moving, bounds.saturated].index(True) == (
                2 if saturated else min(steps, 1)
            )
        assert ends == pytest.approx((literal / len(batches)).tolist())
    assert any(ends[1] > 0 for ends in found.values()) and any(ends[2] > 0 for ends in found.values())


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["default", "uniform"])
@pytest.mark.parametrize("low, high", BOUNDS)
def test_fixed_bounds_are_measured_by_their_definition(tmp_path, config, low, high):
    _, batches = write_start(tmp_path, steps=range(1, 5), config=config)
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

    assert clipped(run, run.updates, by_bapo=False) == pytest.approx(clipped_by(batches, rule))
    places = run.by_position()
    assert list(places) == [1, 2] and clipped(run, places[1], by_bapo=False) == (0, 0)
    assert clipped(run, places[2], by_bapo=False) == pytest.approx(clipped_by(batches[1::2], rule))
    unit, steps = run.by_step(run.updates)
    assert unit == "training step" and list(steps) == [1, 2, 3, 4]
    assert clipped(run, steps[3], by_bapo=False) == pytest.approx(clipped_by(batches[4:6], rule))


def test_in_a_bapo_run_the_loss_clips_by_the_bounds_it_used(tmp_path):
    _, batches = write_start(tmp_path, steps=range(1, 5), applied=True)
    (run,) = read_runs(tmp_path)
    counts = {True: [0.0, 0], False: [0.0, 0]}
    for batch in batches:
        low, high, *_ = sequential_search(*batch, BAPOConfig(), clip_ratio_c=3.0)
        advantages, ratio = batch[2][batch[3]], ratios(*batch[:2])[batch[3]].double()
        for positive, hit in ((True, ratio >= high), (False, ratio <= low)):
            of_sign = (advantages > 0) == positive
            counts[positive][0] += int((hit & of_sign).sum())
            counts[positive][1] += int(of_sign.sum())
    expected = [share(*counts[positive]) for positive in (True, False)]
    assert clipped(run, run.updates, by_bapo=False) == pytest.approx(expected)


def test_a_resumed_start_replaces_the_updates_from_its_step_on(tmp_path):
    made = [[1, 2, 3], [3, 4], [2, 3]]  # the third start goes on from the checkpoint of step 1
    paths = [write_start(tmp_path, steps)[0] for steps in made]
    (run,) = read_runs(tmp_path)
    assert steps_of(run) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [start.path for start in run.starts] == paths
    of_the_last = [any(update is one for one in run.starts[-1].updates) for update in run.recorded]
    assert of_the_last == [False] * 2 + [True] * 4


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


def test_a_resumed_start_finds_its_run_beside_another(tmp_path):
    write_start(tmp_path, steps=[1, 2])
    write_start(tmp_path, steps=[1, 2], loss_mode="cispo")
    write_start(tmp_path, steps=[2, 3])
    assert [len(run.starts) for run in read_runs(tmp_path)] == [2, 1]


def test_a_start_that_died_at_its_first_line_costs_no_other(tmp_path):
    path, _ = write_start(tmp_path, steps=[1, 2])
    (tmp_path / "record-1.jsonl").write_text("")
    (tmp_path / "record-2.jsonl").write_text(path.read_text().split("\n")[0][:-5])
    (run,) = read_runs(tmp_path)
    assert [start.path for start in run.starts] == [path]


def write_broken(folder, batches):
    """Record updates of these batches, the first in step 1 and so on."""
    record = Record(folder, BAPOConfig(), {"applied": False})
    for step, batch in enumerate(batches, start=1):
        record.write(*measure(batch, BAPOConfig()), step=step)


def test_updates_that_are_not_finite_are_counted_and_left_out(tmp_path, monkeypatch, capsys):
    good, bad, none = make_tokens(1), make_tokens(2), make_tokens(3)
    bad[1][0] = float("-inf")  # the sums stay finite, since the log-ratio is clamped
    write_broken(tmp_path, [good, bad, (*none[:2], torch.zeros_like(none[2]), none[3]), good])
    (run,) = read_runs(tmp_path)
    assert (len(run.recorded), len(run.invalid), len(run.updates)) == (4, 1, 2)
    said = report_of(monkeypatch, capsys, tmp_path)
    assert "1 of the 4 updates could not be measured, because log-probs or advantages were not finite" in said
    assert f"{int(run.invalid[0].values['invalid_tokens'])} log-probs or advantages in this run were not" in said
    assert "nan" not in said and "4 updates in 4 training steps (1 to 4)" in said


def test_a_run_without_any_usable_update_gets_the_advice_alone(tmp_path, monkeypatch, capsys):
    bad = make_tokens(2)
    bad[1][0] = float("nan")
    write_broken(tmp_path, [bad])
    said = report_of(monkeypatch, capsys, tmp_path)
    assert "4. What next?\n  In this run no update could be measured." in said and "1. Does" not in said
    assert not (tmp_path / "report.png").exists()


def report_of(monkeypatch, capsys, *arguments):
    """Run the command, and return what it prints."""
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    main()
    return capsys.readouterr().out


def test_the_command_answers_the_four_questions(tmp_path, monkeypatch, capsys):
    path, _ = write_start(tmp_path, steps=range(1, 11), updates=3)
    said = report_of(monkeypatch, capsys, path)
    assert said.startswith(
        f"{path}\n  30 updates in 10 training steps (1 to 10); trained with vanilla, which clips ratios to [0.8, 1.2]; "
        "BAPO only monitored.\n"
    )
    (run,) = read_runs(path)
    positive, negative = clipped(run, run.updates, by_bapo=False)
    assert re.search(rf"all updates +{100 * positive:.1f}% +{100 * negative:.1f}%\n", said)
    assert re.search(r"update 1 on a rollout batch +0.0% +0.0%\n", said) and "training steps 10 to 10" not in said
    assert "training steps 1 to 3 " in said and "training step 10 " in said
    ends = ends_of_search(run, "value", [0.4])[0.4]
    at_start, moved, saturated = (f"{100 * end:.1f}%" for end in ends)
    assert f"the target 0.4: met at the start in {at_start} of the updates, met by moving bounds in {moved}, " in said
    assert re.search(rf"target 0.4 \(searched for\) +{at_start} +{moved} +{saturated}\n", said)
    assert said.index("contribution=value") < said.index("contribution=gradient")
    found = fixed_bounds(run, 0.8, 3.0)
    rho = rf"{found.rho['value']:.3f} +{found.rho['gradient']:.3f}"
    row = rf"\[0.8, 3\] +{100 * found.positive:.1f}% +{100 * found.negative:.1f}% +{rho}\n"
    assert re.search(row, said)
    assert "policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig\n" in said
    assert said.endswith(f"Picture: {tmp_path / 'report.png'}\n")
    assert image.imread(tmp_path / "report.png").shape[0] > 800


def test_several_runs_have_sections_and_a_picture_together(tmp_path, monkeypatch, capsys):
    for name, applied in (("grpo", False), ("bapo", True)):
        write_start(tmp_path / name, steps=[1, 2], applied=applied)
    said = report_of(monkeypatch, capsys, tmp_path / "grpo", tmp_path / "bapo", "--out", tmp_path)
    out = tmp_path / "report.png"
    assert said.endswith(f"Picture: {out}\n")
    assert said.index(f"{tmp_path / 'grpo'}\n") < said.index(f"{tmp_path / 'bapo'}\n")
    assert "Would BAPO's bounds move?" in said and "Did BAPO's bounds move?" in said and out.exists()
    figure = picture({name: read_runs(tmp_path / name)[0] for name in ("grpo", "bapo")})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["grpo", "bapo"]
    assert [len(axis.lines) for axis in figure.axes] == [3, 3, 4, 6, 4, 4]


@pytest.mark.parametrize(
    "about, sentence",
    [
        (dict(own_clip=None), "The run's loss does not clip by the ratio of a token"),
        (dict(own_clip=OwnClip("cap", 0.8, 1.2)), "A > 0 capped   A < 0 capped"),
        (dict(own_clip=OwnClip("clip", 0.8, 1.28)), "the run's loss, [0.8, 1.28]"),
        (dict(config=BAPOConfig(ratio_lower_max=0.7)), "not on the run's grid"),
        (dict(config=BAPOConfig(bound_scope="micro_batch"), applied=True), "clip is a mean over micro-batches"),
    ],
)
def test_other_losses_and_grids_are_told(tmp_path, monkeypatch, capsys, about, sentence):
    write_start(tmp_path, steps=range(1, 5), **about)
    assert sentence in report_of(monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("applied, made", [(True, "made"), (False, "would have made")])
def test_what_exact_bounds_cost_is_told(tmp_path, monkeypatch, capsys, applied, made):
    write_start(
        tmp_path, steps=range(1, 5), applied=applied, updates=4, costs=[(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    )
    assert (
        f"To find exact bounds, 25.0% of the updates {made} an extra forward pass, and 25.0% {made} their forwards and "
        "backwards twice: about 1.32 times the time of an update."
    ) in report_of(monkeypatch, capsys, tmp_path)


def failure_of(monkeypatch, capsys, *arguments):
    """Run the command, and return its line of error."""
    with pytest.raises(SystemExit) as ended:
        report_of(monkeypatch, capsys, *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("Error: ") and error.count("\n") == 1
    return error


def test_what_cannot_be_reported_is_named_in_a_line(tmp_path, monkeypatch, capsys):
    assert "holds no record-*.jsonl: train with record_dir=" in failure_of(monkeypatch, capsys, tmp_path)
    assert "No such file or directory: '/no/run'" in failure_of(monkeypatch, capsys, "/no/run")
    (tmp_path / "record-x.jsonl").write_text("x\n")
    assert "record-x.jsonl is not a record of this version" in failure_of(monkeypatch, capsys, tmp_path)
    (tmp_path / "record-x.jsonl").write_bytes(b"\xff\n")
    assert "record-x.jsonl is not a record of this version" in failure_of(monkeypatch, capsys, tmp_path)
    path, _ = write_start(tmp_path / "run", steps=[1])
    (tmp_path / "run" / "record-y.jsonl").write_text(path.read_text().splitlines()[0] + "\n")
    assert "report.png" in report_of(monkeypatch, capsys, tmp_path / "run")
    path.unlink()
    assert "holds no complete update yet" in failure_of(monkeypatch, capsys, tmp_path / "run")


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
    assert run.recorded[-1].stats.sums.own_clipped_positive == stats.sums.own_clipped_positive > 0
    said = report_of(monkeypatch, capsys, tmp_path)
    assert "trained with grpo, which clips ratios to [0.8, 1.28]" in said


def test_the_advice_knows_what_the_loss_of_another_trainer_clips(tmp_path, monkeypatch, capsys):
    record = Record(tmp_path, BAPOConfig(), {"own_clip": vars(OWN_CLIP)})
    old, _, advantages, mask = make_tokens(1)
    stats, values = measure((old, old, advantages.abs(), mask), BAPOConfig())
    record.write(stats, values)
    assert "In this run the loss clipped 0.00% of the tokens with A > 0" in report_of(monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("module", ["recipe.bapo.report.__main__", "recipe.bapo.record", "recipe.bapo.own_clip"])
def test_report_and_record_need_no_framework(module):
    code = f"import sys, {module}; print([m for m in ('verl', 'ray', 'hydra', 'tensordict') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
