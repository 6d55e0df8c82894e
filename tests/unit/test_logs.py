# SPDX-License-Identifier: Apache-2.0
"""What the report reads from a log of verl's, what it says of it, and what it refuses.

Written lines have the shape of verl 0.4 to 0.9 with Ray; no run stands behind them. test_example.py reads a real one.
"""

import json
import subprocess
import sys

import pytest
from support.commands import ROOT

from recipe.bapo.report import __main__ as command
from recipe.bapo.report.log_report import clips_hardly, report_on_log
from recipe.bapo.report.logs import read_log

PREFIX = "\x1b[36m(TaskRunner pid=4711, ip=10.0.0.2)\x1b[0m "


def metrics(clipped, more=()):
    known = {"actor/entropy": 0.5, "actor/pg_clipfrac": clipped, "actor/grad_norm": 0.25, "response_length/mean": 100.0}
    return known | dict(more) | {"perf/throughput": 9.5}


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
    assert [step for step, _ in log.steps] == [1, 2, 3] and log.unread == 0 and log.restarts == 0
    for key in ("actor/entropy", "actor/pg_clipfrac", "actor/grad_norm"):
        assert log.values(key) == [(step, values[key]) for step, values in STEPS]


def test_a_restart_replaces_its_steps_and_a_new_run_all(tmp_path):
    again = [(step, metrics(0.5)) for step in (2, 3, 4)]
    log = read_log(write(tmp_path, console(STEPS) + console(again)))
    assert [values["actor/pg_clipfrac"] for _, values in log.steps] == [0.01, 0.5, 0.5, 0.5] and log.restarts == 1
    other = read_log(write(tmp_path, console(STEPS) + console([(1, metrics(0.7))])))
    assert [(step, values["actor/pg_clipfrac"]) for step, values in other.steps] == [(1, 0.7)]


def test_a_step_that_is_logged_in_two_lines_is_no_restart(tmp_path):
    log = read_log(write(tmp_path, console(STEPS) + console([(3, {"critic/rewards/mean": 0.5, "perf/throughput": 1})])))
    assert log.restarts == 0 and log.steps[-1][1].keys() > {"critic/rewards/mean", "actor/pg_clipfrac"}


def test_a_line_that_a_terminal_broke_inside_an_item_is_joined(tmp_path):
    text = console(STEPS[:1]).replace("actor/entropy", "actor\n/entropy").replace("mean:100.0", "mean:10\n0.0")
    ((_, values),) = read_log(write(tmp_path, text)).steps
    assert values["actor/entropy"] == 0.5 and values["response_length/mean"] == 100 and "perf/throughput" in values


def test_lines_of_a_notebook_and_of_validations_do_not_count_as_cut(tmp_path):
    text = console(STEPS).replace("perf/throughput:9.5\n", 'perf/throughput:9.5\\n",\n')
    others = [f"step:{step} - val-core/aime/acc/mean@1:0.5\n" for step in (0, 3, 4, 5, 6)]
    log = read_log(write(tmp_path, others[0] + text + "".join(others[1:])))
    assert [step for step, _ in log.steps] == [1, 2, 3] and log.unread == 0


def test_a_text_among_the_numbers_of_the_file_logger_is_passed_over(tmp_path):
    line = json.dumps({"step": 1, "data": metrics(0.1) | {"resize/mode": "schedule", "actor/pg_loss": None}})
    log = read_log(write(tmp_path, line + "\n", "metrics.jsonl"))
    assert log.values("actor/pg_clipfrac") == [(1, 0.1)] and log.unread == 0
    assert row_of(log, "loss") == ["-", "-", "-", "-", "1"]


def test_a_cut_line_gives_no_cut_number(tmp_path):
    whole = console(STEPS)
    cut = whole[: whole.index("actor/grad_norm:0.25", whole.index("step:3")) + len("actor/grad_norm:0.2")]
    log = read_log(write(tmp_path, cut))
    assert "actor/grad_norm" not in log.steps[-1][1] and log.steps[-1][1]["actor/pg_clipfrac"] == 0.03
    assert log.unread == 1 and "could not be read: 1." in "\n".join(report_on_log("x", log))


