# SPDX-License-Identifier: Apache-2.0
"""Turn a published data set into verl's parquet schema, each row routed to a scorer of verl's.

    .venv/bin/python -m recipe.bapo.prepare_data dapo_math_17k              # from the hub to data/dapo_math_17k.parquet
    .venv/bin/python -m recipe.bapo.prepare_data aime_2024 --source /downloads/aime --out /data/aime_2024.parquet

`--source` takes a file or a folder of what the hub has; without it, and only then, the hub is asked. The output appears
complete or not at all, with a count of what was left out and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, List, Value, disable_progress_bars
from datasets.exceptions import DatasetsError
from tqdm import tqdm

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
ROWS_AT_A_TIME = 1000
TEXT = Value("string")
FEATURES = Features(
    {
        "data_source": TEXT,
        "prompt": List({"role": TEXT, "content": TEXT}),
        "ability": TEXT,
        "reward_model": {"style": TEXT, "ground_truth": TEXT},
        "extra_info": {"split": TEXT, "index": Value("int64"), "source": TEXT},
    }
)


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        hub: its name on the Hugging Face hub.
        files: pattern of its files there.
        data_source: what verl routes the reward by. ``math_dapo`` and ``aime*`` read ``Answer: x`` or ``\\boxed{x}``
            and give -1 or 1; ``lighteval/MATH`` and ``HuggingFaceH4/MATH-500`` read ``\\boxed{x}``, up to notation,
            and give 0 or 1.
        split: train or test.
        rows: how many distinct problems it has; None where that is not a fixed number.
    """

    hub: str
    files: str
    data_source: str
    split: str
    rows: int | None = None


DATA_SETS = {
    "skywork_or1_math": DataSet("Skywork/Skywork-OR1-RL-Data", "data/math-*.parquet", "lighteval/MATH", "train"),
    "dapo_math_17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet", "math_dapo", "train"),
    "gsm8k_train": DataSet("openai/gsm8k", "main/train-*.parquet", "lighteval/MATH", "train"),
    "gsm8k_test": DataSet("openai/gsm8k", "main/test-*.parquet", "lighteval/MATH", "test", rows=1319),
    "aime_2024": DataSet("BytedTsinghua-SIA/AIME-2024", "data/*.parquet", "aime_2024", "test", rows=30),
    "aime_2025": DataSet("math-ai/aime25", "*.jsonl", "aime_2025", "test", rows=30),
    "math_500": DataSet("HuggingFaceH4/MATH-500", "test.jsonl", "HuggingFaceH4/MATH-500", "test", rows=500),
}


def files_of(source: Path | None, data_set: DataSet) -> list[Path]:
    """The data set's files, local or from the hub.

    Raises:
        ValueError: there are none, or the hub cannot be reached.
    """
    if source is None:
        from huggingface_hub import snapshot_download

        try:
            source = Path(snapshot_download(data_set.hub, repo_type="dataset", allow_patterns=data_set.files))
        except Exception as error:
            raise ValueError(
                f"{data_set.hub} cannot be fetched from the hub ({type(error).__name__}): download it where there is "
                "network and give its folder with --source."
            ) from error
    if source.is_file():
        return [source]
    pattern = Path(data_set.files).name
    files = sorted(source.rglob(pattern))
    if not files:
        raise ValueError(f"--source {source} holds no {pattern}: give the file, or a folder with it.")
    return files


def read_rows(path: Path) -> Iterator[dict]:
    """The rows of a parquet, JSON-lines or JSON file.

    Raises:
        ValueError: the file is empty, truncated, or of another kind.
    """
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        if path.suffix == ".parquet":
            # In pieces, as a row group may be the whole file. Not by load_dataset, which tells a server of its use.
            stream = IterableDataset.from_parquet(str(path), batch_size=ROWS_AT_A_TIME).with_format("arrow")
            for table in stream.iter(ROWS_AT_A_TIME):
                yield from table.to_pylist()
        elif path.suffix in (".jsonl", ".json"):
            yield from read_json(path)
        else:
            raise ValueError("it is neither .parquet nor .jsonl nor .json")
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: its values are nested too deep") from error
    except (DatasetsError, OSError, ValueError) as error:  # Arrow's errors are of these, too
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Iterator[dict]:
    """The rows of a list in a ``.json`` file, or of the lines of a ``.jsonl`` file.

    datasets' own reader of JSON is not used: it ends the process at a line that says ``null``, and it turns the answer
    "007" into 7 where another row's answer is a number.
    """
    with open(path, encoding="utf-8") as file:
        rows = json.load(file) if path.suffix == ".json" else _read_lines(file)
        if path.suffix == ".json" and not isinstance(rows, list):
            raise ValueError(f"it holds {reprlib.repr(rows)}, not a list of rows")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is {reprlib.repr(row)}, not an object")
            yield row


