# SPDX-License-Identifier: Apache-2.0
"""Random configs and batches for the tests, and what a search finds on them."""

import torch
from hypothesis import strategies as st

from bapo import BAPOConfig, find_clip_bounds, read_values


@st.composite
def configs(draw):
    """Usable configs with every switch and grids of many shapes."""
    lower = sorted(draw(st.lists(st.floats(0.0, 0.99), min_size=2, max_size=2)))
    upper = sorted(draw(st.lists(st.floats(1.01, 4.0), min_size=2, max_size=2)))
    if draw(st.booleans()):
        lower[1] = lower[0]
    if draw(st.booleans()):
        upper[1] = upper[0]
    return BAPOConfig(
        positive_contribution_target=draw(st.floats(0.05, 0.95)),
        ratio_lower_start=lower[0],
        ratio_lower_max=lower[1],
        ratio_lower_step=draw(st.sampled_from([0.01, 0.02, 0.05, 0.3])),
        ratio_upper_start=upper[0],
        ratio_upper_max=upper[1],
        ratio_upper_step=draw(st.sampled_from([0.02, 0.05, 0.1, 0.7])),
        contribution=draw(st.sampled_from(["value", "gradient"])),
        token_weight=draw(st.sampled_from(["rollout_prob", "uniform"])),
        search_order=draw(st.sampled_from(["upper_first", "lower_first"])),
    )


def make_batch(seed, rows=5, columns=17, spread=0.7, masked=0.3, zero_advantage=0.2, dtype=torch.float32):
    """A random batch: old log-probs, log-probs, advantages and mask, ``(rows, columns)``.

    ``spread`` is the standard deviation of the log-ratio. Advantages are equal within a row, as with GRPO.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator) * 3
    log_prob = old + spread * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, columns).clone()
    advantages[torch.rand(rows, generator=generator) < zero_advantage] = 0
    mask = torch.rand(rows, columns, generator=generator) >= masked
    return old.to(dtype), log_prob.to(dtype), advantages.to(dtype), mask


def values_found(*batch_and_config, **settings):
    """The bounds and diagnostics of ``find_clip_bounds``, which takes the same arguments, as numbers by name."""
    return read_values(*find_clip_bounds(*batch_and_config, **settings))


def same_bits(a, b):
    """Whether two scalar tensors hold the same number, bit for bit."""
    return float(a).hex() == float(b).hex()
