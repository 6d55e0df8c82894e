# SPDX-License-Identifier: Apache-2.0
"""The vectorised search against arithmetic by hand, the literal Algorithm 1 and the claims of the documentation."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.batches import configs, make_batch, same_bits, values_found
from support.oracle import contribution, sequential_search

from bapo import (
    BAPOConfig,
    collect_clip_statistics,
    diagnose,
    find_clip_bounds,
    read_values,
    search_clip_bounds,
)
from bapo.search import search_path
from bapo.statistics import CPU_CHUNK


def tokens(ratios, advantages, old_log_prob=0.0):
    """One row of tokens with the given ratios; ``exp(0) = 1`` makes both token weights equal."""
    old = torch.full((1, len(ratios)), float(old_log_prob))
    return old, old + torch.tensor([ratios]).log(), torch.tensor([advantages]), torch.ones(1, len(ratios))


def test_three_tokens_by_hand_value():
    # Positive tokens r = 1.5 and 0.5, A = 1; a negative token r = 1, A = -2: N = 2 * max(1, c_low) = 2.
    # P(c) = min(1.5, c) + 0.5. Start c = 1.2: P = 1.7, rho = 1.7 / 3.7 = 0.459. The target 0.48 needs
    # P >= 0.48 / 0.52 * 2 = 1.846, so c >= 1.346: the third step, c = 1.35, rho = 1.85 / 3.85 = 0.4805.
    batch = tokens([1.5, 0.5, 1.0], [1.0, 1.0, -2.0])
    bounds, diagnostics = find_clip_bounds(*batch, BAPOConfig(positive_contribution_target=0.48))
    assert bounds.low.item() == 0.6 and bounds.high.item() == pytest.approx(1.35)
    assert bounds.search_steps.item() == 3 and not bounds.saturated.item()
    assert bounds.positive_contribution_start.item() == pytest.approx(1.7 / 3.7)
    assert bounds.positive_contribution.item() == pytest.approx(1.85 / 3.85)
    assert diagnostics.positive_token_fraction.item() == pytest.approx(2 / 3)
    assert diagnostics.clipfrac_positive.item() == pytest.approx(1 / 2) and diagnostics.clipfrac_negative.item() == 0


def test_three_tokens_by_hand_gradient():
    # A positive token r = 1, A = 1: P_g = 1. Negative tokens r = 0.7 and 1.5, A = -1: N_g = 0.7 + 1.5 while
    # c_low < 0.7, then 1.5. rho = 1 / 3.2 = 0.3125, and 1 / 2.5 = 0.4 from c_low = 0.7 on. c_high changes nothing,
    # so the search runs 36 steps up c_high and 5 or 6 up c_low (0.6 + 5 * 0.02 = 0.7, and r = 0.7 is a float32).
    batch = tokens([1.0, 0.7, 1.5], [1.0, -1.0, -1.0])
    config = BAPOConfig(positive_contribution_target=0.39, contribution="gradient")
    bounds, diagnostics = find_clip_bounds(*batch, config)
    assert bounds.positive_contribution_start.item() == pytest.approx(1 / 3.2)
    assert bounds.positive_contribution.item() == pytest.approx(0.4)
    assert bounds.low.item() == pytest.approx(0.7, abs=0.021) and bounds.high.item() == 3.0
    assert diagnostics.clipfrac_negative.item() == 0.5


def test_a_ratio_exactly_at_a_bound_carries_no_gradient():
    # P_g counts r < c_high, N_g counts r > c_low: one positive token at a+, one negative at a-, one of each inside.
    log_ratio = torch.tensor([[0.3, -0.4, 0.1, -0.1]])
    ratio = log_ratio.exp()
    config = BAPOConfig(
        contribution="gradient",
        token_weight="uniform",
        ratio_upper_start=ratio[0, 0].item(),
        ratio_lower_start=ratio[0, 1].item(),
    )
    batch = torch.zeros(1, 4), log_ratio, torch.tensor([[1.0, -1.0, 1.0, -1.0]]), torch.ones(1, 4)
    start = find_clip_bounds(*batch, config)[0].positive_contribution_start.item()
    p, n = ratio[0, 2].item(), ratio[0, 3].item()
    assert start == pytest.approx(p / (p + n), rel=1e-12)
    assert start == pytest.approx(sequential_search(*batch, config)[3], rel=1e-12)


def test_the_dual_clip_takes_its_tokens_out_of_the_gradient_only():
    batch = tokens([1.0, 4.0], [1.0, -1.0])
    gradient = BAPOConfig(contribution="gradient")
    assert find_clip_bounds(*batch, gradient)[0].positive_contribution_start.item() == pytest.approx(1 / 5)
    assert find_clip_bounds(*batch, gradient, clip_ratio_c=3.0)[0].positive_contribution_start.item() == 1
    exactly = batch[1].exp()[0, 1].item()
    assert find_clip_bounds(*batch, gradient, clip_ratio_c=exactly)[0].positive_contribution_start.item() == 1
    value, _ = find_clip_bounds(*batch, BAPOConfig(), clip_ratio_c=3.0)
    assert value.positive_contribution_start.item() == pytest.approx(1 / 5)


def test_what_the_dual_clip_takes_leaves_no_rounding_behind():
    # A clipped token of r = e^20 beside tokens of 1e-6: added and taken away again, it would leave more than they are.
    old = torch.zeros(1, 3, dtype=torch.float64)
    log_prob = torch.tensor([[0.0, 0.0, 20.0]], dtype=torch.float64)
    batch = old, log_prob, torch.tensor([[1e-6, -1e-6, -1.0]], dtype=torch.float64), torch.ones(1, 3)
    config = BAPOConfig(contribution="gradient", token_weight="uniform")
    bounds, _ = find_clip_bounds(*batch, config, clip_ratio_c=3.0)
    assert bounds.positive_contribution.item() == 0.5 and bounds.search_steps.item() == 0


@pytest.mark.parametrize("clip_ratio_c", [1.0, 0.5, -1.0, math.nan])
def test_a_dual_clip_that_is_not_above_1_is_refused(clip_ratio_c):
    with pytest.raises(ValueError, match="clip_ratio_c"):
        find_clip_bounds(*make_batch(0), BAPOConfig(), clip_ratio_c=clip_ratio_c)


@settings(max_examples=30 * settings.default.max_examples)
@given(configs(), st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 0.7, 3.0]), st.sampled_from([None, 1.5, 3.0]))
def test_the_search_is_algorithm_1(config, seed, spread, clip_ratio_c):
    batch = make_batch(seed, spread=spread)
    low, high, rho, start, steps, saturated = sequential_search(*batch, config, clip_ratio_c)
    bounds, _ = find_clip_bounds(*batch, config, clip_ratio_c=clip_ratio_c)
    assert same_bits(bounds.low, low) and same_bits(bounds.high, high)
    assert bounds.search_steps.item() == steps and bounds.saturated.item() == saturated
    assert bounds.positive_contribution.item() == pytest.approx(rho, rel=1e-9, abs=1e-12)
    assert bounds.positive_contribution_start.item() == pytest.approx(start, rel=1e-9, abs=1e-12)
    assert bounds.low.dtype == bounds.high.dtype == torch.float64


@settings(max_examples=3 * settings.default.max_examples)
@given(configs())
def test_the_points_of_a_range_are_python_arithmetic(config):
    for candidates in (config.upper, config.lower):
        points = candidates.points().tolist()
        assert len(points) == candidates.steps + 1
        assert points == [candidates.start + k * candidates.step for k in range(len(points) - 1)] + [candidates.maximum]


def test_the_tie_at_ratio_1_stays_at_the_start_whatever_the_rounding():
    # r = 1, uniform weights, equal lengths, a GRPO group of 1 right and 2 wrong: sum A = 0 up to float32 rounding.
    rows = torch.tensor([[1.0], [0.0], [0.0]])
    advantages = ((rows - rows.mean()) / (rows.std() + 1e-6)).expand(3, 1001)
    old = torch.full((3, 1001), -0.3)
    bounds, _ = find_clip_bounds(old, old, advantages, torch.ones(3, 1001), BAPOConfig(token_weight="uniform"))
    assert bounds.positive_contribution_start.item() == pytest.approx(0.5, abs=1e-7)
    above = BAPOConfig(token_weight="uniform", positive_contribution_target=0.5 + 2e-10)
    exact = tokens([1.0, 1.0], [1.0, -1.0])
    assert find_clip_bounds(*exact, above)[0].search_steps.item() == 0
    assert find_clip_bounds(*exact, BAPOConfig(positive_contribution_target=0.5 + 1e-8))[0].saturated.item()


def test_at_ratio_1_the_search_stops_at_once_or_saturates():
    for negatives, steps in ((1, 0), (3, 51)):
        batch = tokens([1.0] * (1 + negatives), [1.0] + [-1.0] * negatives)
        bounds, diagnostics = find_clip_bounds(*batch, BAPOConfig())
        assert bounds.search_steps.item() == steps and bounds.saturated.item() == (negatives == 3)
        assert diagnostics.clipfrac_positive.item() == 0 and diagnostics.clipfrac_negative.item() == 0


@pytest.mark.parametrize("seed", range(20))
def test_raising_c_low_never_helps_the_value_and_never_harms_the_gradient(seed):
    old, log_prob, advantages, mask = make_batch(seed, rows=40)
    ratio = (log_prob - old)[mask].exp().double()
    rho = {"value": [], "gradient": []}
    for low in torch.linspace(0.6, 0.9, 16).tolist():
        for kind, shares in rho.items():
            p, n = contribution(ratio, advantages[mask].double(), torch.ones_like(ratio), low, 1.2, kind, None)
            shares.append(p / (p + n))
    assert rho["value"] == sorted(rho["value"], reverse=True)
    assert rho["gradient"] == sorted(rho["gradient"])
    assert rho["value"][0] > rho["value"][-1] and rho["gradient"][0] < rho["gradient"][-1]


@pytest.mark.parametrize("longer, rho", [(1, 0.5), (3, 0.25)])
def test_with_grpo_rho_starts_at_one_half_and_falls_when_wrong_answers_are_longer(longer, rho):
    # A group of 2 right (reward 1) and 2 wrong: advantages of equal size, so that rho is the share of right tokens.
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    advantages = ((rewards - rewards.mean()) / rewards.std()).view(4, 1).expand(4, 30)
    lengths = torch.tensor([10, 10, 10 * longer, 10 * longer]).view(4, 1)
    mask = torch.arange(30).expand(4, 30) < lengths
    old = torch.full((4, 30), -0.3)
    bounds, _ = find_clip_bounds(old, old, advantages, mask, BAPOConfig())
    assert bounds.positive_contribution_start.item() == pytest.approx(rho)


@pytest.mark.parametrize("rho0", [0.1, 0.4, 0.45, 0.9])
def test_eq_8_as_printed_is_another_value_of_the_target(rho0):
    # Eq. 8 has bars round both sums: |P| / |P - N| >= rho0. That is the share P / (P + N) >= rho0 / (1 + 2 * rho0).
    config = BAPOConfig(positive_contribution_target=rho0 / (1 + 2 * rho0), token_weight="uniform")
    high, low = config.upper.points(), config.lower.points()
    path = [(low[j].item(), high[i].item()) for i, j in zip(*search_path(config), strict=True)]
    steps = []
    for seed in range(40):
        old, log_prob, advantages, mask = make_batch(seed, rows=8)
        advantages = torch.where(advantages > 0, advantages * 0.5, advantages)
        ratio, one = (log_prob - old)[mask].exp().double(), torch.ones(int(mask.sum()))
        sums = (contribution(ratio, advantages[mask].double(), one, *bounds, "value", None) for bounds in path)
        reached = [p >= rho0 * abs(p - n) for p, n in sums]
        bounds, _ = find_clip_bounds(old, log_prob, advantages, mask, config)
        assert bounds.saturated.item() == (not any(reached))
        assert bounds.search_steps.item() == (reached.index(True) if any(reached) else len(path) - 1)
        steps.append(bounds.search_steps.item())
    assert len(set(steps)) > 2  # at once, on the way, and at the end


def test_eq_8_as_printed_asks_for_a_smaller_share():
    # |P| / |P - N| >= rho0, bars round both sums, holds where P / (P + N) >= rho0 / (1 + 2 * rho0).
    generator = torch.Generator().manual_seed(8)
    p, n, rho0 = torch.rand(3, 100_000, generator=generator, dtype=torch.float64)
    assert torch.equal(p >= rho0 * (p - n).abs(), p / (p + n) >= rho0 / (1 + 2 * rho0))
    # One token of either sign at r = 1, so that no bound changes rho: the share decides between the ends of the search.
    old, log_prob, advantages, mask = tokens([1.0, 1.0], [1.0, -1.0])
    config = BAPOConfig(positive_contribution_target=0.4 / 1.8)
    for positive, reached in ((0.2857, False), (0.2858, True)):  # printed: 0.2857 / 0.7143 < 0.4 < 0.2858 / 0.7142
        bounds, _ = find_clip_bounds(old, log_prob, advantages * torch.tensor([positive, 1.0]), mask, config)
        assert bounds.saturated.item() != reached


@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize(
    "advantages, masked, rho, steps",
    [
        ([-1.0, -2.0], False, 0.0, 51),
        ([1.0, 2.0], False, 1.0, 0),
        ([0.0, 0.0], False, 0.0, 0),
        ([1.0, -1.0], True, 0, 0),
    ],
)
def test_degenerate_batches(advantages, masked, rho, steps, contribution):
    old, log_prob, adv, mask = tokens([1.0, 1.0], advantages)
    bounds, _ = find_clip_bounds(old, log_prob, adv, mask * (not masked), BAPOConfig(contribution=contribution))
    assert bounds.positive_contribution.item() == rho
    assert bounds.search_steps.item() == steps and bounds.saturated.item() == (steps == 51)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_tokens_at_all(shape):
    empty = torch.zeros(shape)
    found = values_found(empty, empty, empty, empty, BAPOConfig())
    assert (found["low"], found["high"], found["positive_contribution"]) == (0.6, 1.2, 0)


@pytest.mark.parametrize("index, name", [(0, "old_log_prob"), (1, "log_prob"), (2, "advantages")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_token_is_named_and_counted_unless_it_is_masked(index, name, value):
    batch = [tensor.clone() for tensor in make_batch(3)]
    clean = values_found(*batch, BAPOConfig())
    spoiled = batch[index].clone()
    spoiled[~batch[3]] = value
    assert values_found(*batch[:index], spoiled, *batch[index + 1 :], BAPOConfig()) == clean

    spoiled[batch[3]] = spoiled[batch[3]].index_fill(0, torch.tensor([1, 4]), value)
    found = find_clip_bounds(*batch[:index], spoiled, *batch[index + 1 :], BAPOConfig())
    with pytest.raises(ValueError, match=rf"2 in {name}\."):
        read_values(*found)


@pytest.mark.parametrize("value, invalid", [(0.0, False), (0.01, False), (0.6, True), (89.0, True), (1e4, True)])
def test_an_old_log_prob_above_0_beyond_rounding_is_named_and_counted(value, invalid):
    batch = [tensor.clone() for tensor in make_batch(3)]
    batch[0][batch[3]] = batch[0][batch[3]].index_fill(0, torch.tensor([1, 4]), value)
    found = find_clip_bounds(*batch, BAPOConfig())
    if invalid:
        with pytest.raises(ValueError, match=r"above 0, on response tokens of this mini-batch: 2 in old_log_prob\."):
            read_values(*found)
    else:
        read_values(*found)
    batch[0][:], batch[3][:] = value, False
    values_found(*batch, BAPOConfig())


def test_weights_below_the_range_of_float32_still_weigh():
    # exp(-150) is 0 in float32. Shifting all log-probs changes all weights by one factor, and no share.
    config = BAPOConfig(positive_contribution_target=0.45)
    likely, unlikely = (tokens([1.5, 0.5, 1.0], [1.0, 1.0, -2.0], old_log_prob=old) for old in (0.0, -150.0))
    expected = values_found(*likely, config)
    assert 0 < expected["positive_contribution_start"] < 0.5
    assert values_found(*unlikely, config) == pytest.approx(expected, rel=1e-4)


def test_a_clipped_token_however_heavy_takes_nothing_from_the_others():
    # Below c_low the token of 1e20 carries no gradient; what the others add would be lost beside it in float64.
    config = BAPOConfig(contribution="gradient", token_weight="uniform", positive_contribution_target=0.4)
    found = values_found(*tokens([1.0, 0.5, 1.0], [1.0, -1e20, -1.0]), config)
    assert found["positive_contribution_start"] == pytest.approx(0.5)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_float64_advantages_beyond_the_range_of_float32_are_finite(contribution):
    old, log_prob, advantages, mask = tokens([1.0, 0.5, 1.0], [1.0, 1.0, -2.0])
    config = BAPOConfig(contribution=contribution)
    expected = values_found(old, log_prob, advantages, mask, config)
    assert values_found(old, log_prob, advantages.double() * 1e200, mask, config) == pytest.approx(expected)


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        find_clip_bounds(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3), BAPOConfig())


@pytest.mark.parametrize(
    "change, differs",
    [
        (dict(ratio_lower_step=0.1), "lower"),
        (dict(token_weight="uniform"), "token_weight"),
        (dict(ratio_upper_start=1.3, ratio_upper_max=3.1), "upper"),
        (dict(ratio_lower_step=0.0201), "lower"),
    ],
)
def test_statistics_collected_with_another_config_are_refused(change, differs):
    config, other = BAPOConfig(), BAPOConfig(**change)
    statistics = collect_clip_statistics(*make_batch(0), config)
    others = collect_clip_statistics(*make_batch(0), other)
    for use in (lambda: search_clip_bounds(statistics, other), lambda: others + statistics):
        with pytest.raises(ValueError, match=f"collected with {differs}="):
            use()


def test_one_collection_serves_every_target_measure_and_order():
    batch, config = make_batch(0), BAPOConfig()
    statistics = collect_clip_statistics(*batch, config)
    other = BAPOConfig(positive_contribution_target=0.7, contribution="gradient", search_order="lower_first")
    bounds = search_clip_bounds(statistics, other)
    assert read_values(bounds, diagnose(statistics, bounds)) == values_found(*batch, other)


@settings(max_examples=2 * settings.default.max_examples)
@given(configs(), st.integers(0, 2**31), st.integers(1, 7), st.randoms())
def test_bounds_do_not_depend_on_the_cut_or_the_order(config, seed, pieces, random):
    batch = make_batch(seed, rows=7)
    whole = collect_clip_statistics(*batch, config, clip_ratio_c=3.0)
    order = list(range(7))
    random.shuffle(order)
    parts = [
        collect_clip_statistics(*(tensor[rows] for tensor in batch), config, clip_ratio_c=3.0)
        for rows in torch.tensor(order).tensor_split(pieces)
    ]
    total = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(total.tensors, whole.tensors, rtol=1e-12, atol=0)
    one, other = search_clip_bounds(whole, config), search_clip_bounds(total, config)
    assert same_bits(one.low, other.low) and same_bits(one.high, other.high)
    assert one.search_steps.item() == other.search_steps.item()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_float32_ratios_beside_a_candidate_fall_on_its_right_side(sign):
    config = BAPOConfig()
    points = (config.upper if sign > 0 else config.lower).points()
    around = [points.log().float()]
    for direction in (-math.inf, math.inf):
        neighbour = around[0]
        for _ in range(4):
            neighbour = neighbour.nextafter(torch.tensor(direction))
            around.append(neighbour)
    log_prob = torch.stack(around)
    ratio = log_prob.exp().double()
    assert (ratio < points).any(0).all() and (ratio > points).any(0).all()
    batch = torch.zeros_like(log_prob), log_prob, torch.full_like(log_prob, sign), torch.ones_like(log_prob)
    tokens = collect_clip_statistics(*batch, config).tokens
    counts = tokens.positive_tokens if sign > 0 else tokens.negative_tokens
    bucket = torch.bucketize(ratio.view(-1), points, right=sign > 0)
    assert torch.equal(counts, torch.bincount(bucket, minlength=len(counts)).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("token_weight", ["rollout_prob", "uniform"])
def test_the_inputs_stay_as_they_are(dtype, token_weight):
    batch = [tensor.to(dtype) for tensor in make_batch(6)]
    before = [tensor.clone() for tensor in batch]
    find_clip_bounds(*batch, BAPOConfig(token_weight=token_weight), clip_ratio_c=3.0)
    assert all(torch.equal(now, then) for now, then in zip(batch, before, strict=True))


def test_more_tokens_than_one_chunk():
    batch = [tensor.repeat(1000, 1) for tensor in make_batch(7)]
    rows = len(batch[0])
    assert rows * batch[0].shape[1] > 2 * CPU_CHUNK
    whole = collect_clip_statistics(*batch, BAPOConfig(), clip_ratio_c=3.0)
    parts = [
        collect_clip_statistics(*(tensor[start : start + 70] for tensor in batch), BAPOConfig(), clip_ratio_c=3.0)
        for start in range(0, rows, 70)
    ]
    total = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(total.tensors, whole.tensors, rtol=1e-12, atol=0)
    assert whole.tokens.tokens == batch[3].sum()


def test_padding_changes_nothing():
    batch = make_batch(5)
    padded = [torch.nn.functional.pad(tensor, (0, 9)) for tensor in batch]
    found, expected = (values_found(*tensors, BAPOConfig()) for tensors in (padded, batch))
    assert (found["low"], found["high"]) == (expected["low"], expected["high"])
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype):
    # In the inputs' own type the ratio and the weight would be off by 1e-3, and rho with them.
    seen = set()
    for seed in range(20):
        batch = make_batch(seed, rows=12, dtype=dtype)
        low, high, rho, start, steps, _ = sequential_search(*batch, BAPOConfig())
        bounds = values_found(*batch, BAPOConfig())
        assert (bounds["low"], bounds["high"], bounds["search_steps"]) == (low, high, steps)
        assert bounds["positive_contribution"] == pytest.approx(rho, rel=1e-9)
        assert bounds["positive_contribution_start"] == pytest.approx(start, rel=1e-9)
        seen.add(steps)
    assert len(seen) > 2  # at once, on the way, and at the end
