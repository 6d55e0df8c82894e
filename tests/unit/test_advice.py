# SPDX-License-Identifier: Apache-2.0
"""The sentence that says what to do next, in each of its cases."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.batches import make_batch

from bapo import BAPOConfig, collect_clip_statistics, search_clip_bounds
from bapo.bounds import MAX_MASKED_FRACTION
from bapo.search import measure_search_path
from recipe.bapo.hook.advice import (
    IDLE,
    LEAST_UPDATES,
    LOSS,
    MANY,
    MAX_MASKED,
    NEARLY_NOTHING,
    RARELY,
    advise,
    clipped_by_bounds,
    clipped_by_own_loss,
    find_stable_target,
)
from recipe.bapo.hook.advice_inputs import advice_inputs

OPTIONS = asdict(BAPOConfig())
HIGHER = "actor_rollout_ref.actor.clip_ratio_high=2.0"
SWITCH = [
    f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
    f"{LOSS}.loss_mode=bapo",
    f"++{LOSS}.positive_contribution_target=0.4",
    "actor_rollout_ref.actor.clip_ratio_c=3.0",
]


def update(end, start=0.38, highest=0.42, gradient=(0.1, 0.1), clipped=None, tokens=(100, 100, 200), **more):
    """Make the figures of an update that ends in one of the three ways.

    ``gradient``: rho at the start and the highest with contribution=gradient. ``clipped``: the tokens of each sign that
    the run's loss clips. ``tokens``: those with A > 0, with A < 0, and of all.
    """
    ends = {name: float(name == end) for name in ("met_at_start", "met_by_moving", "saturated")}
    rho = {"positive_contribution_start": start, "positive_contribution_highest": highest}
    measures = {"value_start": start, "value_highest": highest}
    measures |= dict(zip(("gradient_start", "gradient_highest"), gradient, strict=True))
    counts = dict(zip(("positive_tokens", "negative_tokens", "response_tokens"), tokens, strict=True))
    if clipped is not None:
        counts |= dict(zip(("clipped_positive", "clipped_negative"), clipped, strict=True))
    counts |= {"clipfrac_positive": 0.05, "clipfrac_negative": 0.05, "beyond_upper_start": 0}  # by BAPO's bounds
    return {**ends, **rho, **measures, **counts, **more}


def said(updates, options=OPTIONS, applied=False, clip_ratio_c=3.0, times=20):
    """Return the advice on these updates, made again and again, each on a rollout batch of its own."""
    about = {"applied": applied, "clip_ratio_c": clip_ratio_c}
    return advise(times * list(updates), options, about, "this run")


def test_the_figures_have_the_start_and_the_highest_rho_of_both_measures():
    config = BAPOConfig(positive_contribution_target=0.3)
    falls_at_the_end = []
    for seed in range(10):
        stats = collect_clip_statistics(*make_batch(seed, rows=8), config, clip_ratio_c=3.0)
        figures = advice_inputs(stats, config, own_clip=False)
        for measure in ("value", "gradient"):
            of_measure = replace(config, contribution=measure)
            found = search_clip_bounds(stats, of_measure)
            assert figures[f"{measure}_start"] == found.positive_contribution_start
            assert figures[f"{measure}_highest"] == found.positive_contribution_highest
            last = measure_search_path(stats, of_measure).positive_contribution[-1]
            falls_at_the_end.append(bool(last < found.positive_contribution_highest))
    assert any(falls_at_the_end)  # the highest is not simply the last


def test_bounds_that_would_move_are_worth_a_try():
    advice = said([update("met_by_moving"), update("met_at_start", start=0.41)])
    assert advice.text == (
        "in this run BAPO would move the bounds: its target 0.4 would be met at the start in 50%, by moving bounds in "
        "50%, saturated in 0% of the updates. Try it."
    )
    assert advice.overrides == SWITCH


def test_a_try_is_told_with_what_it_costs():
    updates = [
        update("met_by_moving", extra_forward=1.0, redone=0.0),
        update("met_by_moving", extra_forward=0.0, redone=0.5),
    ]
    assert said(updates).text.endswith("Try it. Updates would take about 1.40 times as long.")


def test_the_runs_own_dual_clip_stays():
    expected = [line.replace("clip_ratio_c=3.0", "clip_ratio_c=10.0") for line in SWITCH]
    assert said([update("met_by_moving")], clip_ratio_c=10.0).overrides == expected
    # In a run without a dual clip no line sets it: preflight would refuse clip_ratio_c=null.
    assert said([update("met_by_moving")], clip_ratio_c=None).overrides == SWITCH[:-1]


def test_nothing_changes_while_bapo_moves_its_bounds():
    advice = said([update("met_by_moving")], applied=True)
    assert advice.text.endswith("saturated in 0% of the updates. There is nothing to change.")
    assert advice.overrides == []


def test_a_target_that_is_always_saturated_is_lowered():
    updates = [update("saturated", 0.30, 0.35), update("saturated", 0.32, 0.36), update("saturated", 0.34, 0.345)]
    advice = said(updates)
    assert advice.text == (
        "in 100% of the updates of this run the search was saturated: no pair of bounds reached the target 0.4, so "
        "BAPO would act as fixed bounds [0.9, 3]. The highest rho was 0.350 (median). A lower bound of 0.9 stops the "
        "suppression of each token with A < 0 whose ratio has fallen below 0.9, and a published run that stayed there "
        "collapsed (docs/monitor.md#saturation). Do not switch with this target. positive_contribution_target=0.35, "
        "chosen on the 30 earlier updates, would move bounds in 20 of these and in 20 of the 30 later ones."
    )
    assert advice.overrides == [line.replace("target=0.4", "target=0.35") for line in SWITCH]
    in_a_run_with_bapo = said(updates, applied=True)
    assert "Lower the target, or go back to your loss. positive_" in in_a_run_with_bapo.text
    assert in_a_run_with_bapo.overrides == [f"++{LOSS}.positive_contribution_target=0.35"]


def test_a_target_that_is_always_met_at_the_start_is_raised():
    advice = said([update("met_at_start", 0.43, 0.48), update("met_at_start", 0.45, 0.5)], applied=True)
    assert advice.text == (
        "in 100% of the updates of this run the target 0.4 was met at the start, so BAPO acts as fixed bounds "
        "[0.6, 1.2]. rho at the start was 0.440 (median). positive_contribution_target=0.46, chosen on the 20 earlier "
        "updates, would move bounds in 20 of these and in 20 of the 20 later ones."
    )
    assert advice.overrides == [f"++{LOSS}.positive_contribution_target=0.46"]


def test_a_tie_at_the_start_is_not_taken_as_a_target():
    assert "positive_contribution_target=0.51," in said([update("met_at_start", 0.5, 0.6)]).text


def batches(*rho, updates=4):
    """Make updates on rollout batches; each has a rho at the start and a highest rho."""
    return [update("saturated", *one, update=k) for one in rho for k in range(updates)]


def test_a_target_that_moves_bounds_only_where_it_was_chosen_is_not_named():
    stays, drifts = [(0.3, 0.35)] * 6, [(0.3, 0.35)] * 3 + [(0.2, 0.25)] * 3
    assert said(batches(*stays), times=1).overrides
    advice = said(batches(*drifts), times=1)
    assert advice.overrides == [] and advice.text.endswith(
        "No other target is stable: positive_contribution_target=0.35, chosen on the 12 earlier updates, would move "
        "bounds in 12 of these, but only in 0 of the 12 later ones. Leave the loss as it is."
    )


def test_the_halves_are_of_whole_rollout_batches():
    for updates, counts in ((batches(*[(0.3, 0.35)] * 3, updates=10), (10, 20)), (batches((0.3, 0.35)) * 6, (12, 12))):
        assert find_stable_target(updates, "value", 0.4).updates == counts
    (one_batch,) = [batches((0.3, 0.35), updates=40)]
    assert not find_stable_target(one_batch, "value", 0.4).enough
    assert said(one_batch, times=1).overrides == []


@pytest.mark.parametrize("number, named", [(2, False), (3, True)])
def test_a_target_needs_some_moved_updates_in_each_half(number, named):
    half = [update("saturated", 0.3, 0.35)] * number + [update("saturated", 0.3, 0.301)] * (14 - number)
    assert bool(said(2 * half, times=1).overrides) == named


@pytest.mark.parametrize("number", [1, LEAST_UPDATES - 1, LEAST_UPDATES])
def test_a_few_updates_are_not_judged(number):
    text = said([update("met_by_moving")], times=number).text
    few = f"in this run only {number} update{'s'[: number - 1]} had an advantage, and {LEAST_UPDATES} are needed"
    assert text.startswith(few if number < LEAST_UPDATES else "in this run BAPO would move the bounds")


@pytest.mark.parametrize("end, others", [("saturated", "met_at_start"), ("met_at_start", "saturated")])
@pytest.mark.parametrize(
    "number, text", [(19, "in 95% of the updates of"), (18, "in this run the target 0.4 was met at")]
)
def test_an_end_counts_as_the_only_one_from_19_of_20_updates_on(end, others, number, text):
    assert said(number * [update(end)] + (20 - number) * [update(others)], times=1).text.startswith(text)


def test_searches_that_end_at_one_end_or_the_other():
    updates = [update("met_at_start", 0.41, 0.44), update("saturated", 0.37, 0.39)]
    text = said(updates).text
    assert text.startswith(
        "in this run the target 0.4 was met at the start in 50% of the updates and the search saturated in 50%, so "
        "BAPO would act as the bounds [0.6, 1.2] where it was met and as [0.9, 3] where not. "
        "positive_contribution_target="
    )


@pytest.mark.parametrize(
    "applied, clipped, instead, lines",
    [
        (False, None, "Leave the loss as it is.", []),
        (False, (0.9, 50), "Leave the loss as it is.", []),
        (False, (2, 0), "clips 2.0% of the tokens with A > 0: to keep these, raise its upper", [HIGHER]),
        (True, (2, 0), "Use fixed bounds, which need no search", []),
    ],
)
def test_bounds_that_hardly_change_rho_need_no_search(applied, clipped, instead, lines):
    updates = [
        update(end, *rho, clipped=clipped)
        for end, *rho in (("saturated", 0.3941, 0.3945), ("met_at_start", 0.4121, 0.4124))
    ]
    advice = said(updates, applied=applied)
    assert "No target would move bounds in even 10% of the updates, with either measure." in advice.text
    assert instead in advice.text and advice.overrides == lines
    assert ("ended with the least entropy of four losses" in advice.text) == (lines == [HIGHER])


def test_the_other_measure_is_tried_where_the_runs_own_moves_nothing():
    updates = [
        update("saturated", 0.39, 0.39, gradient=(0.4, 0.55)),
        update("saturated", 0.38, 0.38, gradient=(0.45, 0.5)),
    ]
    advice = said(updates)
    assert (
        "positive_contribution_target=0.46 and contribution=gradient, chosen on the 20 earlier updates, would move "
        "bounds in 20 of these and in 20 of the 20 later ones."
    ) in advice.text
    assert advice.overrides == [
        *(line.replace("=0.4", "=0.46") if "target=" in line else line for line in SWITCH[:3]),
        f"++{LOSS}.contribution=gradient",
        SWITCH[3],
    ]
    assert said(updates, applied=True).overrides == [
        f"++{LOSS}.positive_contribution_target=0.46",
        f"++{LOSS}.contribution=gradient",
    ]


def test_a_loss_that_hardly_clips_is_left_alone():
    advice = said([update("met_by_moving", clipped=(0.05, 0)), update("met_by_moving", clipped=(0.03, 0))])
    assert "loss clipped 0.04% of the tokens with A > 0 and 0.00% of those with A < 0. Hardly any bound" in advice.text
    assert advice.overrides == []
    assert said([update("met_by_moving", clipped=(0.04, 2))]).overrides == SWITCH


# The rows of the README's table by which a monitored run is judged, in their order, and what the advice then says.
ROWS = {
    f"clips less than {100 * NEARLY_NOTHING:g} % of the tokens of each sign": "leave the loss as it is",
    f"BAPO's bounds would move in {100 * RARELY:g} % of the updates or more": "Try it.",
    "or with another one, which the report then names": "would move bounds in",
    f"clips {100 * MANY:g} % or more of the tokens with A > 0": "raise its upper bound alone",
    "| none of these |": "Leave the loss as it is.",
}


@pytest.mark.parametrize("clipped", [(0, 0), (0.5, 0.5), (7, 0)])
@pytest.mark.parametrize("moves", ["with its target", "with another", "never"])
def test_the_readmes_table_judges_in_the_same_order(clipped, moves):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    places = [text.index(row) for row in ROWS]
    assert places == sorted(places)
    rho = {"with its target": (0.38, 0.42), "with another": (0.3, 0.35), "never": (0.3, 0.301)}[moves]
    end = "met_by_moving" if moves == "with its target" else "saturated"
    fits = [clipped == (0, 0), moves == "with its target", moves == "with another", clipped[0] >= 1, True]
    expected = list(ROWS.values())[fits.index(True)]
    assert expected in said([update(end, *rho, clipped=clipped)]).text
    assert f"{100 * IDLE:g} % or more of its response tokens have no advantage" in text


def test_clipped_shares_are_of_all_tokens_and_no_mean_of_updates():
    updates = [
        update(None, clipped=(10, 0), tokens=(100, 50, 200)),
        update(None, clipped=(0, 5), tokens=(900, 50, 999)),
    ]
    assert clipped_by_own_loss(updates) == (0.01, 0.05)
    assert clipped_by_own_loss([update(None)]) is None
    fractions = dict(clipfrac_positive=0.5, clipfrac_negative=0.1)  # what BAPO's bounds clip
    assert clipped_by_bounds([update(None, **fractions, tokens=(100, 0, 200))]) == (0.5, 0.0)


@pytest.mark.parametrize("positive, told", [(71, False), (20, True)])
def test_tokens_without_an_advantage_are_told(positive, told):
    text = said([update("met_by_moving", tokens=(positive, 1, 100))]).text
    assert text.startswith("in this run 79% of the response tokens had no advantage") == told
    assert ("rollout.n" in text) == told
    assert (" In this run BAPO would move the bounds" in text) == told  # only after what is to be changed first


def test_fixed_bounds_have_nothing_to_search():
    options = asdict(BAPOConfig(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2))
    advice = said([update("saturated")], options)
    assert advice.text == "in this run there was nothing to search, because both bounds are fixed."


def test_updates_without_advantages_point_to_the_rewards():
    assert said([update(None, tokens=(0, 0, 200))]).text == (
        "in this run no token had an advantage, because all responses to a prompt got the same reward. Look at the "
        "rewards, and at how hard the prompts are."
    )


@pytest.mark.parametrize("updates", [[], [{}]])
def test_a_run_without_a_measured_update(updates):
    assert said(updates).text.startswith("in this run no update could be measured.")


# What is wrong with the numbers themselves, in the order in which it is said, and how the text begins.
BROKEN = {
    "not finite": ({"invalid_tokens": 0.2}, "in this run 4 log-probs or advantages were not finite"),
    "unusable": (
        dict(masked_token_fraction=0.39),
        "in this run 20 of 20 updates had old log-probs that cannot be used (NaN, infinite, or above 0.5) on more than "
        "0.1% of their response tokens, at most on 39.0%. BAPO would end the run at the first of them. With bypass_",
    ),
    "one sign": (dict(negative_tokens=0), "in this run no token had A < 0. With a working baseline advantages have"),
    "other sign": (dict(positive_tokens=0), "in this run no token had A > 0. With a working baseline"),
    "ratio": (
        dict(on_policy=1, beyond_upper_start=35),
        "in this run the old log-probs of 20 updates were computed by the same weights, so their ratios should be 1, "
        "but 35.0% of the tokens with A > 0 had a ratio of 1.2 or more",
    ),
}


@pytest.mark.parametrize("first", BROKEN)
def test_broken_numbers_are_told_before_any_advice(first):
    changes, text = BROKEN[first]
    for clipped in (None, (0, 0), (50, 50)):
        advice = said([update("met_by_moving", clipped=clipped, **changes)])
        assert advice.text.startswith(text) and advice.broken and advice.overrides == []
        assert advice.text.endswith(("before you look at any bound.", "bound (docs/silent_faults.md)."))
    for later in list(BROKEN)[list(BROKEN).index(first) + 1 :]:
        if {first, later} != {"one sign", "other sign"}:  # without both there is no advantage at all
            assert said([update("met_by_moving", **BROKEN[later][0] | changes)]).text.startswith(text)


def test_updates_that_are_not_finite_are_told_where_none_was_measured():
    assert said([{"invalid_tokens": 3.0}], times=1).text.startswith("in this run 3 log-probs or advantages were not")


def test_a_run_with_only_unusable_tokens_is_not_one_of_equal_rewards():
    advice = said([update(None, tokens=(0, 0, 0), masked_token_fraction=1.0)])
    assert "at most on 100.0%" in advice.text and "same reward" not in advice.text and advice.broken


@pytest.mark.parametrize(
    "changes",
    [
        dict(on_policy=1, beyond_upper_start=1),  # what rounding does
        dict(on_policy=0, beyond_upper_start=35),
        dict(beyond_upper_start=35),  # verl's own trainer does not say which updates are on-policy
        dict(masked_token_fraction=MAX_MASKED),
    ],
)
def test_what_is_no_fault_is_not_told(changes):
    advice = said([update("met_by_moving", **changes)])
    assert advice.text.startswith("in this run BAPO would move the bounds") and not advice.broken


def test_one_sided_batches_are_no_fault_where_others_have_both_signs():
    updates = [update("met_by_moving", tokens=(100, 0, 200)), update("met_by_moving", tokens=(0, 100, 200))]
    assert not said(updates).broken


def test_the_worker_ends_where_the_advice_says_so():
    assert MAX_MASKED == MAX_MASKED_FRACTION


def test_a_few_unusable_tokens_are_added():
    text = said([update("met_by_moving", masked_token_fraction=0.0005), update("met_by_moving")]).text
    assert "by moving bounds in 100%" in text
    assert text.endswith(
        "0.025% of the tokens in this run had no usable old log-prob (NaN, infinite, or above 0.5), and "
        "the search left them out."
    )
