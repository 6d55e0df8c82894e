# SPDX-License-Identifier: Apache-2.0
"""The task: which two of some numbers make a sum? The items, the warm-up's answers, verl's rows and the reward.

Asked ``17 42 20 35 26: make 55`` the model tries one sum a line, and stops at the one that is right::

    17+42=59
    42+26=68
    20+35=55

A right answer may stop after any number of lines, and a wrong one mostly runs until the response is full. So failures
are longer than successes, as with reasoning models. All prompts have the same number of tokens.
"""

import random
from collections.abc import Iterator
from itertools import combinations

DATA_SOURCE = "bapo/make_the_sum"
NUMBERS = 5  # of an item
SMALLEST, LARGEST = 10, 49  # of its numbers: every sum has two digits
TRIES = 4  # lines of an answer
TOKENS_OF_A_LINE = 9  # "17+42=59" and the newline: the model's tokenizer makes a token of each character
MAX_RESPONSE = TRIES * TOKENS_OF_A_LINE
Pair = tuple[int, int]


def prompt_of(numbers: list[int], total: int) -> str:
    """The user's message."""
    return f"{' '.join(map(str, numbers))}: make {total}"


def line_of(pair: Pair) -> str:
    """One line of an answer; the two numbers stand in the order in which the prompt names them."""
    return f"{pair[0]}+{pair[1]}={sum(pair)}"


def draw_item(rng: random.Random) -> tuple[list[int], Pair]:
    """Distinct numbers, and the pair to be found: no other pair of them has the same sum."""
    while True:
        numbers = rng.sample(range(SMALLEST, LARGEST + 1), NUMBERS)
        pairs = list(combinations(numbers, 2))
        wanted = rng.choice(pairs)
        if sum(sum(pair) == sum(wanted) for pair in pairs) == 1:
            return numbers, wanted


def teach(numbers: list[int], wanted: Pair, rng: random.Random) -> str:
    """An answer for the warm-up, which tries the pairs by chance and has ``TRIES`` tries: many of them fail."""
    pairs = list(combinations(numbers, 2))
    rng.shuffle(pairs)
    tried = pairs[: pairs.index(wanted) + 1][:TRIES]
    answer = "\n".join(map(line_of, tried))
    return answer if tried[-1] == wanted else answer + "\n"  # it would go on


def draw_rows(split: str, count: int) -> Iterator[dict]:
    """Rows in verl's schema; ``split`` is the seed, so that other splits have other items."""
    rng = random.Random(split)
    for index in range(count):
        numbers, wanted = draw_item(rng)
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": prompt_of(numbers, sum(wanted))}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": line_of(wanted)},
            "extra_info": {"split": split, "index": index},
        }


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's reward signature: 1 if the last line of the response ``solution_str`` is the right one exactly, else 0."""
    return float(solution_str.strip().rpartition("\n")[2] == ground_truth)
