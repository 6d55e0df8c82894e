# SPDX-License-Identifier: Apache-2.0
"""A config reproduces the authors' published policy loss on 24 random batches (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds

FOLDER = Path(__file__).parents[1] / "golden"
CASES = json.loads((FOLDER / "authors_small.json").read_text())
ARRAYS = np.load(FOLDER / "authors_small.npz")
RANGES = ("lower_start", "lower_max", "lower_step", "upper_start", "upper_max", "upper_step")


def authors_config(case):
    """Make the config of the authors' code. Their target t on P/N is the share t / (1 + t)."""
    ratio = case["pos_neg_target"]
    return BAPOConfig(
        positive_contribution_target=ratio / (1 + ratio),
        token_weight="uniform",
        search_order="lower_first",
        bound_scope="micro_batch",
        **{f"ratio_{name}": case[name] for name in RANGES},
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_the_authors_code_is_a_config(case):
    old, log_prob, advantages, mask, gradient = (
        torch.tensor(ARRAYS[f"{case['case']}_{name}"]) for name in ("old", "lp", "adv", "mask", "grad")
    )
    log_prob.requires_grad_()
    bounds, _ = find_clip_bounds(old, log_prob, advantages, mask, authors_config(case))
    assert bounds.low.item() == pytest.approx(case["clip_low"], abs=1e-6)
    assert bounds.high.item() == pytest.approx(case["clip_high"], abs=1e-6)
    ratio_found = float(case["pos_neg_ratio"])
    if ratio_found == float("inf"):  # N = 0: their code divides by zero; our rho is 1, or 0 if P is 0, too
        share = float((advantages[mask.bool()] > 0).any())
    else:
        share = ratio_found / (1 + ratio_found)
    assert bounds.positive_contribution.item() == pytest.approx(share, abs=1e-5)

    result = clipped_surrogate_loss(
        old, log_prob, advantages, mask, bounds.low, bounds.high, clip_ratio_c=case["clip_ratio_c"]
    )
    result.loss.backward()
    np.testing.assert_allclose(result.loss.item(), case["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(log_prob.grad, gradient, rtol=1e-5, atol=1e-7)
    for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"):
        np.testing.assert_allclose(getattr(result, name).item(), case[name], rtol=1e-5, atol=1e-7)
