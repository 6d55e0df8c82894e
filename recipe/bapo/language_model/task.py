# SPDX-License-Identifier: Apache-2.0
"""The task: sort some numbers, check, and try again. The items, the warm-up's answers, verl's rows and the reward.

Asked ``Sort: 64 79 25`` the model writes one order a line and says of each whether it is ascending::

    64 25 79 no
    25 64 79 yes

An answer ends with the line that says yes. One that never does runs until the response is full, so failures are longer
than successes, as with reasoning models. All prompts have the same number of tokens, and so have all lines.
"""

import random
from collections.abc import Iterator

DATA_SOURCE = "bapo/sort"
NUMBERS = 3  # of an item, each of two digits
TRIES = 3  # lines that a response has room for
# The model's tokenizer makes a token of each digit, of the spaces between numbers, of " no" and of the newline.
TOKENS_OF_A_LINE = 3 * NUMBERS + 1
MAX_RESPONSE = TRIES * TOKENS_OF_A_LINE


def prompt_of(numbers: list[int]) -> str:
    """The user's message."""
    return f"Sort: {_joined(numbers)}"


def draw_numbers(rng: random.Random) -> list[int]:
    """The numbers of an item, all different."""
    return rng.sample(range(10, 100), NUMBERS)


def teach(numbers: list[int], right: float, rng: random.Random) -> str:
    """An answer for the warm-up: it checks honestly, and a share of ``right`` of its lines has the right order."""
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
    """Rows in verl's schema; ``split`` is the seed, so that other splits have other items."""
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
    """verl's reward signature: 1 if the last line of ``solution_str`` is exactly the right order and a yes, else 0."""
    return float(solution_str.rstrip().rpartition("\n")[2] == f"{ground_truth} yes")


def _joined(numbers):
    return " ".join(map(str, numbers))