def _read_lines(file):
    for number, line in enumerate(file, 1):
        try:
            if line.strip():
                yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def question_of(row: dict) -> str:
    """The text of the user's message; empty if there is none.

    Raises:
        ValueError: the row has no column for it, or one of another type.
    """
    if "prompt" in row:
        messages = row["prompt"]
        if messages is None or messages == []:
            return ""
        if not isinstance(messages, list) or not isinstance(messages[-1], dict) or "content" not in messages[-1]:
            raise ValueError(f"prompt is {reprlib.repr(messages)}, not a list of role and content")
        return _text("the content of prompt", messages[-1]["content"])
    question = _text(*_column(row, ("problem", "question")))
    return f"{question}\n\n{BOXED}" if question else ""


def answers_of(row: dict) -> list[str]:
    """The answers that count as right; Skywork writes a JSON list of them.

    Raises:
        ValueError: the row has no column for it, or one of another type.
    """
    if "reward_model" in row:
        model = row["reward_model"]
        if not isinstance(model, dict) or "ground_truth" not in model:
            raise ValueError(f"reward_model is {reprlib.repr(model)}, not a struct with ground_truth")
        name, answer = "reward_model.ground_truth", model["ground_truth"]
    else:
        name, answer = _column(row, ("answer",))
    text = str(answer) if isinstance(answer, int | float) else _text(name, answer)
    if "####" in text:  # GSM8K writes the way to the answer, and then the answer.
        text = text.rpartition("####")[2].strip().replace(",", "")
    with suppress(ValueError, RecursionError):
        answers = json.loads(text)
        if isinstance(answers, list) and all(isinstance(one, str) for one in answers):  # [-2,7] is an interval
            return [one.strip() for one in answers]
    return [text] if text else []


def _column(row, names):
    """Name and value of the first of these columns, in any case, that has a value."""
    there = {key: value for key, value in row.items() if key.lower() in names}
    if not there:
        raise ValueError(f"it lacks the column {' or '.join(names)}: it has {', '.join(row)}")
    return next((item for item in there.items() if item[1] is not None), (names[0], None))


def _text(name, value):
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not text")
    return (value or "").strip()


def convert(name: str, files: list[Path], dropped: Counter) -> Iterator[dict]:
    """verl's rows from a data set's files; what is left out is counted in ``dropped`` by its reason.

    Raises:
        ValueError: a file cannot be read or has another schema.
    """
    data_set = DATA_SETS[name]
    seen: set[bytes] = set()
    for path in files:
        for number, row in enumerate(read_rows(path), 1):
            try:
                prompt, answers = question_of(row), answers_of(row)
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: {error}") from error
            digest = hashlib.sha256(prompt.encode()).digest()
            reason = None
            if not prompt:
                reason = "empty prompt"
            elif not answers or not answers[0]:
                reason = "no answer"
            elif len(answers) > 1:
                reason = "several answers, which no scorer of verl's takes"
            elif digest in seen:
                reason = "repeated prompt"
            if reason is not None:
                dropped[reason] += 1
                continue
            seen.add(digest)
            if data_set.data_source == "lighteval/MATH" and "\\boxed" not in prompt:
                prompt = f"{prompt}\n\n{BOXED}"
            answer = answers[0]
            if name.startswith("aime") and answer.isdecimal():  # verl's scorer compares 7 with "7", not with "007".
                answer = answer.lstrip("0") or "0"
            yield {
                "data_source": data_set.data_source,
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {
                    "split": data_set.split,
                    "index": len(seen) - 1,
                    "source": _text("data_source", row.get("data_source")) or data_set.hub,
                },
            }


def prepare(name: str, source: Path | None, out: Path) -> str:
    """Make ``out`` of the data set ``name``; returns what was kept and what was dropped.

    Raises:
        ValueError: ``out`` exists or cannot be written, the source cannot be read, or no row is left.
    """
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or choose another file with --out.")
    dropped: Counter = Counter()
    rows = convert(name, files_of(source, DATA_SETS[name]), dropped)
    kept = list(tqdm(rows, unit=" rows", desc=f"{name}, kept", disable=None))
    if not kept:
        raise ValueError(f"{out} was not written: no row was left. Dropped: {dict(dropped)}.")
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(kept, features=FEATURES).to_parquet(unfinished)
        os.replace(unfinished, out)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error}): choose another file.") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    lines = [f"{out}: {len(kept):,} rows kept of {len(kept) + dropped.total():,}."]
    lines += [f"  dropped {count:,}: {reason}" for reason, count in dropped.most_common()]
    expected = DATA_SETS[name].rows
    if expected is not None and len(kept) != expected:
        lines.append(f"Warning: {name} has {expected} problems, and {len(kept)} were found.")
    return "\n".join(lines)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(DATA_SETS))
    parser.add_argument("--source", type=Path, help="a file or folder (default: the hub)")
    parser.add_argument("--out", type=Path, help="the parquet file (default: data/NAME.parquet)")
    arguments = parser.parse_args()
    disable_progress_bars()  # those of datasets; the bar of the rows is ours
    try:
        print(prepare(arguments.name, arguments.source, arguments.out or Path("data") / f"{arguments.name}.parquet"))
    except ValueError as error:
        sys.exit("Error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    main()