def row_of(log, label):
    """Return the cells of a row of the report; None if it has no such row."""
    rows = [line.split(f"  {label}  ", 1) for line in report_on_log("x", log)]
    return next((row[1].split() for row in rows if len(row) == 2 and not row[0].strip()), None)


def test_each_metric_has_its_first_its_last_and_its_extremes(tmp_path):
    found = [0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.9, 0.3, 0.3, 0.1]
    labels = {
        "dual clip": "actor/pg_clipfrac_lower",
        "cut responses": "response_length/clip_ratio",
        "rollout-training mismatch": "training/rollout_probs_diff_mean",
        "BAPO: met at the start": "actor/bapo/met_at_start",
        "clipped of A > 0": "actor/bapo/own_clipfrac_positive",
        "clipped of A < 0": "actor/bapo/own_capfrac_negative",
    }
    steps = [(k, metrics(value, dict.fromkeys(labels.values(), value))) for k, value in enumerate(found, start=1)]
    steps[3][1]["actor/grad_norm"] = float("nan")
    log = read_log(write(tmp_path, console(steps)))
    for label in ("clip fraction", *labels):
        assert row_of(log, label) == ["0.3", "0.2", "0.1", "2", "0.9", "7"], label
    assert row_of(log, "gradient norm") == ["0.25", "0.25", "0.25", "0.25", "1"]
    assert row_of(log, "reward") is None


@pytest.mark.parametrize(
    "clipped, dual_clipped, hardly",
    [
        ([0.00001, 9e-5], [0.0, 0.0], True),
        ([0.00001, 1.1e-4, 0.00001], [0.0] * 3, False),  # every step counts, not most
        ([0.00003, 0.00003], [0.00001, 0.02], False),  # so does the dual clip
        ([0.00003, float("nan")], [0.0, 0.0], False),
    ],
)
def test_a_loss_clips_hardly_anything_only_if_no_step_clips_more(tmp_path, clipped, dual_clipped, hardly):
    pairs = zip(clipped, dual_clipped, strict=True)
    steps = [(step, metrics(one, {"actor/pg_clipfrac_lower": dual})) for step, (one, dual) in enumerate(pairs, start=1)]
    log = read_log(write(tmp_path, console(steps)))
    assert bool(clips_hardly(log)) == hardly
    assert not hardly or "at most 0.009% of the response tokens" in clips_hardly(log)


SMALL = [(1, metrics(1e-5)), (2, metrics(2e-5))]
CONFIGS = {  # the forms in which verl prints its config, or a shell the command
    "python": "{{'actor': {{'policy_loss': {{'_target_': 'x',\n{prefix}   'loss_mode': '{mode}'}}, 'entropy': 0}}, "
    "'distillation_loss': {{'loss_mode': 'k1'}}}}",
    "yaml": "actor:\n  policy_loss:\n    _target_: x\n    loss_mode: {mode}\n    ppo_kl_coef: 0.1\n"
    "  distillation_loss:\n    loss_mode: k1",
    "yaml, prefixed": "{prefix}  policy_loss:\n{prefix}    loss_mode: {mode}\n"
    "{prefix}  distillation_loss:\n{prefix}    loss_mode: k1",
    "command": "+ python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode={mode} a=b",
}


@pytest.mark.parametrize("form", CONFIGS)
def test_the_loss_is_the_one_of_the_config_that_the_log_prints(tmp_path, form):
    for mode in ("gspo", "vanilla"):
        config = CONFIGS[form].format(mode=mode, prefix="(TaskRunner pid=1) ")
        log = read_log(write(tmp_path, f"{config}\n{console(SMALL)}"))
        assert log.modes == {1: mode, 2: mode} and f"\n  loss_mode={mode}" in "\n".join(report_on_log("x", log))
        assert bool(clips_hardly(log)) == (mode == "vanilla") and "default" not in clips_hardly(log)


