# SPDX-License-Identifier: Apache-2.0
"""Published schemas become verl's rows, verl's own scorers score every row, and errors name bad files."""

import json

import datasets
import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.bapo.preflight.data import check_rows, load_dataset
from scripts import prepare_data
from scripts.prepare_data import BOXED, DATA_SETS, main, prepare
from verl.utils.reward_score import default_compute_score


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def verl_row(content, truth):
    return {
        "data_source": "as published",
        "prompt": [{"content": content, "role": "user"}],
        "reward_model": {"ground_truth": truth, "style": "rule"},
    }


# The file on the hub, some of its rows, how many are kept, and what is said of the others.
GSM8K = [{"question": "Add!", "answer": "A sum.\n#### 1,004"}]
SKYWORK = {"A fraction?": '["\\\\frac{1}{2}"]', "Both roots?": '["1", "2"]', "": '["4"]'}
PUBLISHED = {
    "gsm8k_train": ("main/train-0.parquet", GSM8K, (1, "none")),
    "gsm8k_test": ("main/test-0.parquet", GSM8K, (1, "none")),
    "skywork_or1_math": (
        "data/math-0.parquet",
        [verl_row(*row) for row in SKYWORK.items()],
        (1, "1 with several answers, 1 without a problem"),
    ),
    "dapo_math_17k": ("data/dapo.parquet", [verl_row(f"{i}+1?", str(i + 1)) for i in range(3)] * 9, (3, "24 repeated")),
    "aime_2024": ("data/a.parquet", [verl_row(f"{i}?", f"{i:03d}") for i in range(30)] * 32, (30, "930 repeated")),
    "aime_2025": ("test.jsonl", [{"problem": f"{i}?", "answer": str(i)} for i in range(30)], (30, "none")),
    "math_500": ("test.jsonl", [{"problem": "Half?", "answer": "\\frac{1}{2}", "level": 1}], (1, "none")),
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(out):
    return datasets.Dataset.from_parquet(str(out)).to_list()


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_published_data_set_is_routed_to_a_scorer_that_knows_its_answers(name, tmp_path):
    file, rows, (kept, dropped) = PUBLISHED[name]
    write(tmp_path / "source" / file, rows)
    if name == "skywork_or1_math":
        write(tmp_path / "source" / "data" / "code-0.parquet", [{"of": "another layout"}])
    out = tmp_path / "new" / "out.parquet"
    assert prepare(name, tmp_path / "source", out) == f"{out}: {kept} rows kept. Dropped: {dropped}."
    config = OmegaConf.create({"data": {"train_files": str(out), "prompt_key": "prompt", "max_prompt_length": 4096}})
    check_rows(load_dataset(config, "train", None, None).dataframe.to_list(), "prompt", "the file")
    for row in rows_of(out):
        truth = row["reward_model"]["ground_truth"]
        for answer, right in ((truth, True), ("12345", False)):
            score = default_compute_score(row["data_source"], f"So we find\n\\boxed{{{answer}}}", truth)
            score = score["score"] if isinstance(score, dict) else score
            assert score == 1.0 if right else score in (0.0, -1.0), row


def rows_made(folder, name, rows):
    """Return the rows that ``prepare`` makes of ``rows``."""
    write(folder / "source.jsonl", rows)
    prepare(name, folder / "source.jsonl", folder / "out.parquet")
    return rows_of(folder / "out.parquet")


def test_rows_in_full(tmp_path):
    rows = [{"problem": f" {i} times seven? ", "answer": 7 * i if i else None} for i in range(2500)]
    assert rows_made(tmp_path, "aime_2025", rows) == [
        {
            "data_source": "aime_2025",
            "prompt": [{"role": "user", "content": f"{i} times seven?\n\n{BOXED}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(7 * i)},
            "extra_info": {"index": i - 1},
        }
        for i in range(1, 2500)
    ]


@pytest.mark.parametrize(
    "name, answer, truth",
    [
        ("aime_2024", "007", "7"),
        ("aime_2024", "000", "0"),
        ("math_500", "-27.0", "-27"),
        ("math_500", "2.50", "2.5"),
        ("math_500", "[-3, -1]", "[-3, -1]"),
        ("math_500", "123456789012345678901.0", "123456789012345678901"),
        ("skywork_or1_math", '["[2,12]"]', "[2,12]"),
        ("gsm8k_train", "2 and 2\n#### 1,004", "1004"),
        ("math_500", 7.0, "7"),
        ("math_500", ["7"], "7"),
    ],
)
def test_the_answer_that_counts_as_right(tmp_path, name, answer, truth):
    (row,) = rows_made(tmp_path, name, [{"problem": "x", "answer": answer}])
    assert row["reward_model"]["ground_truth"] == truth


def test_a_problem_that_asks_for_the_box_is_not_asked_twice(tmp_path):
    (row,) = rows_made(tmp_path, "math_500", [{"problem": "Put it in \\boxed{}: 2 + 2", "answer": "4"}])
    assert row["prompt"][0]["content"] == "Put it in \\boxed{}: 2 + 2"


def test_all_messages_of_a_prompt_are_kept(tmp_path):
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    longer, last = [*first, {"role": "assistant", "content": "4"}], {"role": "user", "content": "times 2?"}
    prompts = [[*longer, last], [last], [*longer, last]]
    made = rows_made(tmp_path, "math_500", [{"prompt": prompt, "answer": "8"} for prompt in prompts])
    asked = {"role": "user", "content": f"times 2?\n\n{BOXED}"}
    assert [row["prompt"] for row in made] == [[*longer, asked], [asked]]


PROGRAM = json.dumps({"inputs": ["1"], "outputs": ["2"]})


@pytest.mark.parametrize(
    "name, row, reason",
    [
        ("gsm8k_train", {"question": None, "answer": "#### 4"}, "without a problem"),
        ("gsm8k_train", {"question": "x", "answer": "so it is 1,004"}, "without an answer"),
        ("math_500", {"problem": " ", "answer": "7"}, "without a problem"),
        ("math_500", {"problem": "x", "answer": ["7", "8"]}, "with several answers"),
        ("math_500", {"problem": "x", "answer": []}, "without an answer"),
        ("math_500", {"problem": "x", "answer": True}, "neither text nor a number"),
        ("math_500", {"problem": "x", "answer": {"target": 4}}, "neither text nor a number"),
        ("math_500", {"problem": "x", "answer": PROGRAM}, "neither text nor a number"),
        ("math_500", {"prompt": [{"role": "user"}], "answer": "4"}, "prompt is not text"),
        ("math_500", {"prompt": {"text": "x"}, "answer": "4"}, "prompt is not text"),
        ("math_500", {"prompt": [{"role": "human", "content": "x"}], "answer": "4"}, "last message is not the user"),
        ("math_500", {"problem": "x", "answer": "a long text " * 9}, "more than 100 characters"),
        ("math_500", {"prompt": "x", "reward_model": None}, "without an answer"),
        ("math_500", {"problem": "x", "answer": "}{"}, "verl's scorer does not accept"),
        ("math_500", {"question": "x\nANSWER:", "answer": "4"}, "ask for the answer in another form"),
        ("skywork_or1_math", {"problem": "x", "answer": "\\frac12"}, "not a JSON list"),
    ],
)
def test_a_row_that_cannot_be_used_is_dropped_with_a_reason(tmp_path, name, row, reason):
    with pytest.raises(ValueError, match=f"out.parquet was not written: .* Dropped: 1 .*{reason}"):
        rows_made(tmp_path, name, [row])
    good = {"gsm8k_train": "#### 4", "skywork_or1_math": '["4"]'}.get(name, "4")
    if "prompt" not in row and "reward_model" not in row:  # the columns of a file are those of its first row
        assert len(rows_made(tmp_path, name, [{next(iter(row)): "2 + 2", "answer": good}])) == 1


def test_another_format_than_parquet_is_not_promised(tmp_path):
    with pytest.raises(ValueError, match="m.csv: parquet is written"):
        prepare("math_500", None, tmp_path / "m.csv")


@pytest.mark.parametrize("name", ["dapo_math_17k", "aime_2024"])
def test_published_instructions_give_way_to_one_form_unless_they_are_asked_for(name, tmp_path):
    before, after = DATA_SETS[name].instruction
    published = f"{before}\n\n2 + 2\n\n{after}"
    write(tmp_path / "source" / "a.parquet", [verl_row(published, "4")])
    said = prepare(name, tmp_path / "source", tmp_path / "one.parquet")
    (row,) = rows_of(tmp_path / "one.parquet")
    assert row["prompt"][0]["content"] == f"2 + 2\n\n{BOXED}" and "Answer:" not in said
    said = prepare(name, tmp_path / "source", tmp_path / "two.parquet", as_published=True)
    (row,) = rows_of(tmp_path / "two.parquet")
    assert row["prompt"][0]["content"] == published and said.endswith("1 prompts ask for a line 'Answer: x'.")


def test_an_instruction_that_has_changed_is_kept_and_said(tmp_path):
    text = "Solve it. Answer: $x\n\n2 + 2"
    write(tmp_path / "source" / "a.parquet", [verl_row(text, "4")])
    assert "1 prompts ask for a line" in prepare("aime_2024", tmp_path / "source", tmp_path / "out.parquet")
    (row,) = rows_of(tmp_path / "out.parquet")
    assert row["prompt"][0]["content"] == text


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("a.csv", "problem,answer\n", "a.csv cannot be read as math-ai/aime25"),
        ("a.jsonl", '{"text": "x"}\n', "a.jsonl cannot be read as math-ai/aime25: KeyError: 'question'"),
        ("b.txt", "", "holds no \\*.jsonl"),
    ],
)
def test_a_bad_file_is_named_in_a_line_and_leaves_nothing(tmp_path, monkeypatch, file, content, message):
    (tmp_path / file).write_text(content)
    source = tmp_path if file == "b.txt" else tmp_path / file
    monkeypatch.setattr("sys.argv", ["x", "aime_2025", "--source", str(source), "--out", str(tmp_path / "out.parquet")])
    with pytest.raises(SystemExit, match=f"^Error: .*{message}"):
        main()
    assert [path.name for path in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("out", ["source.jsonl", "source.jsonl/out.parquet"])
def test_an_existing_file_is_kept_and_one_that_cannot_be_written_is_named(tmp_path, monkeypatch, out):
    source = tmp_path / "source.jsonl"
    write(source, [{"problem": "x", "answer": "1"}])
    before = source.read_text()
    monkeypatch.setattr("sys.argv", ["x", "math_500", "--source", str(source), "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit, match="^Error: .*/source.jsonl"):
        main()
    assert source.read_text() == before


def test_an_unreachable_hub_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(prepare_data, "snapshot_download", refuse)
    with pytest.raises(ValueError, match="the hub cannot be read as math-ai/aime25: .* no route. .* --source"):
        prepare("aime_2025", None, tmp_path / "out.parquet")
