# SPDX-License-Identifier: Apache-2.0
"""Turn a published data set into verl's parquet schema, each row routed to a scorer of verl's.

    .venv/bin/python -m recipe.bapo.prepare_data dapo_math_17k              # from the hub to data/dapo_math_17k.parquet
    .venv/bin/python -m recipe.bapo.prepare_data aime_2024 --source /downloads/aime --out /data/aime_2024.parquet

`--source` takes a file or a folder of what the hub has; without it, and only then, the hub is asked. The output appears
complete or not at all, with a count of what was left out and why. A further data set is a row of ``DATA_SETS``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tqdm import tqdm

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
TEXT = pyarrow.string()
SCHEMA = pyarrow.schema(
    {
        "data_source": TEXT,
        "prompt": pyarrow.list_(pyarrow.struct({"role": TEXT, "content": TEXT})),
        "ability": TEXT,
        "reward_model": pyarrow.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": pyarrow.struct({"split": TEXT, "index": pyarrow.int64(), "source": TEXT}),
    }
)


def as_it_is(answer: str) -> list[str]:
    """The answer alone."""
    return [answer]


def json_list(answer: str) -> list[str]:
    """Skywork writes a JSON list of texts."""
    return json.loads(answer)


def after_hashes(answer: str) -> list[str]:
    """GSM8K writes the way to the answer, and then the answer behind ``####``, with commas in long numbers."""
    return [answer.rpartition("####")[2].replace(",", "")]


def without_zeros(answer: str) -> list[str]:
    """AIME's answers have three digits; verl's scorer compares 7 with "7", not with "007"."""
    return [answer.lstrip("0") or "0"] if answer.isdecimal() else [answer]


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
        answers: the answers that count as right, of what the data set has in the place of one.
        has_hint: whether its prompts say how to write the answer; where they do not, ``BOXED`` is added.
        rows: how many distinct problems it has; None where that is not a fixed number.
    """

    hub: str
    files: str
    data_source: str
    split: str
    answers: Callable[[str], list[str]] = as_it_is
    has_hint: bool = False
    rows: int | None = None


DATA_SETS = {
    "skywork_or1_math": DataSet(
        "Skywork/Skywork-OR1-RL-Data", "data/math-*.parquet", "lighteval/MATH", "train", json_list
    ),
    "dapo_math_17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet", "math_dapo", "train", has_hint=True),
    "gsm8k_train": DataSet("openai/gsm8k", "main/train-*.parquet", "lighteval/MATH", "train", after_hashes),
    "gsm8k_test": DataSet("openai/gsm8k", "main/test-*.parquet", "lighteval/MATH", "test", after_hashes, rows=1319),
    "aime_2024": DataSet(
        "BytedTsinghua-SIA/AIME-2024", "data/*.parquet", "aime_2024", "test", without_zeros, has_hint=True, rows=30
    ),
    "aime_2025": DataSet("math-ai/aime25", "*.jsonl", "aime_2025", "test", without_zeros, rows=30),
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
    """The rows of a parquet file, or of the lines of a JSON-lines file."""
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)
    else:
        raise ValueError("it is neither .parquet nor .jsonl")


def convert(row: dict, data_set: DataSet) -> tuple[str, list[str], str]:
    """The problem, the answers that count as right, and where the data set has the row from.

    Two layouts are read: verl's own, with one user's message, and columns ``problem`` or ``question`` and ``answer``.
    """
    problem = row["prompt"][-1]["content"] if "prompt" in row else row.get("problem") or row["question"]
    answer = row["reward_model"]["ground_truth"] if "reward_model" in row else row["answer"]
    answers = [] if answer in (None, "") else data_set.answers(str(answer).strip())
    return problem.strip(), [one.strip() for one in answers], str(row.get("data_source") or data_set.hub)


def convert_all(files: list[Path], data_set: DataSet, dropped: Counter) -> Iterator[dict]:
    """verl's rows from a data set's files; what is left out is counted in ``dropped`` by its reason.

    Raises:
        ValueError: a file cannot be read or has another layout.
    """
    seen: set[str] = set()
    for path in files:
        number = 0
        try:
            for row in read_rows(path):
                number += 1
                problem, answers, source = convert(row, data_set)
                if not problem or not any(answers):
                    dropped["no problem or no answer"] += 1
                elif len(answers) > 1:
                    dropped["several answers, which no scorer of verl's takes"] += 1
                elif problem in seen:
                    dropped["repeated problem"] += 1
                else:
                    prompt = problem if data_set.has_hint or "\\boxed" in problem else f"{problem}\n\n{BOXED}"
                    yield {
                        "data_source": data_set.data_source,
                        "prompt": [{"role": "user", "content": prompt}],
                        "ability": "math",
                        "reward_model": {"style": "rule", "ground_truth": answers[0]},
                        "extra_info": {"split": data_set.split, "index": len(seen), "source": source},
                    }
                    seen.add(problem)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} cannot be read as {data_set.hub}, near row {number}: {type(error).__name__}: {error}"
            ) from error


def prepare(name: str, source: Path | None, out: Path) -> str:
    """Make ``out`` of the data set ``name``; returns what was kept and what was dropped.

    Raises:
        ValueError: ``out`` exists, the source cannot be read, or it has no row.
        OSError: ``out`` cannot be written.
    """
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or choose another file with --out.")
    data_set, dropped = DATA_SETS[name], Counter()
    rows = convert_all(files_of(source, data_set), data_set, dropped)
    kept = list(tqdm(rows, unit=" rows", desc=f"{name}, kept", disable=None))
    if not kept:
        raise ValueError(f"{out} was not written: no row was left. Dropped: {dict(dropped)}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(kept, schema=SCHEMA), unfinished)
    os.replace(unfinished, out)
    lines = [f"{out}: {len(kept):,} rows kept of {len(kept) + dropped.total():,}."]
    lines += [f"  dropped {count:,}: {reason}" for reason, count in dropped.most_common()]
    if data_set.rows is not None and len(kept) != data_set.rows:
        lines.append(f"Warning: {name} has {data_set.rows} problems, and {len(kept)} were found.")
    return "\n".join(lines)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(DATA_SETS))
    parser.add_argument("--source", type=Path, help="a file or folder (default: the hub)")
    parser.add_argument("--out", type=Path, help="the parquet file (default: data/NAME.parquet)")
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.name, arguments.source, arguments.out or Path("data") / f"{arguments.name}.parquet"))
    except (ValueError, OSError) as error:
        sys.exit("Error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    main()
