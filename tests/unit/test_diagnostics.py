# SPDX-License-Identifier: Apache-2.0
"""The metrics beside the bounds, by hand."""

import pytest
import torch
from support.batches import make_batch, values_found

from bapo import BAPOConfig


def test_the_metrics_beside_the_bounds_by_hand():
    # Ratios 1, 2, 4 of A = 1; 1, 4, 20 and, in another sequence, 1 of A = -2; 1, 1 of A = 0.
    ratio = torch.tensor([[1.0, 2.0, 4.0], [1.0, 4.0, 20.0], [1.0, 7.0, 7.0], [1.0, 1.0, 7.0]])
    advantages = torch.tensor([[1.0], [-2.0], [-2.0], [0.0]]).expand(4, 3).clone()
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
    advantages[2, 1:] = torch.tensor([torch.nan, 5.0])  # masked: may hold anything
    old = torch.full((4, 3), -1.0)
    for weight in ("rollout_prob", "uniform"):
        found = values_found(old, old + ratio.log(), advantages, mask, BAPOConfig(token_weight=weight))
        # r: 1 + 2 + 4 + 1 + 4 + 20 + 1 + 1 + 1 = 35; r^2: 1 + 4 + 16 + 1 + 16 + 400 + 3 = 441
        assert found["effective_sample_size"] == pytest.approx(35**2 / (9 * 441), rel=1e-6)
        # r*|A|: 7 of A > 0 and 2 * (25 + 1) of A < 0, of which 2 * 24 above 3
        assert found["negative_unbounded_share"] == pytest.approx(48 / 59, rel=1e-6)
        assert (found["length_positive"], found["length_negative"]) == (3, 2)  # of one response, of two


def test_the_metrics_beside_the_bounds_of_no_tokens():
    batch = [tensor[:, :0] for tensor in make_batch(1)]
    found = values_found(*batch, BAPOConfig())
    names = ("effective_sample_size", "negative_unbounded_share", "length_positive", "length_negative")
    assert [found[name] for name in names] == [0, 0, 0, 0]


def test_a_response_with_advantages_of_both_signs_counts_for_both():
    batch = [torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([[1.0, -1.0, -1.0, 0.0]]), torch.ones(1, 4)]
    found = values_found(*batch, BAPOConfig())
    assert (found["length_positive"], found["length_negative"]) == (1, 2)