def test_what_our_worker_says_is_no_config(tmp_path):
    said = "(WorkerDict pid=3) BAPO: ... actor_rollout_ref.actor.policy_loss.loss_mode=bapo"
    config = CONFIGS["python"].format(mode="vanilla", prefix="")
    log = read_log(write(tmp_path, f"{config}\n{console(SMALL[:1])}\n{said}\n{console(SMALL[1:])}"))
    assert log.modes == {1: "vanilla", 2: "vanilla"}


def test_a_run_that_was_resumed_with_another_loss_has_both(tmp_path):
    first, second = (CONFIGS["yaml"].format(mode=mode) for mode in ("gspo", "vanilla"))
    log = read_log(write(tmp_path, f"{first}\n{console(SMALL[:1])}\n{second}\n{console(SMALL[1:])}"))
    assert log.modes == {1: "gspo", 2: "vanilla"} and not clips_hardly(log)
    assert "  loss_mode=gspo from step 1 on, vanilla from step 2 on" in "\n".join(report_on_log("x", log))


def test_a_run_with_bapo_is_known_by_its_metrics(tmp_path):
    line = json.dumps({"step": 1, "data": metrics(1e-5, {"actor/bapo/applied": 1.0})})
    log = read_log(write(tmp_path, line + "\n", "metrics.jsonl"))
    assert log.modes == {1: "bapo"} and not clips_hardly(log)


def test_distillation_and_rounded_values_show_nothing_of_the_loss(tmp_path):
    distilled = [(step, values | {"actor/distillation/loss": 1.0}) for step, values in SMALL]
    assert not clips_hardly(read_log(write(tmp_path, console(distilled))))
    assert not clips_hardly(read_log(write(tmp_path, console([(1, metrics(0.0)), (2, metrics(0.0))], "{:.3f}"))))


def test_a_history_of_wandb_keeps_lengths_and_probabilities(tmp_path):
    more = {"response_length/clip_ratio": 0.7, "training/rollout_probs_diff_mean": 0.9, "val-core/x/acc": 0.1}
    log = read_log(write(tmp_path, as_csv([(step, values | more) for step, values in STEPS]), "history.csv"))
    assert row_of(log, "cut responses")[0] == "0.7" and row_of(log, "rollout-training mismatch")[0] == "0.9"


@pytest.mark.parametrize("step", ["Infinity", "NaN", "1" + "0" * 400, "null", '"x"'])
def test_a_step_that_is_no_number_is_left_out(tmp_path, step):
    lines = [json.dumps({"step": number, "data": values}) for number, values in STEPS]
    text = "\n".join([lines[0].replace('"step": 1', f'"step": {step}'), *lines[1:], ""])
    log = read_log(write(tmp_path, text, "metrics.jsonl"))
    assert [number for number, _ in log.steps] == [2, 3] and log.unread == 1
    rows = as_csv([(step.strip('"').replace("null", ""), STEPS[0][1]), *STEPS[1:]])
    assert [number for number, _ in read_log(write(tmp_path, rows, "history.csv")).steps] == [2, 3]


def test_a_column_of_long_texts_is_no_obstacle(tmp_path):
    steps = [(step, values | {"val/generations": "x" * 200_000}) for step, values in STEPS]
    assert len(read_log(write(tmp_path, as_csv(steps), "history.csv")).steps) == 3


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
    assert command._log_of(renamed) is None
    watched = [(1, metrics(0.1, {"actor/bapo/applied": 0.0}))]
    for steps, asks in ((STEPS, True), (watched, False)):
        lines = report_on_log("x", read_log(write(tmp_path, console(steps))))
        assert ("MonitorConfig" in "\n".join(lines)) == asks


def test_a_log_needs_neither_torch_nor_verl(tmp_path):
    path = write(tmp_path, console(STEPS))
    block = "import sys; sys.modules.update(torch=None, verl=None, numpy=None)"
    code = f"{block}; sys.argv[1:] = [{str(path)!r}]; from recipe.bapo.report.__main__ import main; main()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "3 training steps, 1 to 3." in run.stdout, run.stderr
