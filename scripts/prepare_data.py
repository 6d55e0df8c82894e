# SPDX-License-Identifier: Apache-2.0
r"""Convert a published data set to verl's parquet schema, so that verl routes each row to one of its scorers.

    .venv/bin/python scripts/prepare_data.py dapo_math_17k              # from the hub to data/dapo_math_17k.parquet
    .venv/bin/python scripts/prepare_data.py aime_2024 --source /downloads/aime --out /data/aime_2024.parquet

`--source` takes a file, or a folder with the files of the hub. Without it, the data set is downloaded. The command
prints how many rows it dropped, by reason; one is that verl's scorer does not accept the row's own answer in a box.
Every prompt asks for the answer in ``\boxed{}``, so that all columns of a table ask in one form; `--as-published` keeps
the instruction of DAPO's sets, which ask for a line ``Answer: x``. To add a data set, add a row to ``DATA_SETS``.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, load_dataset
from huggingface_hub import snapshot_download

from recipe.bapo.preflight.reward import as_written
from verl.utils.reward_score import default_compute_score

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 100  # characters; verl's scorer of DAPO's sets reads no longer one
# What DAPO's sets have before and after the problem.
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)


class Unusable(Exception):
    """A row that is dropped. The message is the reason, as in "Dropped: 3 without an answer"."""


def only_one(answers: str) -> str:
    """Read Skywork's JSON list of texts. verl's scorers take one answer."""
    try:
        found = json.loads(answers)
    except ValueError:
        raise Unusable("whose answer is not a JSON list") from None
    if not isinstance(found, list):
        return answers
    if len(found) > 1:
        raise Unusable("with several answers")
    return str(found[0]).strip() if found else ""


def after_hashes(answer: str) -> str:
    """Read GSM8K's answer, which follows the solution after ``####`` and has commas in long numbers."""
    _, hashes, last = answer.rpartition("####")
    return last.replace(",", "").strip() if hashes else ""


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        hub: its name on the Hugging Face hub.
        files: pattern of its files on the hub, parquet or JSON lines.
        data_source: the name by which verl chooses the reward. ``math_dapo`` and ``aime*`` read ``Answer: x`` or,
            without one, ``\\boxed{x}`` in the last 100 characters, and give -1 or 1. ``lighteval/MATH`` and
            ``HuggingFaceH4/MATH-500`` read ``\\boxed{x}``, ignore differences of notation, and give 0 or 1.
        right_answer: converts the data set's answer to the one that verl compares with; "" if there is none. It may
            raise ``Unusable``.
        instruction: what its prompts have before and after the problem.
    """

    hub: str
    files: str
    data_source: str
    right_answer: Callable[[str], str] = str
    instruction: tuple[str, str] = ("", "")

    @property
    def reads_a_line(self) -> bool:
        """Whether the scorer reads a line ``Answer: x``."""
        return self.data_source == "math_dapo" or self.data_source.startswith("aime")


DATA_SETS = {
    "skywork_or1_math": DataSet("Skywork/Skywork-OR1-RL-Data", "data/math-*.parquet", "lighteval/MATH", only_one),
    "dapo_math_17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet", "math_dapo", instruction=DAPO),
    "gsm8k_train": DataSet("openai/gsm8k", "main/train-*.parquet", "lighteval/MATH", after_hashes),
    "gsm8k_test": DataSet("openai/gsm8k", "main/test-*.parquet", "lighteval/MATH", after_hashes),
    "aime_2024": DataSet("BytedTsinghua-SIA/AIME-2024", "data/*.parquet", "aime_2024", instruction=DAPO),
    "aime_2025": DataSet("math-ai/aime25", "*.jsonl", "aime_2025"),
    "math_500": DataSet("HuggingFaceH4/MATH-500", "test.jsonl", "HuggingFaceH4/MATH-500"),
}


def read_messages(row: dict) -> list[dict[str, str]]:
    """Read the prompt of a row in verl's layout, or of one with a text ``prompt``, ``problem`` or ``question``.

    Returns:
        the messages, each with role and content.

    Raises:
        Unusable: there is none, or something in it is not text.
        KeyError: the row has no column of these names.
    """
    names = [name for name in ("prompt", "problem", "question") if name in row]
    if not names:
        raise KeyError("question")
    prompt = next((row[name] for name in names if row[name]), None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages:
        raise Unusable("without a problem")
    if not isinstance(messages, list) or not all(isinstance(one.get("content"), str) for one in messages):
        raise Unusable("whose prompt is not text alone")
    if messages[-1]["role"] != "user":
        raise Unusable("whose last message is not the user's")
    return [{"role": one["role"], "content": one["content"].strip()} for one in messages]


def read_answer(row: dict, data_set: DataSet) -> str:
    """Read the right answer of a row in verl's layout, or of one with ``answer``.

    Raises:
        Unusable: there is none, or not one that verl's scorers can compare.
        KeyError: the row has neither column.
    """
    answer = (row["reward_model"] or {}).get("ground_truth") if "reward_model" in row else row["answer"]
    if isinstance(answer, list):
        if len(answer) > 1:
            raise Unusable("with several answers")
        answer = answer[0] if answer else None
    if answer is None or answer != answer:
        raise Unusable("without an answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise Unusable("whose answer is neither text nor a number")
    # verl's scorers compare with 7, and not with 7.0 or 007.
    answer = as_written(data_set.right_answer(str(answer).strip()))
    if answer is None:  # such as the tests of a program
        raise Unusable("whose answer is neither text nor a number")
    if not answer:
        raise Unusable("without an answer")
    if len(answer) > LONGEST_ANSWER:
        raise Unusable(f"whose answer has more than {LONGEST_ANSWER} characters")
    scored = default_compute_score(data_set.data_source, f"\\boxed{{{answer}}}", answer)
    if not (scored["score"] if isinstance(scored, dict) else scored) > 0:
        raise Unusable("whose answer verl's scorer does not accept")
    return answer


def ask_for_the_box(problem: str, data_set: DataSet) -> str:
    """Add the instruction to a problem that does not say in which form to write the answer.

    Raises:
        Unusable: it asks for a form that the scorer of this data set does not read.
    """
    if "\\boxed" in problem or ("Answer:" in problem and data_set.reads_a_line):
        return problem
    if any(form in problem.lower() for form in ("answer:", "####", "<answer>")):
        raise Unusable("that ask for the answer in another form than \\boxed{}")
    return f"{problem}\n\n{BOXED}"


def make_row(messages: list[dict[str, str]], answer: str, index: int, data_set: DataSet) -> dict:
    """Make a row in verl's schema."""
    return {
        "data_source": data_set.data_source,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def published_rows(source: Path | None, data_set: DataSet) -> Dataset:
    """Load the rows of the data set's files, local or from the hub."""
    if source is None:
        source = Path(snapshot_download(data_set.hub, repo_type="dataset", allow_patterns=data_set.files))
    pattern = Path(data_set.files).name
    files = [str(source)] if source.is_file() else sorted(map(str, source.rglob(pattern)))
    if not files:
        raise ValueError(f"--source {source} holds no {pattern}")
    return load_dataset("parquet" if files[0].endswith(".parquet") else "json", data_files=files, split="train")


def prepare(name: str, source: Path | None, out: Path, as_published: bool = False) -> str:
    """Write the data set ``name`` to ``out``. Returns a text with the numbers of rows kept and dropped.

    Args:
        name: a key of ``DATA_SETS``.
        source: a file or folder, or None for the hub.
        out: the file to write.
        as_published: keep the instruction of the published prompts.

    Raises:
        ValueError: ``out`` exists or is not named ``.parquet``, or the source cannot be read, has another layout or no
            usable row.
        OSError: ``out`` cannot be written.
    """
    if out.suffix != ".parquet":
        raise ValueError(f"invalid --out {out}: parquet is written, so give a name that ends with .parquet.")
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or choose another file with --out.")
    data_set = DATA_SETS[name]
    rows: dict[tuple, dict] = {}  # by prompt
    dropped: Counter[str] = Counter()
    before, after = ("", "") if as_published and data_set.reads_a_line else data_set.instruction
    try:
        for row in published_rows(source, data_set):
            try:
                messages, answer = read_messages(row), read_answer(row, data_set)
                last = messages[-1]
                last["content"] = last["content"].removeprefix(before).removesuffix(after).strip()
                if not last["content"]:
                    raise Unusable("without a problem")
                last["content"] = ask_for_the_box(last["content"], data_set)
                prompt = tuple((one["role"], one["content"]) for one in messages)
                if prompt in rows:
                    raise Unusable("repeated")
                rows[prompt] = make_row(messages, answer, len(rows), data_set)
            except Unusable as reason:
                dropped[str(reason)] += 1
    except Exception as error:  # the libraries raise errors of many types for a wrong file
        cause = error.__cause__ or error
        raise ValueError(
            f"{source or 'the hub'} cannot be read as {data_set.hub}: {type(cause).__name__}: {cause}. Give a file, or "
            "a folder with the files of the hub, with --source."
        ) from error
    said = f"Dropped: {', '.join(f'{count:,} {reason}' for reason, count in dropped.items()) or 'none'}."
    other = sum("Answer:" in prompt[-1][1] for prompt in rows)
    if other:
        said += f" {other:,} prompts ask for a line 'Answer: x'."
    if not rows:
        raise ValueError(f"{out} was not written: no row was left. {said}")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")  # so that ``out`` is always complete
    Dataset.from_list(list(rows.values())).to_parquet(unfinished)
    os.replace(unfinished, out)
    return f"{out}: {len(rows):,} rows kept. {said}"


def main():
    """Convert the data set that the arguments name, and print how many rows were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(DATA_SETS))
    parser.add_argument("--source", type=Path, help="a file or folder (default: the hub)")
    parser.add_argument("--out", type=Path, help="the parquet file (default: data/NAME.parquet)")
    parser.add_argument("--as-published", action="store_true", help="keep the published prompts' own instruction")
    arguments = parser.parse_args()
    out = arguments.out or Path("data") / f"{arguments.name}.parquet"
    try:
        print(prepare(arguments.name, arguments.source, out, arguments.as_published))
    except (ValueError, OSError) as error:
        sys.exit("Error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    main()
