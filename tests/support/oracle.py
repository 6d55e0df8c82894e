# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 as it is written: one candidate at a time, every sum afresh. The reference for the vectorised search."""

import math

import torch


def contribution(ratio, advantages, weight, low, high, kind, clip_ratio_c):
    """P and N at one pair of bounds, in float64. All tensors 1-D, response tokens only."""
    positive, negative = advantages > 0, advantages < 0
    r_pos, w_pos = ratio[positive], (weight * advantages)[positive]
    r_neg, w_neg = ratio[negative], (weight * -advantages)[negative]
    if kind == "value":
        return (w_pos * r_pos.clamp(max=high)).sum().item(), (w_neg * r_neg.clamp(min=low)).sum().item()
    ceiling = math.inf if clip_ratio_c is None else clip_ratio_c
    keeps = (r_neg > low) & (r_neg < ceiling)
    return (w_pos * r_pos)[r_pos < high].sum().item(), (w_neg * r_neg)[keeps].sum().item()


def grid_point(start, maximum, step, k):
    """Point k of a grid: start + k*step, but never above the maximum."""
    steps = math.ceil((maximum - start) / step - 1e-6)
    return maximum if k >= steps else start + k * step


def sequential_search(old_log_prob, log_prob, advantages, mask, config, clip_ratio_c=None):
    """The bounds by the literal loop: (low, high, rho, rho at the start, steps taken, saturated)."""
    mask = mask.bool()
    old = old_log_prob[mask]
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    ratio = (log_prob[mask].to(dtype) - old.to(dtype)).clamp(-20, 20).exp().double()
    adv = advantages[mask].double()
    weight = old.double().exp() if config.token_weight == "rollout_prob" else torch.ones_like(adv)

    def point(side, k):
        return grid_point(*(getattr(config, f"ratio_{side}_{part}") for part in ("start", "max", "step")), k)

    first, second = ("upper", "lower") if config.search_order == "upper_first" else ("lower", "upper")
    k = {"upper": 0, "lower": 0}
    last = {side: getattr(config, f"ratio_{side}_max") for side in k}
    target = config.positive_contribution_target
    start = None
    while True:
        low, high = point("lower", k["lower"]), point("upper", k["upper"])
        p, n = contribution(ratio, adv, weight, low, high, config.contribution, clip_ratio_c)
        rho = p / (p + n) if p + n > 0 else 0.0
        start = rho if start is None else start
        reached = (1 - target) * p - target * n >= -1e-9 * (p + n)
        if reached or (low == last["lower"] and high == last["upper"]):
            return low, high, rho, start, sum(k.values()), not reached
        k[first if point(first, k[first]) < last[first] else second] += 1
