# SPDX-License-Identifier: Apache-2.0
"""What the report reads from a log of verl's, what it says of it, and what it refuses.

Written lines have the shape of verl 0.4 to 0.9 with Ray; no run stands behind them. test_example.py reads a real one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.bapo.report import __main__ as command
from recipe.bapo.report.log_report import report_on_log, verdict
from recipe.bapo.report.logs import read_log

ROOT = Path(__file__).parents[2]
OWN = [f"actor__bapo__own_clipfrac_{sign}" for sign in ("positive", "negative")]
OUTCOMES = [f"actor__bapo__{name}" for name in ("met_at_start", "met_by_moving", "saturated")]
PREFIX = "\x1b[36m(TaskRunner pid=4711, ip=10.0.0.2)\x1b[0m "


def metrics(clipped, **more):
    known = {"actor/entropy": 0.5, "actor/pg_clipfrac": clipped, "actor/grad_norm": 0.25}
    ends = {"critic/advantages/max": 1.5, "critic/advantages/min": -1.0, "response_length/mean": 100.0}
    return known | ends | {name.replace("__", "/"): value for name, value in more.items()} | {"perf/throughput": 9.5}


def console(steps, form="{}", prefix=PREFIX):
    lines = []
    for step, values in steps:
        lines.append(f"{prefix}step:{step} - " + " - ".join(f"{k}:{form.format(v)}" for k, v in values.items()))
    return "\n".join(["Starting", *lines, "Training Progress:   3%|▎   | 3/100 [00:49<1:53:43, 49.09s/it]", ""])


def write(tmp_path, text, name="train.log"):
    path = tmp_path / name
    path.write_text(text)
    return path


STEPS = [(step, metrics(0.01 * step)) for step in (1, 2, 3)]


def as_csv(steps, column="_step", name="{}"):
    names = list(steps[0][1])
    rows = [",".join([column, *(name.format(one) for one in names)])]
    return "\n".join(rows + [",".join([str(step), *(str(values[one]) for one in names)]) for step, values in steps])


RANGES = {f"actor/entropy{end}": 9.0 for end in ("__MIN", "__MAX")}  # beside each metric of a chart
WITH_RANGE = [(step, values | RANGES) for step, values in STEPS]


@pytest.mark.parametrize(
    "text, name",
    [
        (console(STEPS), "train.log"),
        (console(STEPS, "np.float64({})"), "train.log"),
        (console(STEPS, prefix=""), "train.log"),
        (console(STEPS).replace(" - ", "\n - "), "train.log"),  # as pages break it up
        (console(STEPS).replace("\n", "\r\n"), "train.log"),
        (console(STEPS).replace("actor/entropy", "\x1b[01;31mactor/entropy\x1b[0m"), "train.log"),  # grep --color
        ("".join(json.dumps({"step": s, "data": data}) + "\n" for s, data in STEPS), "metrics.jsonl"),
        (as_csv(STEPS), "history.csv"),
        (as_csv(STEPS, "Step", "my run - {}"), "chart.csv"),
        (as_csv(WITH_RANGE, "Step", "my run - {}"), "chart.csv"),
    ],
)
def test_each_form_gives_the_same_steps(tmp_path, text, name):
    log = read_log(write(tmp_path, text, name))
    found = [(step, {key: values[key] for key in metrics(0) if key.startswith("actor/")}) for step, values in log.steps]
    assert found == [
        (step, {key: v for key, v in values.items() if key.startswith("actor/")}) for step, values in STEPS
    ]
    assert log.unread == 0 and log.restarts == 0


def test_a_validation_is_no_step(tmp_path):
    text = "step:0 - val-core/aime/acc/mean@1:0.1\n" + console(STEPS) + "step:3 - val-core/aime/acc/mean@1:0.2\n"
    assert [step for step, _ in read_log(write(tmp_path, text)).steps] == [1, 2, 3]


def test_a_restart_replaces_its_steps_and_a_new_run_all(tmp_path):
    again = [(step, metrics(0.5)) for step in (2, 3, 4)]
    log = read_log(write(tmp_path, console(STEPS) + console(again)))
    assert [values["actor/pg_clipfrac"] for _, values in log.steps] == [0.01, 0.5, 0.5, 0.5] and log.restarts == 1
    other = read_log(write(tmp_path, console(STEPS) + console([(1, metrics(0.7))])))
    assert [(step, values["actor/pg_clipfrac"]) for step, values in other.steps] == [(1, 0.7)]


def test_a_line_that_a_terminal_broke_inside_an_item_is_joined(tmp_path):
    text = console(STEPS[:1]).replace("actor/entropy", "actor\n/entropy").replace("mean:100.0", "mean:10\n0.0")
    ((_, values),) = read_log(write(tmp_path, text)).steps
    assert values["actor/entropy"] == 0.5 and values["response_length/mean"] == 100 and "perf/throughput" in values


def test_lines_of_a_notebook_and_of_validations_do_not_count_as_cut(tmp_path):
    text = console(STEPS).replace("perf/throughput:9.5\n", 'perf/throughput:9.5\\n",\n')
    text += (
        "step:4 - val/test_score/x:0.5\nstep:5 - val/test_score/x:0.5\nstep:6 - train/loss:0.5\nstep:7 - train/loss:1\n"
    )
    log = read_log(write(tmp_path, text))
    assert [step for step, _ in log.steps] == [1, 2, 3] and log.unread == 0


def test_a_text_among_the_numbers_of_the_file_logger_is_passed_over(tmp_path):
    line = json.dumps({"step": 1, "data": metrics(0.1) | {"resize/mode": "schedule", "actor/pg_loss": None}})
    log = read_log(write(tmp_path, line + "\n", "metrics.jsonl"))
    assert log.values("actor/pg_clipfrac") == [(1, 0.1)] and log.unread == 0
    assert "actor/pg_loss was not finite in 1 step, first in step 1" in " ".join(verdict(log))


def test_a_cut_line_gives_no_cut_number(tmp_path):
    whole = console(STEPS)
    cut = whole[: whole.index("actor/grad_norm:0.25", whole.index("step:3")) + len("actor/grad_norm:0.2")]
    log = read_log(write(tmp_path, cut))
    assert "actor/grad_norm" not in log.steps[-1][1] and log.steps[-1][1]["actor/pg_clipfrac"] == 0.03
    assert log.unread == 1 and "Values or lines that could not be read: 1." in "\n".join(report_on_log("x", log))


@pytest.mark.parametrize(
    "steps, said",
    [
        ([(1, metrics(0.00001)), (2, metrics(9e-5))], "The loss clipped at most 9e-05 of the response tokens in any"),
        ([(1, metrics(0.00001)), (2, metrics(2e-4))], "The loss clipped 0.011% of the response tokens (median of"),
        (
            [(1, metrics(0.0, actor__grad_norm="nan")), (2, metrics(0.0))],
            "not finite in 1 step, first in step 1. Find",
        ),
        ([(1, metrics(0.1, critic__advantages__min=0.5))], "No token had A < 0. With"),
        ([(1, metrics(0.1, critic__advantages__max=0.0, critic__advantages__min=0.0))], "In 1 of 1 steps no response"),
        ([(1, metrics(0.1, actor__bapo__zero_advantage_fraction=0.4))], "40.0% of the response tokens had no adv"),
        ([(1, metrics(0.1) | {"actor/distillation/loss": 1.0})], "This run distils"),
        (
            [(1, metrics(0.1, **dict.fromkeys(OWN, 0.0005)))],
            "The loss clipped 0.05% of the tokens with A > 0 and 0.05% with A < 0. Hardly any bound matters",
        ),
        (
            [(1, metrics(0.1, **dict(zip(OUTCOMES, (0.2, 0.5, 0.3), strict=True))))],
            "BAPO's target would be met at the start in 20%, by moving bounds in 50%, saturated in 30%",
        ),
    ],
)
def test_the_verdict_follows_the_order_of_the_advice(tmp_path, steps, said):
    assert said in " ".join(verdict(read_log(write(tmp_path, console(steps)))))


def test_only_vanillas_clip_fraction_is_judged(tmp_path):
    for config in (
        "{'policy_loss': {'_target_': 'x', 'loss_mode': 'gspo'}, 'distillation_loss': {'loss_mode': 'k1'}}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    ):
        log = read_log(write(tmp_path, f"{config}\n{console([(1, metrics(0.0))])}"))
        assert "With loss_mode=gspo actor/pg_clipfrac means something else" in " ".join(verdict(log))
    assert "verl's default is assumed" in "\n".join(report_on_log("x", read_log(write(tmp_path, console(STEPS)))))


def test_three_decimals_do_not_show_that_nothing_is_clipped(tmp_path):
    log = read_log(write(tmp_path, console([(1, metrics(0.0)), (2, metrics(0.0))], "{:.3f}")))
    assert "have three decimals, so a share of clipped tokens below 0.0005" in " ".join(verdict(log))


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x7fELF\0\0", "is a binary file"),
        (b"{'loss': 0.1, 'clip_ratio/low_mean': 0.0, 'epoch': 0.1}\n", "has no training step of verl's"),  # TRL
        (b'{"step": 1, "data": {"val-core/a/acc/mean@1": 0.5}}\n', "has no training step of verl's"),
        (b"Step,a - actor/entropy,b - actor/entropy\n1,2,3\n", "has 2 columns of actor/entropy: export one run alone"),
    ],
)
def test_what_is_no_log_of_verls_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, content, said):
    path = tmp_path / ("chart.csv" if b"Step," in content else "train.log")
    path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["report", str(path)])
    with pytest.raises(SystemExit) as end:
        command.main()
    error = capsys.readouterr().err
    assert end.value.code == 1 and said in error and error.count("\n") == 1


def test_a_record_is_known_by_its_first_line_and_a_monitored_log_asks_for_no_monitor(tmp_path):
    (record,) = (ROOT / "docs/examples").glob("*.jsonl")
    renamed = write(tmp_path, record.read_text().partition("\n")[0] + "\n", "grpo.jsonl")
    assert command._log_of(renamed) is None and command._log_of(write(tmp_path, console(STEPS))) is not None
    watched = [(1, metrics(0.1, actor__bapo__applied=0.0))]
    for steps, asks in ((STEPS, True), (watched, False)):
        lines = report_on_log("x", read_log(write(tmp_path, console(steps))))
        assert ("MonitorConfig" in "\n".join(lines)) == asks


def test_a_log_needs_neither_torch_nor_verl(tmp_path):
    path = write(tmp_path, console(STEPS))
    block = "import sys; sys.modules.update(torch=None, verl=None, numpy=None)"
    code = f"{block}; sys.argv[1:] = [{str(path)!r}]; from recipe.bapo.report.__main__ import main; main()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "3 training steps, 1 to 3." in run.stdout, run.stderr
