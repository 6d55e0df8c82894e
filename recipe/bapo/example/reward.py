# SPDX-License-Identifier: Apache-2.0
"""The reward of the example task: 1 if the last guess is the sum and the response confirms it, else 0."""

import re

LAST_TRY = re.compile(r"(\d\d) yes$")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score a response, with verl's reward signature.

    Args:
        solution_str: the response.
        ground_truth: the two-digit sum.
    """
    last_try = LAST_TRY.search(solution_str.strip())
    return float(last_try is not None and last_try.group(1) == ground_truth)
