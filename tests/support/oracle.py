# SPDX-License-Identifier: Apache-2.0
"""The search, its diagnostics and the loss by their definitions: one candidate and one token at a time, in float64.

This is the reference for the vectorised code. Change it only if a definition changes.
"""

import math

import torch


def ratios(old_log_prob, log_prob):
    """Compute ``exp`` of the clamped difference, in float32 or wider; any shape."""
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    return (log_prob.to(dtype) - old_log_prob.to(dtype)).clamp(-20, 20).exp()


def response_tokens(old_log_prob, log_prob, advantages, mask):
    """Return ratios, advantages, old log-probs and log-probs of the response tokens, 1-D and float64."""
    tensors = ratios(old_log_prob, log_prob), advantages, old_log_prob, log_prob
    return [tensor[mask.bool()].double() for tensor in tensors]


def rounded(bound, dtype):
    """Round a bound to the type in which ratios are compared with it."""
    return math.inf if bound is None else torch.tensor(bound, dtype=dtype).double().item()


def contribution(ratio, advantages, weight, low, high, kind, clip_ratio_c, dtype=torch.float64):
    """Compute P and N at one pair of bounds in float64. All tensors are 1-D and hold response tokens only.

    ``dtype`` is the type in which the ratios were computed.
    """
    positive, negative = advantages > 0, advantages < 0
    r_pos, w_pos = ratio[positive], (weight * advantages)[positive]
    r_neg, w_neg = ratio[negative], (weight * -advantages)[negative]
    at_low, at_high, ceiling = (rounded(bound, dtype) for bound in (low, high, clip_ratio_c))
    if kind == "value":  # a clipped token counts with its bound
        p = torch.where(r_pos >= at_high, high, r_pos) * w_pos
        return p.sum().item(), (torch.where(r_neg <= at_low, low, r_neg) * w_neg).sum().item()
    keeps = (r_neg > at_low) & (r_neg < ceiling)
    return (w_pos * r_pos)[r_pos < at_high].sum().item(), (w_neg * r_neg)[keeps].sum().item()


def grid_point(start, maximum, step, k):
    """Return point k of a grid: start + k*step, but never above the maximum."""
    steps = math.ceil((maximum - start) / step - 1e-6)
    return maximum if k >= steps else start + k * step


def sequential_search(old_log_prob, log_prob, advantages, mask, config, clip_ratio_c=None):
    """Find the bounds by the literal loop. Returns (low, high, rho, rho at the start, steps taken, saturated)."""
    ratio, adv, old, _ = response_tokens(old_log_prob, log_prob, advantages, mask)
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    weight = old.exp() if config.token_weight == "rollout_prob" else torch.ones_like(adv)

    def point(side, k):
        return grid_point(*(getattr(config, f"ratio_{side}_{part}") for part in ("start", "max", "step")), k)

    first, second = ("upper", "lower") if config.search_order == "upper_first" else ("lower", "upper")
    k = {"upper": 0, "lower": 0}
    last = {side: getattr(config, f"ratio_{side}_max") for side in k}
    target = config.positive_contribution_target
    start = None
    while True:
        low, high = point("lower", k["lower"]), point("upper", k["upper"])
        p, n = contribution(ratio, adv, weight, low, high, config.contribution, clip_ratio_c, dtype)
        rho = p / (p + n) if p + n > 0 else 0.0
        start = rho if start is None else start
        reached = (1 - target) * p - target * n >= -1e-9 * (p + n)
        if reached or (low == last["lower"] and high == last["upper"]):
            return low, high, rho, start, sum(k.values()), not reached
        k[first if point(first, k[first]) < last[first] else second] += 1


def share(part, whole):
    """Divide; 0 if the denominator is 0."""
    return float(part) / float(whole) if whole > 0 else 0.0


def diagnostics(old_log_prob, log_prob, advantages, mask, low, high):
    """Compute the metrics of ``bapo.Diagnostics`` by name, without the counts of invalid input."""
    ratio, adv, *_ = response_tokens(old_log_prob, log_prob, advantages, mask)
    low, high = (rounded(bound, torch.promote_types(log_prob.dtype, torch.float32)) for bound in (low, high))
    positive, negative, size = adv > 0, adv < 0, ratio * adv.abs()
    responses = {sign: ((advantages * sign > 0) & mask.bool()).any(1).sum() for sign in (1, -1)}
    return {
        "positive_token_fraction": share(positive.sum(), len(adv)),
        "zero_advantage_fraction": share((adv == 0).sum(), len(adv)),
        "clipfrac_positive": share((positive & (ratio >= high)).sum(), positive.sum()),
        "clipfrac_negative": share((negative & (ratio <= low)).sum(), negative.sum()),
        "length_positive": share(positive.sum(), responses[1]),
        "length_negative": share(negative.sum(), responses[-1]),
        "effective_sample_size": share(ratio.sum() ** 2, len(adv) * (ratio**2).sum()),
        "negative_unbounded_share": share(size[negative & (ratio > 3)].sum(), size.sum()),
    }


def entropy_covariance(old_log_prob, log_prob, advantages, mask, low, high, clip_ratio_c):
    """Compute the covariance of Eq. 6 under the policy that is trained, one token at a time."""
    columns = [column.tolist() for column in response_tokens(old_log_prob, log_prob, advantages, mask)]
    total = sum(columns[0])
    tokens = []
    for ratio, advantage, _, log_prob_of_token in zip(*columns, strict=True):
        _, derivative = surrogate(ratio, advantage, low, high, clip_ratio_c)
        tokens.append((ratio / total, derivative, log_prob_of_token))
    means = [sum(weight * values[k] for weight, *values in tokens) for k in range(2)]
    return sum(weight * (kept - means[0]) * (log_prob - means[1]) for weight, kept, log_prob in tokens)


def surrogate(ratio, advantage, low, high, clip_ratio_c):
    """Compute PPO's clipped objective of a token with verl's dual clip, and its derivative by the ratio.

    A ratio exactly on a bound is clipped: its derivative is 0.
    """
    objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if clip_ratio_c is not None and advantage < 0:
        objective = max(objective, clip_ratio_c * advantage)
    above = ratio >= high if advantage > 0 else clip_ratio_c is not None and ratio >= clip_ratio_c
    return objective, 0.0 if above or (advantage < 0 and ratio <= low) else advantage
