# SPDX-License-Identifier: Apache-2.0
"""The vectorised search against values by hand and the literal Algorithm 1, and what it must not depend on."""

import math
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from support import oracle
from support.batches import batches, configs, make_batch, searches, values_found

from bapo import (
    BAPOConfig,
    clip_statistics,
    clipped_surrogate_loss,
    collect_clip_statistics,
    diagnose,
    find_clip_bounds,
    read_and_validate,
    search_clip_bounds,
)
from bapo.search import measure_search_path, path_indices


def tokens(ratios, advantages):
    """Make one row of tokens with the given ratios; ``exp(0) = 1`` makes both token weights equal."""
    old = torch.zeros(1, len(ratios), dtype=torch.float64)
    log_prob = torch.tensor([ratios], dtype=torch.float64).log()
    return old, log_prob, torch.tensor([advantages], dtype=torch.float64), torch.ones(1, len(ratios))


def test_three_tokens_by_hand_value():
    # Positive tokens r = 1.5 and 0.5, A = 1; a negative token r = 1, A = -2: N = 2 * max(1, c_low) = 2.
    # P(c) = min(1.5, c) + 0.5. Start c = 1.2: P = 1.7, rho = 1.7 / 3.7 = 0.459. The target 0.48 needs
    # P >= 0.48 / 0.52 * 2 = 1.846, so c >= 1.346: the third step, c = 1.35, rho = 1.85 / 3.85 = 0.4805.
    found = values_found(*tokens([1.5, 0.5, 1.0], [1.0, 1.0, -2.0]), BAPOConfig(positive_contribution_target=0.48))
    assert found["low"] == 0.6 and found["high"] == pytest.approx(1.35)
    assert found["search_steps"] == 3 and not found["saturated"]
    assert found["positive_contribution_start"] == pytest.approx(1.7 / 3.7)
    assert found["positive_contribution"] == pytest.approx(1.85 / 3.85)


def test_three_tokens_by_hand_gradient():
    # A positive token r = 1, A = 1: P_g = 1. Negative tokens r = 0.69 and 1.5, A = -1: N_g = 0.69 + 1.5 while
    # c_low < 0.69, then 1.5. rho = 1 / 3.19 = 0.3135, and 1 / 2.5 = 0.4 from c_low = 0.7 on. c_high changes nothing,
    # so the search runs 36 steps up c_high and 5 up c_low (0.6 + 5 * 0.02 = 0.7).
    config = BAPOConfig(positive_contribution_target=0.39, contribution="gradient")
    found = values_found(*tokens([1.0, 0.69, 1.5], [1.0, -1.0, -1.0]), config)
    assert found["positive_contribution_start"] == pytest.approx(1 / 3.19)
    assert found["positive_contribution"] == pytest.approx(0.4)
    assert found["search_steps"] == 41 and found["low"] == pytest.approx(0.7) and found["high"] == 3.0


@settings(max_examples=30 * settings.default.max_examples)
@given(searches(), st.sampled_from([1, 40, 1 << 15]))
def test_the_search_is_algorithm_1_and_its_diagnostics_are_their_definitions(search, chunk):
    batch, config, clip_ratio_c = search
    before = [tensor.clone() for tensor in batch]
    low, high, rho, start, steps, saturated = oracle.sequential_search(*batch, config, clip_ratio_c)
    expected = oracle.diagnostics(*batch, low, high)
    with mock.patch.object(clip_statistics, "CPU_CHUNK", chunk):
        found = values_found(*batch, config, clip_ratio_c=clip_ratio_c)
    assert [found.pop(name) for name in ("low", "high")] == [low, high]  # bit for bit
    assert [found.pop(name) for name in ("search_steps", "saturated")] == [steps, saturated]
    expected |= {"positive_contribution": rho, "positive_contribution_start": start, "masked_token_fraction": 0}
    outcomes = [found.pop(name) for name in ("met_at_start", "met_by_moving")]
    searched = (batch[2][batch[3].bool()] != 0).any()
    assert outcomes == [searched and steps == 0 and not saturated, searched and steps > 0 and not saturated]
    assert found.pop("positive_contribution_highest") >= max(rho, start) - 1e-12
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for tensor, copy in zip(batch, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=5 * settings.default.max_examples)
@given(searches(), st.floats(0, 1), st.floats(0, 1))
def test_the_entropy_covariance_at_any_bounds_is_its_definition(search, at_low, at_high):
    batch, config, clip_ratio_c = search
    lower, upper = config.lower.grid(), config.upper.grid()
    low, high = lower[round(at_low * (len(lower) - 1))], upper[round(at_high * (len(upper) - 1))]
    stats = collect_clip_statistics(*batch, config, clip_ratio_c)
    ratio, advantages, _, log_prob = oracle.response_tokens(*batch)
    assume(len(ratio) > 0)
    limits = [oracle.rounded(limit, oracle.ratios(*batch[:2]).dtype) for limit in (low, high, clip_ratio_c)]
    expected = oracle.entropy_covariance(*batch, *limits)
    size = log_prob.abs().max() * (ratio * advantages.abs()).sum() / ratio.sum()
    assert stats.entropy_sums(low, high).covariance.item() == pytest.approx(expected, abs=1e-9 * size.item())


