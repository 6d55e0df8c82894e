# SPDX-License-Identifier: Apache-2.0
"""Published schemas become verl's rows, every row is scored by verl's own reward manager, bad files are named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from recipe.bapo.checks.inputs import check_data
from recipe.bapo.example.task import make_tokenizer
from recipe.bapo.prepare_data import BOXED, DATA_SETS, SCHEMA, main, prepare


def verl_row(content, truth, source, **extra):
    return {
        "data_source": source,
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": extra,
    }


def skywork(folder):
    """Two files, JSON lists as ground truth, sources that verl does not route."""
    difficulty = {"DeepSeek-R1-Distill-Qwen-7B": 3}
    rows = [
        verl_row("What is 1/2 as a fraction?", '["\\\\frac{1}{2}"]', "train-math-deepscaler", index=1),
        verl_row("Sum of 2 and 2? Put it in \\boxed{}.", '["4"]', "train-math-numinamath", index=2),
        verl_row("Name both roots.", '["1", "2"]', "train-math-deepscaler", index=3),
        verl_row("", '["4"]', "train-math-deepscaler", index=4),
    ]
    for row in rows:
        row["extra_info"]["model_difficulty"] = difficulty
    (folder / "data").mkdir()
    for part in (0, 1):
        table = pa.Table.from_pylist(rows[2 * part : 2 * part + 2])
        pyarrow.parquet.write_table(table, folder / "data" / f"math-0000{part}-of-00002.parquet")


def dapo(folder):
    """Every prompt a hundred times."""
    rows = [
        verl_row(f"Solve: {i}+1. End with Answer: $Answer.", str(i + 1), "math_dapo", index=f"uuid{i}")
        for i in range(3)
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows * 100), folder / "dapo-math-17k.parquet")


def aime_2024(folder):
    rows = [verl_row(f"Problem {i}", f"{i:03d}", "aime", index=i) for i in range(30)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows * 32), folder / "aime-2024.parquet")


def aime_2025(folder):
    rows = [{"id": str(i), "problem": f"Problem {i}", "answer": str(i)} for i in range(30)]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def math_500(folder):
    rows = [
        {
            "problem": f"Half of {i}?",
            "solution": "...",
            "answer": f"\\frac{{{i}}}{{2}}",
            "level": 1,
            "unique_id": str(i),
        }
        for i in range(500)
    ]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def gsm8k(split, rows):
    def make(folder):
        (folder / "main").mkdir()
        table = [{"question": f"Add {i} to 1000?", "answer": f"It is a sum.\n#### 1,{i:03d}"} for i in range(rows)]
        path = folder / "main" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(table), path)

    return make


MAKE = {
    "gsm8k_train": (gsm8k("train", 5), 5, {}),
    "gsm8k_test": (gsm8k("test", 1319), 1319, {}),
    "skywork_or1_math": (
        skywork,
        2,
        {"several answers, which no scorer of verl's takes": 1, "no problem or no answer": 1},
    ),
    "dapo_math_17k": (dapo, 3, {"repeated problem": 297}),
    "aime_2024": (aime_2024, 30, {"repeated problem": 930}),
    "aime_2025": (aime_2025, 30, {}),
    "math_500": (math_500, 500, {}),
}


@pytest.fixture(params=sorted(DATA_SETS))
def made(request, tmp_path):
    """Each data set from a small local folder: its name, the report and the rows."""
    source = tmp_path / "source"
    source.mkdir()
    MAKE[request.param][0](source)
    report = prepare(request.param, source, tmp_path / "out.parquet")
    return request.param, report, tmp_path / "out.parquet"


def test_rows_are_kept_and_dropped_by_reason(made):
    name, report, out = made
    _, kept, dropped = MAKE[name]
    assert f"{kept:,} rows kept of {kept + sum(dropped.values()):,}" in report
    for reason, count in dropped.items():
        assert f"dropped {count:,}: {reason}" in report
    assert "Warning" not in report
    table = pyarrow.parquet.read_table(out)
    assert table.schema.equals(SCHEMA) and table.num_rows == kept
    data = {"prompt_key": "prompt", "max_prompt_length": 4096, "filter_overlong_prompts": True}
    check_data(OmegaConf.create({"data": data}), str(out), "data.train_files")
    assert not list(out.parent.glob("*.unfinished"))


@pytest.mark.parametrize("manager_name", ["naive", "dapo"])
def test_right_and_wrong_answers_through_verls_reward_manager(made, manager_name):
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    tokenizer = make_tokenizer()
    config = OmegaConf.create({"reward": {"reward_kwargs": {}}})
    manager = get_reward_manager_cls(manager_name)(config, tokenizer, None)

    def score(row, text):
        response = torch.tensor([tokenizer.encode(text)])
        batch = TensorDict({"responses": response, "attention_mask": torch.ones_like(response)}, batch_size=1)
        fields = {key: np.array([row[key]], dtype=object) for key in ("data_source", "reward_model", "extra_info")}
        data = DataProto(batch=batch, non_tensor_batch=fields)
        return manager.loop.run_until_complete(manager.run_single(data))["reward_score"]

    for row in pyarrow.parquet.read_table(made[2]).to_pylist()[:5]:
        truth = row["reward_model"]["ground_truth"]
        right, wrong = (score(row, f"So we find\n\\boxed{{{answer}}}") for answer in (truth, "12345"))
        assert right == 1.0 and wrong in (0.0, -1.0), row


def test_an_equal_fraction_in_other_notation_is_right_for_skywork(tmp_path):
    from verl.utils.reward_score import default_compute_score

    skywork(tmp_path)
    prepare("skywork_or1_math", tmp_path, tmp_path / "out.parquet")
    row = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert row["extra_info"]["source"] == "train-math-deepscaler" and "\\boxed" in row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    assert default_compute_score(row["data_source"], "\\boxed{\\dfrac{1}{2}}", truth) == 1.0


def test_an_existing_file_is_kept(tmp_path):
    aime_2025(tmp_path)
    (tmp_path / "out.parquet").write_text("mine")
    with pytest.raises(ValueError, match="out.parquet exists: remove it"):
        prepare("aime_2025", tmp_path, tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_text() == "mine"


def rows_made(folder, name, rows):
    """The rows that ``prepare`` makes of ``rows``, written one a line."""
    (folder / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(name, folder / "source.jsonl", folder / "out.parquet")
    return pyarrow.parquet.read_table(folder / "out.parquet").to_pylist()


def test_every_row_of_a_long_file_arrives_once_and_in_order(tmp_path):
    rows = [{"problem": f"What is {i}?", "answer": str(i)} for i in range(2500)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "source.parquet")
    prepare("math_500", tmp_path / "source.parquet", tmp_path / "out.parquet")
    made = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in made] == [str(i) for i in range(2500)]
    assert [row["extra_info"]["index"] for row in made] == list(range(2500))
    assert [row["prompt"][0]["content"].splitlines()[0] for row in made] == [f"What is {i}?" for i in range(2500)]


def test_a_row_in_full(tmp_path):
    hint = "Please reason step by step, and put your final answer within \\boxed{}."
    (row,) = rows_made(tmp_path, "aime_2025", [{"problem": " Six times seven? ", "answer": 42}])
    assert row == {
        "data_source": "aime_2025",
        "prompt": [{"role": "user", "content": f"Six times seven?\n\n{hint}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "test", "index": 0, "source": "math-ai/aime25"},
    }


@pytest.mark.parametrize(
    "name, answer, truth",
    [
        ("aime_2024", "007", "7"),
        ("aime_2024", "000", "0"),
        ("aime_2025", "336^\\circ", "336^\\circ"),
        ("math_500", "007", "007"),
        ("math_500", "[-2,7]", "[-2,7]"),
        ("skywork_or1_math", '["[2,12]"]', "[2,12]"),
        ("skywork_or1_math", '[" 0.5 "]', "0.5"),
        ("gsm8k_train", "2 and 2\n#### 1,004", "1004"),
        ("dapo_math_17k", "-3", "-3"),
    ],
)
def test_the_answer_that_counts_as_right(tmp_path, name, answer, truth):
    (row,) = rows_made(tmp_path, name, [{"problem": "x", "answer": answer}])
    assert row["reward_model"]["ground_truth"] == truth


def test_the_hint_is_given_once(tmp_path):
    hinted, plain = "Put it in \\boxed{}: 2 + 2", "2 + 3"
    rows = [verl_row(hinted, '["4"]', "x"), verl_row(plain, '["5"]', "x")]
    made = rows_made(tmp_path, "skywork_or1_math", rows)
    assert [row["prompt"][0]["content"] for row in made] == [hinted, f"{plain}\n\n{BOXED}"]
    (tmp_path / "out.parquet").unlink()
    (row,) = rows_made(tmp_path, "dapo_math_17k", [verl_row(plain, "5", "x")])  # its prompts say how to answer
    assert row["prompt"][0]["content"] == plain


def test_skyworks_code_is_left_alone(tmp_path):
    skywork(tmp_path)
    code = [verl_row("Write a program.", '["x"]', "train-code-leetcode", index=1)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(code), tmp_path / "data" / "code-00000-of-00001.parquet")
    assert "2 rows kept of 4." in prepare("skywork_or1_math", tmp_path, tmp_path / "out.parquet")


def test_the_index_counts_what_is_kept(tmp_path):
    rows = [{"problem": text, "answer": answer} for text, answer in (("a", None), ("b", "1"), ("b", "1"), ("c", "2"))]
    made = rows_made(tmp_path, "math_500", rows)
    assert [(row["extra_info"]["index"], row["reward_model"]["ground_truth"]) for row in made] == [(0, "1"), (1, "2")]


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("a.csv", b"problem,answer\n", "a.csv cannot be read as math-ai/aime25, .*: it is neither .parquet nor .jsonl"),
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as"),
        ("a.jsonl", b'{"problem": "x", "answer": "1"}\n{"problem": "x"\n', "near row 1: JSONDecodeError"),
        ("a.jsonl", b"[1, 2]\n", "near row 1: "),
        ("a.jsonl", b'{"text": "x"}\n', "near row 1: KeyError: 'question'"),
        ("a.jsonl", b'{"problem": "x"}\n', "near row 1: KeyError: 'answer'"),
        ("a.jsonl", b'{"problem": 5, "answer": "1"}\n', "near row 1: AttributeError"),
        ("a.jsonl", b'{"problem": "x", "answer": null}\n', "no row was left. Dropped: {'no problem or no answer': 1}"),
        ("b.txt", b"", "holds no \\*.jsonl"),
    ],
)
def test_a_bad_file_is_named_in_a_line_and_leaves_nothing(tmp_path, monkeypatch, file, content, message):
    (tmp_path / file).write_bytes(content)
    source = tmp_path if file == "b.txt" else tmp_path / file
    monkeypatch.setattr("sys.argv", ["x", "aime_2025", "--source", str(source), "--out", str(tmp_path / "out.parquet")])
    with pytest.raises(SystemExit, match=f"^Error: .*{message}") as ended:
        main()
    assert len(str(ended.value)) < 400 and [path.name for path in tmp_path.iterdir()] == [file]


def test_an_output_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    aime_2025(tmp_path)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out.parquet"
    monkeypatch.setattr("sys.argv", ["x", "aime_2025", "--source", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit, match="^Error: .*/file"):
        main()


def test_a_missing_problem_is_warned_about(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "x", "answer": 7}\n')
    assert "Warning: aime_2025 has 30 problems, and 1 were found." in prepare(
        "aime_2025", tmp_path / "a.jsonl", tmp_path / "out.parquet"
    )


def test_an_unreachable_hub_is_named(tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match="math-ai/aime25 cannot be fetched from the hub .ConnectionError."):
        prepare("aime_2025", None, tmp_path / "out.parquet")
