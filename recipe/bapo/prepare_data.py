# SPDX-License-Identifier: Apache-2.0
"""Turn a published data set into verl's parquet schema, each row routed to a scorer of verl's.

    .venv/bin/python -m recipe.bapo.prepare_data dapo_math_17k              # from the hub to data/dapo_math_17k.parquet
    .venv/bin/python -m recipe.bapo.prepare_data aime_2024 --source /downloads/aime --out /data/aime_2024.parquet

`--source` takes a file or a folder of what the hub has. Rows are read and written in pieces; the output appears
complete or not at all, with a count of what was left out and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
from tqdm import tqdm

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
ROWS_AT_A_TIME = 2000
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("source", pa.string())])),
    ]
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
QUESTION, ANSWER = ("problem", "question"), ("answer",)


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
    found = sorted(source.rglob(pattern))
    if not found:
        raise ValueError(f"--source {source} holds no {pattern}: give the file, or a folder with it.")
    return found


def read_rows(path: Path) -> Iterator[dict]:
    """The rows of a parquet, JSON-lines or JSON file, in pieces.

    Raises:
        ValueError: the file is empty, truncated, or of another kind.
    """
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    try:
        if path.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROWS_AT_A_TIME):
                yield from batch.to_pylist()
        elif path.suffix in (".jsonl", ".json"):
            with open(path, encoding="utf-8") as file:
                rows = (
                    json.load(file) if path.suffix == ".json" else (json.loads(line) for line in file if line.strip())
                )
                for row in rows:
                    if not isinstance(row, dict):
                        raise ValueError(f"a row is {row!r}, not an object")
                    yield row
        else:
            raise ValueError("it is neither .parquet nor .jsonl nor .json")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def prompt_of(row: dict, path: Path) -> str:
    """The text of the user's message; empty if there is none.

    Raises:
        ValueError: the row has no column for it, or one of another type.
    """
    if "prompt" in row:
        messages = row["prompt"]
        if messages is None or messages == []:
            return ""
        if not isinstance(messages, list) or not isinstance(messages[-1], dict) or "content" not in messages[-1]:
            raise ValueError(f"{path}: prompt is {str(messages)[:60]!r}, not a list of role and content.")
        return (messages[-1]["content"] or "").strip()
    text = (_column(row, QUESTION, path) or "").strip()
    return f"{text}\n\n{BOXED}" if text else ""


def answers_of(row: dict, path: Path) -> list[str]:
    """The answers that count as right; Skywork writes a JSON list of them.

    Raises:
        ValueError: the row has no column for it, or one of another type.
    """
    if "reward_model" in row:
        model = row["reward_model"]
        if not isinstance(model, dict) or "ground_truth" not in model:
            raise ValueError(f"{path}: reward_model is {str(model)[:60]!r}, not a struct with ground_truth.")
        answer = model["ground_truth"]
    else:
        answer = _column(row, ANSWER, path)
    text = "" if answer is None else str(answer).strip()
    if "####" in text:  # GSM8K: the way to the answer, and it
        text = text.rpartition("####")[2].strip().replace(",", "")
    with suppress(json.JSONDecodeError):
        answers = json.loads(text)
        if isinstance(answers, list) and all(isinstance(one, str) for one in answers):  # [-2,7] is an interval
            return [one.strip() for one in answers]
    return [text] if text else []


def _column(row, names, path):
    for key, value in row.items():
        if key.lower() in names:
            return value
    raise ValueError(f"{path} lacks the column {' or '.join(names)}: it has {', '.join(row)}.")


def convert(name: str, files: list[Path], dropped: Counter) -> Iterator[dict]:
    """verl's rows from a data set's files; what is left out is counted in ``dropped`` by its reason.

    Raises:
        ValueError: a file cannot be read or has another schema.
    """
    data_set = DATA_SETS[name]
    seen: set[bytes] = set()
    for path in files:
        for row in read_rows(path):
            prompt, answers = prompt_of(row, path), answers_of(row, path)
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
            answer = str(int(answers[0])) if name.startswith("aime") and answers[0].isdigit() else answers[0]
            yield {
                "data_source": data_set.data_source,
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {
                    "split": data_set.split,
                    "index": len(seen) - 1,
                    "source": str(row.get("data_source") or data_set.hub),
                },
            }


def write_parquet(rows: Iterator[dict], out: Path) -> int:
    """Write the rows to ``out``, which appears complete or not at all. Returns how many there were.

    Raises:
        ValueError: there were none.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    count, piece = 0, []
    try:
        with pyarrow.parquet.ParquetWriter(unfinished, SCHEMA) as writer:
            for row in rows:
                piece.append(row)
                count += 1
                if len(piece) == ROWS_AT_A_TIME:
                    writer.write_table(pa.Table.from_pylist(piece, SCHEMA))
                    piece = []
            writer.write_table(pa.Table.from_pylist(piece, SCHEMA))
        if count == 0:
            raise ValueError("no row was left.")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def prepare(name: str, source: Path | None, out: Path) -> str:
    """Make ``out`` of the data set ``name``; returns what was kept and what was dropped.

    Raises:
        ValueError: ``out`` exists, or the source cannot be read.
    """
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or choose another file with --out.")
    files = files_of(source, DATA_SETS[name])
    dropped: Counter = Counter()
    total = sum(pyarrow.parquet.read_metadata(path).num_rows for path in files if _is_parquet(path)) or None
    with tqdm(total=total, unit=" rows", desc=name, disable=None) as bar:

        def counted():
            for row in convert(name, files, dropped):
                bar.update(row["extra_info"]["index"] + 1 + sum(dropped.values()) - bar.n)
                yield row

        try:
            kept = write_parquet(counted(), out)
        except ValueError as error:
            reasons = f" Dropped: {dict(dropped)}." if dropped else ""
            raise ValueError(f"{out} was not written: {error}{reasons}") from error
    lines = [f"{out}: {kept:,} rows kept of {kept + sum(dropped.values()):,}."]
    lines += [f"  dropped {count:,}: {reason}" for reason, count in dropped.most_common()]
    expected = DATA_SETS[name].rows
    if expected is not None and kept != expected:
        lines.append(f"Warning: {name} has {expected} problems, and {kept} were found.")
    return "\n".join(lines)


def _is_parquet(path):
    try:
        return path.suffix == ".parquet" and pyarrow.parquet.read_metadata(path) is not None
    except (pa.ArrowException, OSError):
        return False  # read_rows names it


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(DATA_SETS))
    parser.add_argument("--source", type=Path, help="a file or folder (default: the hub)")
    parser.add_argument("--out", type=Path, help="the parquet file (default: data/NAME.parquet)")
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.name, arguments.source, arguments.out or Path("data") / f"{arguments.name}.parquet"))
    except ValueError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
