# SPDX-License-Identifier: Apache-2.0
"""The sentence on what was measured: which kind it is, the numbers that it rests on, and the lines that switch.

Conditions of a user's run that these tests have: the worker on a stand-in engine, a record and its report. They lack
verl's trainer (tests/stack/test_regimes.py) and a real model (tests/actor).
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.actor import actor_config
from support.batches import make_batch
from support.oracle import response_tokens, sequential_search
from support.stand_in import make_worker, train_call

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig, collect_clip_statistics
from bapo.bounds import MAX_MASKED_FRACTION
from recipe.bapo.hook.verdict import (
    EVERY,
    LEAST_UPDATES,
    LOSS,
    MAX_FAR,
    MAX_MASKED,
    NEARLY_NOTHING,
    clipped_by_bounds,
    clipped_by_own_loss,
    judge,
)
from recipe.bapo.hook.verdict_inputs import verdict_inputs
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from verl.utils.config import omega_conf_to_dataclass

TARGET = f"{LOSS}._target_=recipe.bapo.policy_loss."


def update(end, clipped=None, tokens=(100, 100, 200), far=0, **more):
    """Make the numbers of an update that ends in one of the three ways.

    ``tokens``: those with A > 0, with A < 0, and of all. ``clipped``: those of each sign that the run's loss clips.
    """
    ends = {name: float(name == end) for name in ("met_at_start", "met_by_moving", "saturated")}
    counts = dict(zip(("positive_tokens", "negative_tokens", "response_tokens"), tokens, strict=True))
    if clipped is not None:
        counts |= dict(zip(("clipped_positive", "clipped_negative"), clipped, strict=True))
    return {**ends, **counts, "clipfrac_positive": 0.05, "clipfrac_negative": 0.05, "far_from_1": far, **more}


def verdict_on(updates, config=None, times=20, **about):
    return judge(times * list(updates), config or BAPOConfig(), about, "this run")


def percents(text):
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_the_shares_of_the_three_ends_are_told_with_what_the_loss_clips_and_the_cost():
    ends = ["met_by_moving", "met_at_start", "met_at_start", "saturated"]
    updates = [update(end, clipped=(2, 3), on_policy=0, extra_forward=1.0, redone=0.1) for end in ends]
    verdict = verdict_on(updates)
    assert verdict.kind == "bounds" and percents(verdict.text) == [25, 50, 25, 2, 3]
    assert "would move" in verdict.text and "[0.6, 1.2]" in verdict.text and "about 1.40 times" in verdict.text
    with_bapo = verdict_on(updates, applied=True)
    assert percents(with_bapo.text) == [25, 50, 25, 5, 5] and "would" not in with_bapo.text


def test_what_is_switched_on_is_what_was_measured():
    """Every option that is not at its default is in the lines, and verl builds the config from them."""
    measured = BAPOConfig(
        0.46, contribution="value", token_weight="uniform", ratio_upper_max=2.0, ratio_lower_step=0.05
    )
    for config in (measured, replace(measured, contribution="gradient", search_order="lower_first"), BAPOConfig()):
        lines = verdict_on([update("met_by_moving")], config).switch
        keys = dict(line.removeprefix("++").removeprefix(f"{LOSS}.").split("=", 1) for line in lines)
        built = omega_conf_to_dataclass(OmegaConf.from_dotlist([f"{key}={value}" for key, value in keys.items()]))
        assert isinstance(built, BAPOPolicyLossConfig)
        assert {name: getattr(built, name) for name in vars(config)} == vars(config)
    assert len(lines) == 2 == len(verdict_on([update("met_by_moving")], BAPOConfig(bound_scope="micro_batch")).switch)


def test_the_way_back_from_bapo_is_verls_default_loss_monitored():
    lines = verdict_on([update("saturated")], applied=True).switch
    keys = dict(line.removeprefix(f"{LOSS}.").split("=", 1) for line in lines)
    assert isinstance(omega_conf_to_dataclass(OmegaConf.create(keys)), MonitorConfig)


@pytest.mark.parametrize(
    "clipped, kind", [((0.09, 0.0), "hardly clips"), ((0.11, 0.0), "bounds"), ((0.0, 2), "bounds")]
)
def test_a_loss_that_clips_hardly_anything_of_either_sign(clipped, kind):
    verdict = verdict_on([update("met_by_moving", clipped=clipped, on_policy=0)])
    assert verdict.kind == kind and bool(verdict.switch) == (kind == "bounds")
    assert percents(verdict.text)[-2:] == list(clipped)


def test_a_loss_that_caps_is_not_said_to_clip():
    text = verdict_on([update("met_by_moving", clipped=(5, 5))], own_clip={"kind": "cap"}).text
    assert "capped 5.0%" in text and "clipped" not in text


def test_the_bounds_of_bapo_are_its_loss():
    """Whose own limits, if any, do not apply."""
    updates = [update("met_at_start", clipfrac_positive=0.0, clipfrac_negative=0.0005)]
    assert verdict_on(updates, applied=True).kind == "hardly clips"


@pytest.mark.parametrize("number", [0, 1, LEAST_UPDATES - 1, LEAST_UPDATES])
def test_a_few_updates_are_not_judged(number):
    verdict = verdict_on(number * [update("saturated")] + [update(None, tokens=(0, 0, 200))], times=1)
    assert (verdict.kind == "few") == (number < LEAST_UPDATES)
    assert verdict.kind != "few" or f"only {number} update" in verdict.text and not verdict.switch


# What makes the numbers unusable, the most basic first, and a number that is said of it.
UNUSABLE = {
    "not finite": ({"invalid_tokens": 0.2}, "4 log-probs or advantages were not finite"),
    "no old log-probs": (dict(masked_token_fraction=0.39), "at most of 39.0%"),
    "ratios": (dict(on_policy=1, far=35), "17.5% of their tokens"),
    "gradient": (dict(grad_norm=0.0), "exactly 0 in all 20 updates"),
}


@pytest.mark.parametrize("first", UNUSABLE)
def test_unusable_numbers_are_told_before_anything_else(first):
    changes, said = UNUSABLE[first]
    for clipped in (None, (0, 0), (50, 50)):
        verdict = verdict_on([update("met_by_moving", clipped=clipped, **changes)])
        assert verdict.kind == "unusable" and said in verdict.text and not verdict.switch
    for later in list(UNUSABLE)[list(UNUSABLE).index(first) + 1 :]:
        assert said in verdict_on([update("met_by_moving", **UNUSABLE[later][0] | changes)]).text


@pytest.mark.parametrize(
    "changes",
    [
        dict(on_policy=1, far=200 * MAX_FAR),
        dict(on_policy=0, far=100),  # an asynchronous trainer, in which ratios need not be 1
        dict(masked_token_fraction=MAX_MASKED),
        dict(tokens=(0, 100, 200)),  # an estimator such as grpo_passk has one sign by design
        dict(tokens=(100, 0, 200)),
    ],
)
def test_what_is_no_fault_is_not_told(changes):
    assert verdict_on([update("met_by_moving", **changes)]).kind == "bounds"


def test_one_gradient_that_is_not_zero_is_enough():
    updates = [update("saturated", grad_norm=0.0)] * 9 + [update("saturated", grad_norm=0.1)]
    assert verdict_on(updates, times=1).kind == "bounds"
    of_no_advantage = update(None, tokens=(0, 0, 200), grad_norm=0.3)  # by an entropy bonus
    assert verdict_on([updates[0]] * 9 + [of_no_advantage], times=1).kind == "unusable"


def test_what_the_trainer_does_not_tell_was_not_checked():
    first, second = update("met_at_start", update=0, far=30), update("met_at_start", update=1, far=90)
    text = verdict_on([first, second]).text
    assert "was not checked" in text and "15.0% were above" in text
    assert "was not checked" in verdict_on([update("met_at_start", clipped=(0, 0))]).text
    assert "was not checked" not in verdict_on([first | {"on_policy": 0}, second]).text


def test_shares_are_of_all_tokens_and_no_mean_of_updates():
    counts = ((10, 0), (100, 50, 200)), ((0, 5), (900, 50, 999))
    updates = [update(None, clipped=clipped, tokens=tokens) for clipped, tokens in counts]
    assert clipped_by_own_loss(updates) == (0.01, 0.05)
    assert clipped_by_own_loss([update(None)]) is None
    fractions = dict(clipfrac_positive=0.5, clipfrac_negative=0.1)  # what BAPO's bounds clip
    assert clipped_by_bounds([update(None, **fractions, tokens=(100, 0, 200))]) == (0.5, 0.0)


def test_the_worker_ends_where_the_verdict_says_so():
    assert MAX_MASKED == MAX_MASKED_FRACTION


@pytest.mark.parametrize("factor, far", [(1.6, 1.0), (1 / 1.6, 1.0), (1.19, 0.0), (1 / 1.19, 0.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_ratios_far_from_1_are_counted_on_either_side_and_for_either_sign(factor, far, sign):
    old, _, advantages, mask = make_batch(3, rows=8, zero_advantage=0.2)
    batch = old, old + math.log(factor), sign * advantages.abs(), mask
    inputs = verdict_inputs(collect_clip_statistics(*batch, BAPOConfig()), own_clip=False)
    ratio, advantage, *_ = response_tokens(*batch)
    with_advantage = int((advantage != 0).sum())
    assert inputs["far_from_1"] == far * with_advantage and 0 < with_advantage < len(ratio)
    assert inputs["positive_tokens"] + inputs["negative_tokens"] == with_advantage


@pytest.mark.parametrize("config", [MonitorConfig, BAPOPolicyLossConfig])
def test_the_worker_says_that_first_ratios_are_not_1(monkeypatch, capsys, config):
    """Log-probs that are shifted by a token, with our trainer's mark that all first ratios must be 1."""
    worker = make_worker(actor_config(config(), clip_ratio_c=3.0), monkeypatch)
    for call in range(EVERY):
        old, _, advantages, mask = make_batch(call, rows=12)
        batch = old, old.roll(1, dims=1), advantages, mask
        train_call(worker, batch, batch, bapo_on_policy_first_update=True)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the numbers cannot be used" in said and "of 10 updates" in said