def test_the_tie_at_ratio_1_stays_at_the_start_whatever_the_rounding():
    # r = 1, uniform weights, equal lengths, a GRPO group of 1 right and 2 wrong: sum A = 0 up to float32 rounding.
    rows = torch.tensor([[1.0], [0.0], [0.0]])
    advantages = ((rows - rows.mean()) / (rows.std() + 1e-6)).expand(3, 1001)
    old = torch.full((3, 1001), -0.3)
    bounds, _ = find_clip_bounds(old, old, advantages, torch.ones(3, 1001), BAPOConfig(token_weight="uniform"))
    assert bounds.positive_contribution_start.item() == pytest.approx(0.5, abs=1e-7)
    exact = tokens([1.0, 1.0], [1.0, -1.0])
    for above, steps in ((2e-10, 0), (1e-8, 51)):
        config = BAPOConfig(token_weight="uniform", positive_contribution_target=0.5 + above)
        assert find_clip_bounds(*exact, config)[0].search_steps.item() == steps


@pytest.mark.parametrize(
    "ratios, advantages, rho",
    [
        ([1.0, 1.0, math.exp(20)], [1e-6, -1e-6, -1.0], 0.5),  # removed by the dual clip
        ([1.0, 0.5, 1.0], [1.0, -1e20, -1.0], 0.5),  # below c_low
        ([1.0, 9.0, 1.0], [1.0, 1e20, -1.0], 0.5),  # above c_high
    ],
)
def test_a_heavy_token_without_a_gradient_leaves_no_rounding_in_the_others(ratios, advantages, rho):
    config = BAPOConfig(contribution="gradient", token_weight="uniform")
    found = values_found(*tokens(ratios, advantages), config, clip_ratio_c=3.0)
    assert found["positive_contribution_start"] == rho


# These tests check claims of docs/algorithm.md, which names them.


@pytest.mark.parametrize("negatives, steps", [(1, 0), (3, 51)])
def test_at_ratio_1_the_search_stops_at_once_or_saturates(negatives, steps):
    found = values_found(*tokens([1.0] * (1 + negatives), [1.0] + [-1.0] * negatives), BAPOConfig())
    assert (found["search_steps"], found["saturated"]) == (steps, steps == 51)
    assert found["clipfrac_positive"] == found["clipfrac_negative"] == 0


def test_raising_c_low_never_helps_the_value_and_never_harms_the_gradient():
    for seed in range(20):
        ratio, advantages, *_ = oracle.response_tokens(*make_batch(seed, rows=40))
        for kind, falls in (("value", True), ("gradient", False)):
            shares = []
            for low in torch.linspace(0.6, 0.9, 16).tolist():
                p, n = oracle.contribution(ratio, advantages, torch.ones_like(ratio), low, 1.2, kind, None)
                shares.append(p / (p + n))
            assert shares == sorted(shares, reverse=falls) and shares[0] != shares[-1]


