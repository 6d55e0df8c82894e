# SPDX-License-Identifier: Apache-2.0
"""The sentence that says what to do next, in each of its cases."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.batches import make_batch

from bapo import BAPOConfig, collect_clip_statistics, search_clip_bounds
from bapo.search import measure_search_path
from recipe.bapo.advice import IDLE, LOSS, MANY, NEARLY_NOTHING, RARELY, advise, clipped_shares
from recipe.bapo.figures import figures_of

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
    counts |= {"clipfrac_positive": 0.05, "clipfrac_negative": 0.05}  # by BAPO's bounds
    return {**ends, **rho, **measures, **counts, **more}


def said(updates, options=OPTIONS, applied=False, clip_ratio_c=3.0):
    about = {"applied": applied, "clip_ratio_c": clip_ratio_c}
    return advise(updates, options, about, "this run")


def test_the_figures_have_the_start_and_the_highest_rho_of_both_measures():
    config = BAPOConfig(positive_contribution_target=0.3)
    falls_at_the_end = []
    for seed in range(10):
        stats = collect_clip_statistics(*make_batch(seed, rows=8), config, clip_ratio_c=3.0)
        figures = figures_of(stats, config, own_clip=False)
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
        "BAPO would act as fixed bounds [0.9, 3]. The highest rho was 0.350 (median). With "
        "positive_contribution_target=0.35 they would move in about 67% of the updates."
    )
    assert advice.overrides == [line.replace("target=0.4", "target=0.35") for line in SWITCH]


def test_a_target_that_is_always_met_at_the_start_is_raised():
    advice = said([update("met_at_start", 0.43, 0.48), update("met_at_start", 0.45, 0.5)], applied=True)
    assert advice.text == (
        "in 100% of the updates of this run the target 0.4 was met at the start, so BAPO acts as fixed bounds "
        "[0.6, 1.2]. rho at the start was 0.440 (median). With positive_contribution_target=0.46 they would move in "
        "about 100% of the updates."
    )
    assert advice.overrides == [f"++{LOSS}.positive_contribution_target=0.46"]


def test_a_tie_at_the_start_is_not_taken_as_a_target():
    assert "positive_contribution_target=0.51 " in said([update("met_at_start", 0.5, 0.6)]).text


@pytest.mark.parametrize("end, others", [("saturated", "met_at_start"), ("met_at_start", "saturated")])
@pytest.mark.parametrize(
    "number, text", [(19, "in 95% of the updates of"), (18, "in this run the target 0.4 was met at")]
)
def test_an_end_counts_as_the_only_one_from_19_of_20_updates_on(end, others, number, text):
    assert said(number * [update(end)] + (20 - number) * [update(others)]).text.startswith(text)


def test_searches_that_end_at_one_end_or_the_other():
    updates = [update("met_at_start", 0.41, 0.44), update("saturated", 0.37, 0.39)]
    text = said(updates).text
    assert text.startswith(
        "in this run the target 0.4 was met at the start in 50% of the updates and the search saturated in 50%, so "
        "BAPO would act as the bounds [0.6, 1.2] where it was met and as [0.9, 3] where not. With "
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
    assert "No target would be met by moving bounds in even 10% of the updates, with either measure." in advice.text
    assert instead in advice.text and advice.overrides == lines
    assert ("ended with the least entropy of four losses" in advice.text) == (lines == [HIGHER])


def test_the_other_measure_is_tried_where_the_runs_own_moves_nothing():
    updates = [
        update("saturated", 0.39, 0.39, gradient=(0.4, 0.55)),
        update("saturated", 0.38, 0.38, gradient=(0.45, 0.5)),
    ]
    advice = said(updates)
    assert (
        "With positive_contribution_target=0.46 and contribution=gradient they would move in about 100% of the updates."
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
    "or with another one, which the report then names": "they would move in about",
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
    assert clipped_shares(updates, applied=False) == (0.01, 0.05)
    assert clipped_shares([update(None)], applied=False) is None
    fractions = dict(clipfrac_positive=0.5, clipfrac_negative=0.1)  # what BAPO's bounds clip
    assert clipped_shares([update(None, **fractions, tokens=(100, 0, 200))], applied=True) == (0.5, 0.0)


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
    assert said([update(None)]).text == (
        "in this run no token had an advantage, because all responses to a prompt got the same reward. Look at the "
        "rewards, and at how hard the prompts are."
    )


@pytest.mark.parametrize("updates", [[], [{"invalid_tokens": 3.0}]])
def test_a_run_without_a_measured_update(updates):
    assert said(updates).text.startswith("in this run no update could be measured.")


def test_faults_of_the_tokens_are_added():
    updates = [update("met_by_moving", masked_token_fraction=0.001), {"invalid_tokens": 4.0}]
    text = said(updates).text
    assert "0.05% of the tokens in this run had no usable old log-prob" in text
    assert text.endswith("4 log-probs or advantages in this run were not finite: the model or the reward is broken.")
    assert "by moving bounds in 100%" in text
