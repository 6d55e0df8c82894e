# SPDX-License-Identifier: Apache-2.0
"""What a run prints for its user (lines, warnings, the summary), and the metrics files from which it is read."""

import json
import re

import pytest

from recipe.bapo.host.files import keep_earlier
from recipe.bapo.host.metrics import read_metrics
from recipe.bapo.run import console
from recipe.bapo.run.console import StepPrinter, first_error, step_line, summary


def record(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def step_data(step, reward):
    return {
        "training/global_step": step,
        "critic/rewards/mean": reward,
        "actor/bapo/positive_contribution_start": 0.4,
        "actor/bapo/positive_contribution": 0.5,
        "actor/bapo/met_at_start": 0.5,
        "actor/bapo/met_by_moving": 0.3,
        "actor/bapo/saturated": 0.2,
        "actor/bapo/clip_low": 0.7,
        "actor/bapo/clip_high": 1.5,
    }


def test_a_step_that_lost_responses_or_trained_nothing_is_warned_of_once(tmp_path, capsys):
    lost, still = {"training/responses_arrived": 0.75}, {"actor/grad_norm": 0.0, "critic/advantages/max": 1.0}
    (tmp_path / "train.log").write_text("(AgentLoopWorkerTQ pid=7) ValueError: no number in the answer\n")
    steps = [record(1, **step_data(1, 0)), record(2, **step_data(2, 0) | lost), record(3, **step_data(3, 0) | lost)]
    steps += [record(4, **step_data(4, 0) | {"actor/grad_norm": 0.0}), record(5, **step_data(5, 0) | still)]
    (tmp_path / "metrics.jsonl").write_text("".join(steps))
    StepPrinter(tmp_path, tmp_path / "train.log", 5).print_new()
    lost, still = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning: ")]
    assert "in step 2 75% of the responses arrived" in lost and "in step 5 the gradient norm was 0" in still
    assert "ValueError: no number in the answer (AgentLoopWorkerTQ)" in lost


def test_a_failed_response_is_warned_of_before_any_step(tmp_path, capsys):
    """In verl's asynchronous modes no step ends if every response fails. The log may be in another folder."""
    log = tmp_path / "logs.txt"
    printer = StepPrinter(tmp_path / "run", log, 5)
    for uid in ("a", "b"):
        with open(log, "a") as out:
            out.write(f"(AgentLoopWorkerTQ pid=7) Error in _run_prompt for uid={uid}\n")
        printer.print_new()
        with open(log, "a") as out:
            out.write(f"(AgentLoopWorkerTQ pid=7) ValueError: no number in answer {uid}\n")
        printer.print_new()
    (warning,) = capsys.readouterr().out.splitlines()
    assert "a response failed" in warning and "ValueError: no number in answer a (AgentLoopWorkerTQ)" in warning


def test_the_summary_shows_the_same_prompts_before_and_after(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(record(1, **step_data(1, 0.5)))
    folder = tmp_path / "validation"
    folder.mkdir()
    rows = [{"input": f"item {number}\n", "output": "17+42=59\u202842+26=68\n", "score": 0.0} for number in range(5)]
    (folder / "0.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))  # as verl
    assert "before" not in summary(tmp_path).partition("bounds on the ratio")[2]  # a single validation has no "after"
    # verl lists answers in the order in which they ended. Step 10 comes after step 9.
    for step, output in ((9, "wrong"), (10, "20+35=55")):
        later = [{**row, "output": output, "score": 1.0} for row in reversed(rows)]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in later))
    shown = summary(tmp_path).partition("before and after:\n")[2].splitlines()
    assert shown[:3] == [
        "  item 0",
        "    before  17+42=59, 42+26=68  (reward 0)",
        "    after   20+35=55  (reward 1)",
    ]
    assert [line for line in shown if "item" in line] == ["  item 0", "  item 1", "  item 2"]


def test_an_earlier_start_never_takes_the_number_of_one_that_was_removed(tmp_path):
    for name in ("train.2.log", "train.log"):
        (tmp_path / name).write_text(name)
    assert keep_earlier(tmp_path / "train.log") == tmp_path / "train.log"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.2.log", "train.3.log"]


def test_a_resumed_run_keeps_the_metrics_before_its_first_step(tmp_path):
    path, validation = tmp_path / "metrics.jsonl", {"val-core/dice/reward/mean@4": 0.3}
    keep_earlier(path).write_text("".join(record(step, **step_data(step, 1)) for step in range(1, 6)))
    # A resumed run validates at the step of its checkpoint before it trains.
    keep_earlier(path).write_text(record(2, **validation) + record(3, **step_data(3, 3)))
    (tmp_path / "metrics.old.jsonl").write_text("of the user's own")
    assert read_metrics(tmp_path) == [(1, step_data(1, 1)), (2, step_data(2, 1) | validation), (3, step_data(3, 3))]


def test_of_many_starts_the_later_one_counts(tmp_path):
    for start in range(1, 12):  # the tenth start comes after the second
        (tmp_path / f"metrics.{start}.jsonl").write_text(record(1, **step_data(1, start)))
    assert read_metrics(tmp_path) == [(1, step_data(1, 11))]


def test_a_second_run_in_a_folder_is_not_mixed_with_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    validation = record(0, **{"val-core/score": 0.1})  # the second run made none
    keep_earlier(path).write_text(validation + "".join(record(step, **step_data(step, 1)) for step in range(1, 9)))
    keep_earlier(path).write_text("".join(record(step, **step_data(step, 2)) for step in (1, 2)))
    assert read_metrics(tmp_path) == [(1, step_data(1, 2)), (2, step_data(2, 2))]


def test_a_step_is_one_line_with_the_time_left():
    shown = "step  3/10  reward 0.250  rho 0.400 -> 0.500  BAPO's bounds [0.700, 1.500]  6.0 s  left 0:00:42"
    assert step_line(3, 10, {**step_data(3, 0.25), "timing_s/step": 6.0}) == shown


def test_the_summary_has_means_of_training_and_of_the_search(tmp_path):
    costs = {"actor/bapo/extra_forward": 0.25, "actor/bapo/redone": 0.05}
    lines = [record(1, **step_data(1, 0.1) | dict.fromkeys(costs, 0.0))]
    lines += [record(step, **step_data(step, step / 10) | costs) for step in range(2, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    told = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", summary(tmp_path), re.M))
    assert told["training reward"].split() == ["0.150", "->", "0.950"]
    assert told["updates with the target met at the start"] == "50%"
    assert told["updates with the target met by moving bounds"] == "30%"
    assert told["updates with a saturated search"] == "20%"
    assert told["positive contribution (rho)"] == "0.400 at the start, 0.500 at the bounds used"
    assert told["bounds on the ratio"] == "[0.700, 1.500]"
    assert told["updates with an extra forward pass"] == "22%" and told["updates that were recomputed"] == "4%"


def test_a_monitored_run_is_not_told_of_bounds_that_were_used(tmp_path):
    data = step_data(1, 0.5) | {"actor/bapo/applied": 0.0}
    (tmp_path / "metrics.jsonl").write_text(record(1, **data))
    assert step_line(1, 2, data).endswith("  rho 0.400 -> 0.500  BAPO's bounds [0.700, 1.500]")
    text = summary(tmp_path)
    assert "What BAPO would have done" in text and "0.500 at the bounds found" in text
    assert "forward pass" not in text  # not in an old record


@pytest.mark.parametrize(
    "data, said",
    [
        ({"actor/grad_norm": None}, True),
        ({"actor/grad_norm": 1.0, "actor/bapo/skipped": 0.25}, True),
        ({"actor/grad_norm": 1.0, "actor/bapo/skipped": 0.0}, False),
    ],
)
def test_an_unusable_gradient_is_told_at_once_and_counted(tmp_path, capsys, data, said):
    printer = StepPrinter(tmp_path, tmp_path / "train.log", 3)
    (tmp_path / "train.log").touch()
    lines = [record(1, **step_data(1, 0.5)), *(record(step, **{**step_data(step, 0.5), **data}) for step in (2, 3))]
    for number in range(3):
        (tmp_path / "metrics.jsonl").write_text("".join(lines[: number + 1]))
        printer.print_new()
    told = re.findall(r"^Warning: in step (\d) the gradient norm was not finite. ", capsys.readouterr().out, re.M)
    assert told == (["2"] if said else [])
    counted = re.search(r"steps with a gradient norm that is not finite +(\d)  of 3$", summary(tmp_path), re.M)
    assert (counted and counted[1]) == ("2" if said else None)


def test_of_a_long_log_only_the_end_is_read(tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    log.write_text("(A pid=7) KeyError: early\n(A pid=7) KeyError: late\n")
    assert first_error(console.end_of(log)) == "KeyError: early (A)"
    monkeypatch.setattr(console, "MOST_READ", 30)
    assert first_error(console.end_of(log)) == "KeyError: late (A)" and console.end_of(tmp_path / "gone") == ""


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
    log = "(vLLMHttpServer pid=7) default_worker.py serve: error: argument --dtype: invalid choice: 'float12'\n"
    assert first_error(log) == "error: argument --dtype: invalid choice: 'float12' (vLLMHttpServer)"
    log = "(vLLMHttpServer pid=7) default_worker.py: error: unrecognized arguments: --nope 3\n"
    assert first_error(log) == "error: unrecognized arguments: --nope 3 (vLLMHttpServer)"
    assert first_error("nothing went wrong") is None


@pytest.mark.parametrize("trained", [False, True])
def test_an_evaluation_shows_verls_means_best_of_k_and_spread(tmp_path, trained):
    if trained:  # by an earlier start in the same folder
        (tmp_path / "metrics.1.jsonl").write_text("".join(record(step, **step_data(step, 0.5)) for step in (1, 2)))
    metrics = {
        "val-core/aime_2024/acc/mean@16": 0.25,
        "val-aux/aime_2024/acc/std@16": 0.4,
        "val-core/aime_2024/acc/best@16/mean": 0.6,
    }
    others = {"val-core/aime_2024/acc/best@16/std": 0.1, "val-aux/aime_2024/score/mean@16": -0.5}
    (tmp_path / "metrics.jsonl").write_text(record(0, **metrics, **others))
    rows = [line.split() for line in summary(tmp_path).splitlines()[1:-1]]
    assert rows == [[name, f"{value:.4f}"] for name, value in metrics.items()]


def test_each_step_is_a_line_and_the_workers_advice_is_shown(tmp_path, capsys):
    printer = StepPrinter(tmp_path, tmp_path / "train.log", total=25)
    printer.print_new()  # before the files exist
    said = "BAPO: in 100% of the updates of the last 10 training calls the search was saturated."
    with open(tmp_path / "metrics.jsonl", "w") as metrics, open(tmp_path / "train.log", "w") as log:
        for step in range(1, 26):
            line = record(step, **step_data(step, 0.5))
            for part in (line[:20], line[20:]):
                metrics.write(part)
                metrics.flush()
                printer.print_new()
            log.write(f"\x1b[36m(WorkerDict pid=7)\x1b[0m {said if step % 10 == 0 else 'BAPO is fine'}\n")
            log.flush()
    printer.close()
    lines = [line if line == said else line[:7] for line in capsys.readouterr().out.splitlines()]
    steps = [f"step {step:>2}" for step in range(1, 26)]
    assert lines == [*steps[:10], said, *steps[10:20], said, *steps[20:]]