@pytest.mark.parametrize("longer, rho", [(1, 0.5), (3, 0.25)])
def test_with_grpo_rho_starts_at_one_half_and_falls_when_wrong_answers_are_longer(longer, rho):
    # A group of 2 right (reward 1) and 2 wrong: advantages of equal size, so that rho is the share of right tokens.
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0]).view(4, 1).expand(4, 30)
    mask = torch.arange(30) < torch.tensor([10, 10, 10 * longer, 10 * longer]).view(4, 1)
    old = torch.full((4, 30), -0.3)
    assert values_found(old, old, advantages, mask, BAPOConfig())["positive_contribution_start"] == pytest.approx(rho)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_the_highest_rho_is_the_largest_of_all_pairs_on_the_path(contribution):
    config = BAPOConfig(contribution=contribution, positive_contribution_target=0.3)
    low, high = config.lower.grid(), config.upper.grid()
    for seed in range(10):
        ratio, adv, old, _ = oracle.response_tokens(*make_batch(seed, rows=8))
        rho = []
        for i, j in zip(*path_indices(config), strict=True):
            p, n = oracle.contribution(ratio, adv, old.exp(), low[j].item(), high[i].item(), contribution, 3.0)
            rho.append(p / (p + n))
        found = values_found(*make_batch(seed, rows=8), config, clip_ratio_c=3.0)
        assert found["positive_contribution_highest"] == pytest.approx(max(rho), rel=1e-9)


@pytest.mark.parametrize("rho0", [0.1, 0.4, 0.9])
def test_eq_8_as_printed_asks_for_a_smaller_share(rho0):
    # Eq. 8 has absolute values of both sums: |P| / |P - N| >= rho0. So P / (P + N) >= rho0 / (1 + 2 * rho0).
    config = BAPOConfig(positive_contribution_target=rho0 / (1 + 2 * rho0), token_weight="uniform")
    high, low = config.upper.grid(), config.lower.grid()
    path = [(low[j].item(), high[i].item()) for i, j in zip(*path_indices(config), strict=True)]
    steps = []
    for seed in range(40):
        old, log_prob, advantages, mask = make_batch(seed, rows=8)
        advantages = torch.where(advantages > 0, advantages * 0.5, advantages)
        ratio, adv, *_ = oracle.response_tokens(old, log_prob, advantages, mask)
        one = torch.ones_like(ratio)
        sums = [oracle.contribution(ratio, adv, one, *bounds, "value", None) for bounds in path]
        reached = [p >= rho0 * abs(p - n) for p, n in sums]
        found = values_found(old, log_prob, advantages, mask, config)
        assert found["saturated"] == (not any(reached))
        assert found["search_steps"] == (reached.index(True) if any(reached) else len(path) - 1)
        steps.append(found["search_steps"])
    assert len(set(steps)) > 2  # met at the start, met by moving, saturated


