# SPDX-License-Identifier: Apache-2.0
"""The lines, the summary and the metrics files behind them."""

import json
import re

from recipe.bapo.launch.console import first_error, step_line, summary
from recipe.bapo.records import keep_earlier
from recipe.bapo.records.metrics import read_metrics


def record(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def step_data(step, reward):
    return {
        "training/global_step": step,
        "critic/rewards/mean": reward,
        "actor/bapo/positive_contribution_start": 0.4,
        "actor/bapo/positive_contribution": 0.5,
        "actor/bapo/met_at_once": 0.5,
        "actor/bapo/saturated": 0.2,
        "actor/bapo/clip_low": 0.7,
        "actor/bapo/clip_high": 1.5,
    }


def test_a_resumed_run_keeps_the_earlier_metrics(tmp_path):
    for steps in ((1, 2, 3), (3, 4)):
        path = keep_earlier(tmp_path / "metrics.jsonl")
        path.write_text("".join(record(step, **step_data(step, steps[0])) for step in steps))
    steps = read_metrics(tmp_path)
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    assert [data["critic/rewards/mean"] for _, data in steps] == [1, 1, 3, 3]


def test_the_validation_before_a_resumed_run_does_not_replace_the_step_of_its_checkpoint(tmp_path):
    validation = {"val-core/dice/reward/mean@4": 0.3}
    path = tmp_path / "metrics.jsonl"
    path.write_text(record(1, **step_data(1, 1)) + record(2, **step_data(2, 1)))
    keep_earlier(path).write_text(record(2, **validation) + record(3, **step_data(3, 3)))
    steps = dict(read_metrics(tmp_path))
    assert steps[2] == step_data(2, 1) | validation and sorted(steps) == [1, 2, 3]


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(record(1, a=1) + '{"step": 2, "da')
    assert read_metrics(tmp_path) == [(1, {"a": 1})]


def test_a_step_is_one_line_with_the_time_left():
    line = step_line(3, 10, {**step_data(3, 0.25), "timing_s/step": 6.0})
    shown = "step  3/10  reward 0.250  rho 0.400 -> 0.500  bounds [0.700, 1.500]  6.0 s  left 0:00:42"
    assert line == shown


def test_the_summary_says_before_and_after(tmp_path):
    lines = [record(step, **step_data(step, step / 10)) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    text = summary(tmp_path)
    assert "10 steps, mean of the first and the last 2" in text
    assert "0.150  ->    0.950" in text and "[0.700, 1.500]" in text and str(tmp_path) in text
    told = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.M))
    assert told["updates with the target already met"] == "50%"
    assert told["updates with the target met by moving bounds"] == "30%"  # the rest
    assert told["updates with the target out of reach"] == "20%"
    assert told["positive contribution (rho)"] == "0.400 before, 0.500 after the search"


def test_a_metric_that_was_not_finite_is_shown_as_nan(tmp_path):
    data = {**step_data(1, 0.5), "actor/grad_norm": None}
    (tmp_path / "metrics.jsonl").write_text(record(1, **data))
    ((_, read),) = read_metrics(tmp_path)
    assert "grad norm nan" in step_line(1, 2, read) and "nan" in summary(tmp_path)


def test_the_first_error_of_a_worker_is_found_in_the_log():
    log = """
ValueError: not a worker's
\x1b[36m(AgentLoopWorkerTQ pid=7)\x1b[0m ray.exceptions.RayTaskError(KeyError): \x1b[36mray::R.compute_score()
\x1b[36m(AgentLoopWorkerTQ pid=7, ip=10.0.0.2)\x1b[0m KeyError: 'no such answer'
\x1b[36m(AgentLoopWorkerTQ pid=7)\x1b[0m RuntimeError: a later one
"""
    assert first_error(log) == "KeyError: 'no such answer' (AgentLoopWorkerTQ)"
    of_vllm = "(vLLMHttpServer pid=7) (Worker pid=8) ERROR 11-21 09:33:51 [multiproc_executor.py:1047] "
    log = f"{of_vllm}    raise RuntimeError('no room')\n{of_vllm}RuntimeError: no room for these weights\n"
    assert first_error(log) == "RuntimeError: no room for these weights (vLLMHttpServer)"
    assert first_error("nothing went wrong") is None


def test_an_evaluation_shows_verls_means_and_their_spread(tmp_path):
    metrics = {
        "val-core/aime_2024/acc/mean@16": 0.25,
        "val-aux/aime_2024/acc/std@16": 0.4,
        "val-core/aime_2024/acc/best@16/mean": 0.6,
    }
    (tmp_path / "metrics.jsonl").write_text(record(0, **metrics))
    rows = [line.split() for line in summary(tmp_path).splitlines()[1:-1]]
    assert rows == [[name, f"{value:.4f}"] for name, value in metrics.items() if "best" not in name]
