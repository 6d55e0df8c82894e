# SPDX-License-Identifier: Apache-2.0
"""The sentence that says what to do next, in each of its cases."""

from dataclasses import asdict

import pytest

from bapo import BAPOConfig
from recipe.bapo.advice import LOSS, advise

OPTIONS = asdict(BAPOConfig())
SWITCH = [
    f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
    f"{LOSS}.loss_mode=bapo",
    f"++{LOSS}.positive_contribution_target=0.4",
    "actor_rollout_ref.actor.clip_ratio_c=3.0",
]


def update(end, start=0.38, highest=0.42, **more):
    """Make the values of an update that ends in one of the three ways."""
    ends = {name: float(name == end) for name in ("met_at_start", "met_by_moving", "saturated")}
    rho = {"positive_contribution_start": start, "positive_contribution_highest": highest}
    return {**ends, **rho, **more}


def said(updates, options=OPTIONS, applied=False, clip_ratio_c=3.0):
    about = {"applied": applied, "clip_ratio_c": clip_ratio_c}
    return advise(updates, options, about, "this run")


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
    expected = [line.replace("clip_ratio_c=3.0", "clip_ratio_c=null") for line in SWITCH]
    assert said([update("met_by_moving")], clip_ratio_c=None).overrides == expected


def test_nothing_changes_while_bapo_moves_its_bounds():
    advice = said([update("met_by_moving")], applied=True)
    assert advice.text.endswith("saturated in 0% of the updates. There is nothing to change.")
    assert advice.overrides == []


def test_a_target_that_is_always_saturated_is_lowered():
    updates = [update("saturated", 0.30, 0.35), update("saturated", 0.32, 0.36), update("saturated", 0.34, 0.345)]
    advice = said(updates)
    assert advice.text == (
        "in 100% of the updates of this run the search was saturated: no pair of bounds reached the target 0.4, so "
        "BAPO would act as fixed bounds [0.9, 3]. The highest rho was 0.350 (median). With "
        "positive_contribution_target=0.35 bounds would move in about 67% of the updates."
    )
    assert advice.overrides == [line.replace("target=0.4", "target=0.35") for line in SWITCH]


def test_a_target_that_is_always_met_at_the_start_is_raised():
    advice = said([update("met_at_start", 0.43, 0.48), update("met_at_start", 0.45, 0.5)], applied=True)
    assert advice.text == (
        "in 100% of the updates of this run the target 0.4 was met at the start, so BAPO acts as fixed bounds "
        "[0.6, 1.2]. rho at the start was 0.440 (median). With positive_contribution_target=0.46 bounds would move in "
        "about 100% of the updates."
    )
    assert advice.overrides == [f"++{LOSS}.positive_contribution_target=0.46"]


def test_a_tie_at_the_start_is_not_taken_as_a_target():
    assert "positive_contribution_target=0.51 " in said([update("met_at_start", 0.5, 0.6)]).text


def test_searches_that_end_at_one_end_or_the_other():
    updates = [update("met_at_start", 0.41, 0.44), update("saturated", 0.37, 0.39)]
    text = said(updates).text
    assert text.startswith(
        "in this run the target 0.4 was met at the start in 50% of the updates and the search saturated in 50%, so "
        "BAPO would act as the bounds [0.6, 1.2] where it was met and as [0.9, 3] where not. With "
        "positive_contribution_target="
    )


@pytest.mark.parametrize(
    "applied, clipped, instead",
    [
        (False, {}, "Leave the loss as it is."),
        (False, {"own_clipfrac_positive": 0.009, "own_clipfrac_negative": 0.5}, "Leave the loss as it is."),
        (False, {"own_clipfrac_positive": 0.021, "own_clipfrac_negative": 0.0}, "clips 2.1% of the tokens with A > 0"),
        (True, {"clipfrac_positive": 0.021, "clipfrac_negative": 0.0}, "Use fixed bounds"),
    ],
)
def test_bounds_that_hardly_change_rho_need_no_search(applied, clipped, instead):
    updates = [update("saturated", 0.3941, 0.3945, **clipped), update("met_at_start", 0.4121, 0.4124, **clipped)]
    advice = said(updates, applied=applied)
    assert (
        "No target would be met by moving bounds in even 10% of the updates, because the bounds hardly change rho here."
    ) in advice.text
    assert instead in advice.text and advice.overrides == []


def test_a_loss_that_hardly_clips_is_left_alone():
    own = {"own_clipfrac_positive": 0.0004, "own_clipfrac_negative": 0.0}
    advice = said([update("met_by_moving", **own)])
    assert "loss clipped 0.04% of the tokens with A > 0 and 0.00% of those with A < 0. Hardly any bound" in advice.text
    assert advice.overrides == []
    own["own_clipfrac_negative"] = 0.02
    assert said([update("met_by_moving", **own)]).overrides == SWITCH


def test_fixed_bounds_have_nothing_to_search():
    options = asdict(BAPOConfig(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2))
    advice = said([update("saturated")], options)
    assert advice.text == "in this run there was nothing to search, because both bounds are fixed."


def test_updates_without_advantages_point_to_the_rewards():
    assert said([update(None)]).text == "in this run no token had an advantage: look at the rewards."


@pytest.mark.parametrize("updates", [[], [{"invalid_tokens": 3.0}]])
def test_a_run_without_a_measured_update(updates):
    assert said(updates).text.startswith("in this run no update could be measured.")


def test_faults_of_the_tokens_are_added():
    updates = [update("met_by_moving", masked_token_fraction=0.001), {"invalid_tokens": 4.0}]
    text = said(updates).text
    assert "0.05% of the tokens in this run had no usable old log-prob" in text
    assert text.endswith("4 log-probs or advantages in this run were not finite: the model or the reward is broken.")
    assert "by moving bounds in 100%" in text