USES = {
    "search": lambda *batch, clip_ratio_c=None: find_clip_bounds(*batch, BAPOConfig(), clip_ratio_c=clip_ratio_c),
    "loss": partial(clipped_surrogate_loss, low=0.8, high=1.2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_neither_search_nor_loss_can_use_is_refused_by_name(use):
    batch = make_batch(0)
    for wrong in (1.0, 0.5, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"clip_ratio_c={wrong}"):
            use(*batch, clip_ratio_c=wrong)
    for index, name in enumerate(("old_log_prob", "log_prob", "advantages", "response_mask")):
        others = [tensor[:, :2] if other == index else tensor for other, tensor in enumerate(batch)]
        with pytest.raises(ValueError, match=rf"same shape.*{name} \(5, 2\)"):
            use(*others)
    old, log_prob, advantages, mask = (tensor[:, :5] for tensor in batch)
    # With as many tokens as responses, (B,) would broadcast along the wrong dimension.
    for wrong in (advantages[:, 0], advantages[:1], advantages[0, 0]):
        with pytest.raises(ValueError, match=r"advantages may be \(B, 1\), but got: .*advantages \("):
            use(old, log_prob, wrong, mask)
    for shape in ((), (5, 5, 1)):
        with pytest.raises(ValueError, match=r"same shape, \(B, T\) or \(N,\)"):
            use(*(torch.zeros(shape) for _ in batch))
    use(*batch, clip_ratio_c=1.01)


def test_an_advantage_for_each_response_and_packed_tokens_change_nothing():
    batch = make_batch(1, dtype=torch.float64)
    old, log_prob, advantages, mask = batch
    packed = [tensor[mask] for tensor in batch]
    config, results = BAPOConfig(positive_contribution_target=0.45), []
    for tokens in (batch, (old, log_prob, advantages[:, :1], mask), packed):
        stats = collect_clip_statistics(*tokens, config, 3.0)
        bounds = search_clip_bounds(stats, config)
        new = tokens[1].clone().requires_grad_()
        result = clipped_surrogate_loss(tokens[0], new, *tokens[2:], bounds.low, bounds.high, 3.0)
        result.loss.backward()
        # Which packed tokens are one response is not known.
        lengths = (stats.sums.positive_responses.item(), stats.sums.negative_responses.item())
        assert lengths == ((1, 1) if tokens is packed else (1, 2))
        sums = stats.sums._replace(positive_responses=0, negative_responses=0)
        gradient = new.grad if tokens is packed else new.grad[mask]
        results.append([*sums, *vars(bounds).values(), *vars(result).values(), gradient])
    assert bounds.met_by_moving and results[0][-1].count_nonzero() > 20
    for others in results[1:]:
        torch.testing.assert_close(others, results[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("value, invalid", [(0.0, False), (0.5, False), (0.6, True), (1e4, True)])
def test_an_old_log_prob_above_0_beyond_rounding_is_named_and_counted(value, invalid):
    batch = make_batch(3)
    batch[0][batch[3]] = batch[0][batch[3]].index_fill(0, torch.tensor([1, 4]), value)
    found = find_clip_bounds(*batch, BAPOConfig())
    if not invalid:
        read_and_validate(*found)
        return
    with pytest.raises(ValueError, match=r"above 0.5, on response tokens: 2 in old_log_prob\."):
        read_and_validate(*found)


OTHER_SUMS = [dict(ratio_lower_step=0.0201), dict(token_weight="uniform"), dict(ratio_upper_start=1.3)]


@pytest.mark.parametrize("change", OTHER_SUMS)
def test_statistics_collected_with_another_config_are_refused(change):
    config, other = BAPOConfig(), BAPOConfig(**change)
    statistics = collect_clip_statistics(*make_batch(0), config)
    others = collect_clip_statistics(*make_batch(0), other)
    for use in (lambda: search_clip_bounds(statistics, other), lambda: others + statistics):
        with pytest.raises(ValueError, match="These statistics were collected with "):
            use()


def test_one_collection_serves_every_target_measure_and_order():
    batch, config = make_batch(0), BAPOConfig()
    statistics = collect_clip_statistics(*batch, config)
    other = BAPOConfig(positive_contribution_target=0.7, contribution="gradient", search_order="lower_first")
    bounds = search_clip_bounds(statistics, other)
    assert read_and_validate(bounds, diagnose(statistics, bounds)) == values_found(*batch, other)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_many_updates_at_once_give_what_each_gives_to_the_bit(contribution):
    config = BAPOConfig(contribution=contribution, search_order="lower_first", ratio_upper_max=2.0)
    of_each = [collect_clip_statistics(*make_batch(seed), config, clip_ratio_c=1.5) for seed in range(7)]
    sums = clip_statistics.TokenSums(*map(torch.stack, zip(*(one.sums for one in of_each), strict=True)))
    low, high = config.lower.grid()[torch.arange(7)], config.upper.grid()[torch.arange(7) + 3]

    def derived(stats, low, high):
        path = measure_search_path(stats, config)
        of_signs = *stats.tokens_by_sign, *stats.weight_by_sign, *stats.clipped_tokens(low, high)
        return [*of_signs, *stats.contributions(contribution), path.p, path.n, path.positive_contribution]

    found = derived(clip_statistics.ClipStatistics(sums, config), low, high)
    expected = [derived(one, *bounds) for one, *bounds in zip(of_each, low, high, strict=True)]
    for one, others in zip(found, zip(*expected, strict=True), strict=True):
        assert torch.equal(one, torch.stack(others)) and one.unique(dim=0).shape[0] > 4


@settings(max_examples=3 * settings.default.max_examples)
@given(batches(), configs(), st.integers(1, 7), st.randoms())
def test_bounds_do_not_depend_on_the_cut_or_the_order(batch, config, pieces, random):
    whole = collect_clip_statistics(*batch, config, clip_ratio_c=3.0)
    order = list(range(len(batch[0])))
    random.shuffle(order)
    parts = [
        collect_clip_statistics(*(tensor[rows] for tensor in batch), config, clip_ratio_c=3.0)
        for rows in torch.tensor(order, dtype=torch.long).tensor_split(pieces)
    ]
    total = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(total.sums, whole.sums, rtol=1e-12, atol=0)
    one, other = search_clip_bounds(whole, config), search_clip_bounds(total, config)
    assert [one.low, one.high, one.search_steps] == [other.low, other.high, other.search_steps]