def test_the_worker_says_that_nothing_was_trained(monkeypatch, capsys):
    """As with a LoRA adapter of lora_alpha=0."""
    worker = make_worker(actor_config(MonitorConfig(), clip_ratio_c=3.0), monkeypatch)
    worker.engine.optimizer_step = lambda: 0.0
    for call in range(EVERY):
        train_call(worker, make_batch(call, rows=12))
    assert "the gradient norm was exactly 0 in all 10 updates" in capsys.readouterr().err


@pytest.mark.parametrize("applied", [False, True])
def test_the_workers_sentence_has_the_shares_of_a_literal_search(monkeypatch, capsys, applied):
    config = (BAPOPolicyLossConfig if applied else MonitorConfig)(positive_contribution_target=0.46)
    worker = make_worker(actor_config(config, clip_ratio_c=3.0), monkeypatch)
    ends = [0, 0, 0]
    for call in range(EVERY):
        batch = make_batch(call, rows=12, spread=0.6)
        train_call(worker, batch)
        *_, steps, saturated = sequential_search(*batch, worker.scope.config, 3.0)
        ends[2 if saturated else int(steps == 0)] += 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert percents(said)[:3] == [100 * number / EVERY for number in ends] and ends[0] > 0
    options = f"{LOSS}.loss_mode=bapo ++{LOSS}.positive_contribution_target=0.46"
    lines = f"{TARGET}MonitorConfig {LOSS}.loss_mode=vanilla" if applied else f"{TARGET}BAPOPolicyLossConfig {options}"
    assert said.endswith(lines)


def test_the_pages_name_the_same_thresholds():
    root = Path(__file__).parents[2]
    texts = [(root / page).read_text() for page in ("README.md", "docs/monitor.md")]
    assert all(f"{100 * NEARLY_NOTHING:g} %" in text for text in texts)
    assert f"{LEAST_UPDATES} updates" in texts[1] and f"{100 * MAX_FAR:g} %" in texts[1]


@pytest.mark.parametrize("end", ["met_at_start", "saturated"])
def test_bounds_that_would_never_move_need_no_lines(end):
    verdict = verdict_on([update(end, clipped=(5, 5))])
    assert verdict.kind == "bounds" and percents(verdict.text)[:2] == [0, 100] and not verdict.switch
