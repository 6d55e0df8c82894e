# SPDX-License-Identifier: Apache-2.0
"""Random configs and batches for the tests, and the results of a search on them."""

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st
from support.oracle import ratios, response_tokens

from bapo import BAPOConfig, find_clip_bounds, read_and_validate

# Another value of every option that a search reads, with which the search of the tests ends elsewhere.
CHANGED = {
    "positive_contribution_target": 0.3,
    "ratio_lower_start": 0.7,
    "ratio_lower_max": 0.95,
    "ratio_lower_step": 0.07,
    "ratio_upper_start": 1.3,
    "ratio_upper_max": 2.0,
    "ratio_upper_step": 0.11,
    "contribution": "gradient",
    "token_weight": "uniform",
    "search_order": "lower_first",
}


@st.composite
def configs(draw):
    """Generate usable configs with every option and grids of many shapes."""
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
    """Make a random batch: old log-probs, log-probs, advantages and mask, ``(rows, columns)``.

    ``spread`` is the standard deviation of the log-ratio. Advantages are equal within a row, as with GRPO.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator) * 3
    log_prob = old + spread * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, columns).clone()
    advantages[torch.rand(rows, generator=generator) < zero_advantage] = 0
    mask = torch.rand(rows, columns, generator=generator) >= masked
    return old.to(dtype), log_prob.to(dtype), advantages.to(dtype), mask


def batch_of_pairs(seed, masked=0.3, spread=0.7):
    """Make a batch of twelve responses with alternating advantages of 1 and -1.

    Searches on different seeds end at many different bounds.
    """
    old, log_prob, advantages, mask = make_batch(seed, rows=12, masked=masked, spread=spread)
    signs = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)[:, None]
    return old, log_prob, signs.expand_as(advantages).clone(), mask


SHAPES = [(5, 17), (5, 17), (5, 17), (1, 1), (3, 2), (0, 4), (3, 0)]
LARGEST_SCALE = {torch.float16: 1.0, torch.bfloat16: 1e20, torch.float32: 1e20, torch.float64: 1e200}


@st.composite
def batches(draw):
    """Generate batches of any shape, float type and size of numbers. Masked positions hold anything.

    Some batches have one token, none, or advantages of one sign only. In some a response has advantages of both signs.
    """
    rows, columns = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(list(LARGEST_SCALE)))
    seed, spread = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 0.1, 0.7, 3.0]))
    masked = draw(st.sampled_from([0.0, 0.3, 0.3, 1.0]))
    old, log_prob, advantages, mask = make_batch(seed, rows, columns, spread, masked, dtype=torch.float64)
    if draw(st.booleans()):
        advantages = advantages.roll(1, dims=1) * torch.where(torch.arange(columns) % 3 == 0, -1, 1)
    sign = draw(st.sampled_from([None, None, None, 0, 1, -1]))
    if sign is not None:
        advantages = sign * advantages.abs()
    # With -150 every exp is 0 in float32. All weights change by one factor, so the shares stay the same.
    shift = draw(st.sampled_from([0.0, 0.0, -150.0]))
    scale = draw(st.sampled_from([1.0, 1.0, LARGEST_SCALE[dtype], 1 / LARGEST_SCALE[dtype]]))
    hidden = draw(st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
    tensors = old + shift, log_prob + shift, advantages * scale
    old, log_prob, advantages = (torch.where(mask, tensor, hidden).to(dtype) for tensor in tensors)
    return [old, with_one_ratio_each(old, log_prob), advantages, mask]


def with_one_ratio_each(old, log_prob):
    """Return ``log_prob`` with ``old`` in place of some values, so that every token's ratio is the same on its own.

    On some machines the last bits of a vectorised ``exp`` depend on the position of the token. Such tokens get ratio 1.
    """
    alone = [ratios(*pair) for pair in zip(old.flatten(), log_prob.flatten(), strict=True)]
    if not alone:
        return log_prob
    return torch.where(ratios(old, log_prob) == torch.stack(alone).view_as(old), log_prob, old)


@st.composite
def searches(draw):
    """Generate a batch, a config and a dual clip. Some ratios are next to candidates, and some exactly at a bound."""
    batch, config, clip_ratio_c = draw(batches()), draw(configs()), draw(st.sampled_from([None, 1.5, 3.0]))
    old, log_prob, _, mask = batch
    if draw(st.booleans()):  # the rounding of the logarithm decides on which side of a candidate a token is
        points = torch.cat([config.lower.grid(), config.upper.grid()]).clamp(min=1e-3)
        chosen = points[torch.arange(mask.numel()) % len(points)].reshape(mask.shape)
        old[mask] = 0.0
        batch[1] = with_one_ratio_each(old, torch.where(mask, chosen.log().to(old.dtype), log_prob))
    if draw(st.booleans()):
        found = response_tokens(*batch)[0].tolist()
        below, above = [r for r in found if r < 0.99], [r for r in found if 1.01 < r < 4]
        if below:
            start = draw(st.sampled_from(below))
            config = replace(config, ratio_lower_start=start, ratio_lower_max=max(start, config.ratio_lower_max))
        if above:
            start = draw(st.sampled_from(above))
            config = replace(config, ratio_upper_start=start, ratio_upper_max=max(start, config.ratio_upper_max))
            clip_ratio_c = draw(st.sampled_from(above)) if clip_ratio_c else None
    return batch, config, clip_ratio_c


def values_found(*batch_and_config, **settings):
    """Call ``find_clip_bounds`` with these arguments, and return bounds and diagnostics as numbers by name."""
    return read_and_validate(*find_clip_bounds(*batch_and_config, **settings))
