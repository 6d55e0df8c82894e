# SPDX-License-Identifier: Apache-2.0
"""The task: sort three numbers, check, and try again. Items, answers for the warm-up, verl's rows, and the reward.

The prompt is ``Sort: 64 79 25``. The model writes one order a line and says of each whether it is ascending::

    64 25 79 no
    25 64 79 yes

An answer ends with the line that says yes. An answer that never says yes runs until the response is full, so wrong
answers are longer than right ones, as with reasoning models. All prompts have the same number of tokens, and so do all
lines.
"""

import random
from collections.abc import Iterator

DATA_SOURCE = "bapo/sort"
NUMBERS = 3  # in an item, each with two digits
TRIES = 3  # lines for which a response has room
# The model's tokenizer makes one token of each digit, each space between numbers, " no", and the newline.
TOKENS_OF_A_LINE = 3 * NUMBERS + 1
MAX_RESPONSE = TRIES * TOKENS_OF_A_LINE


def prompt_of(numbers: list[int]) -> str:
    """Return the user's message."""
    return f"Sort: {_joined(numbers)}"


def draw_numbers(rng: random.Random) -> list[int]:
    """Draw the numbers of an item, all different."""
    return rng.sample(range(10, 100), NUMBERS)


def teach(numbers: list[int], right: float, rng: random.Random) -> str:
    """Write an answer for the warm-up. It checks honestly; each line has the right order with probability ``right``."""
    answer = ""
    for _ in range(TRIES):
        if rng.random() < right:
            return f"{answer}{_joined(sorted(numbers))} yes"
        tried = sorted(numbers)
        while tried == sorted(numbers):
            rng.shuffle(tried)
        answer += f"{_joined(tried)} no\n"
    return answer


def draw_rows(split: str, count: int) -> Iterator[dict]:
    """Draw rows in verl's schema. ``split`` seeds the draw, so two splits have hardly an item in common."""
    rng = random.Random(split)
    for index in range(count):
        numbers = draw_numbers(rng)
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": prompt_of(numbers)}],
            "ability": "sorting",
            "reward_model": {"style": "rule", "ground_truth": _joined(sorted(numbers))},
            "extra_info": {"split": split, "index": index},
        }


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 if the last line of ``solution_str`` is exactly the right order followed by yes, else 0.

    verl calls reward functions with these four arguments.
    """
    return float(solution_str.rstrip().rpartition("\n")[2] == f"{ground_truth} yes")


def _joined(numbers):
    return " ".join(map(str, numbers))
