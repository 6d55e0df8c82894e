# SPDX-License-Identifier: Apache-2.0
"""24 random batches with what the authors' published policy loss gives on them (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import torch

from bapo import BAPOConfig

FOLDER = Path(__file__).parents[1] / "golden"
CASES = json.loads((FOLDER / "authors_small.json").read_text())
ARRAYS = np.load(FOLDER / "authors_small.npz")
RANGES = ("lower_start", "lower_max", "lower_step", "upper_start", "upper_max", "upper_step")


def golden_batch(case):
    """Old log-probs, log-probs, advantages and mask of a case."""
    return [torch.tensor(ARRAYS[f"{case['case']}_{name}"]) for name in ("old", "lp", "adv", "mask")]


def golden_gradient(case):
    """The authors' gradient with respect to the log-probs."""
    return torch.tensor(ARRAYS[f"{case['case']}_grad"])


def authors_config(case):
    """The authors' code as a set of values; their target t on P/N is the share t / (1 + t)."""
    ratio = case["pos_neg_target"]
    return BAPOConfig(
        positive_contribution_target=ratio / (1 + ratio),
        token_weight="uniform",
        search_order="lower_first",
        bound_scope="micro_batch",
        **{f"ratio_{name}": case[name] for name in RANGES},
    )
