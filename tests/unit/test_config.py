# SPDX-License-Identifier: Apache-2.0
"""BAPOConfig validates its options, and its errors say what is wrong."""

import pytest
from hypothesis import given
from support.batches import CHANGED, configs, make_batch, values_found
from support.oracle import grid_point

from bapo import BAPOConfig


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"positive_contribution_target": 0.0}, "positive_contribution_target"),
        ({"positive_contribution_target": 1.0}, "positive_contribution_target"),
        ({"positive_contribution_target": float("nan")}, "positive_contribution_target"),
        ({"ratio_lower_start": 0.95}, "ratio_lower_start"),
        ({"ratio_lower_start": -0.1}, "ratio_lower_start"),
        ({"ratio_lower_max": 1 - 1e-9}, "ratio_lower_max"),  # 1 in float32
        ({"ratio_upper_start": 1 + 1e-9}, "ratio_upper_start"),
        ({"ratio_lower_step": 0.0}, "ratio_lower_step"),
        ({"ratio_lower_step": 1e-9}, "ratio_lower_step"),
        ({"ratio_upper_start": 0.2, "ratio_upper_max": 0.28}, "ratio_upper_start"),
        ({"ratio_upper_max": float("inf")}, "ratio_upper_max"),
        ({"ratio_upper_step": -0.05}, "ratio_upper_step"),
        ({"ratio_upper_step": True}, "ratio_upper_step"),
        ({"ratio_upper_step": "0.1"}, "ratio_upper_step"),
        ({"contribution": "values"}, "contribution"),
        ({"token_weight": "rollout"}, "token_weight"),
        ({"search_order": "c_high first"}, "search_order"),
        ({"bound_scope": "batch"}, "bound_scope"),
    ],
)
def test_a_wrong_value_is_named_with_the_field_and_the_fix(wrong, field):
    with pytest.raises(ValueError) as error:
        BAPOConfig(**wrong)
    message = str(error.value)
    value = wrong.get(field, getattr(BAPOConfig, field))
    assert message.startswith(f"invalid {field}={value!r}: "), message


@given(configs())
def test_the_points_of_a_range_are_start_plus_steps_and_last_the_maximum(config):
    for part in (config.upper, config.lower):
        expected = [grid_point(part.start, part.maximum, part.step, k) for k in range(part.steps + 1)]
        assert part.grid().tolist() == expected and expected[-1] == part.maximum
        assert expected == sorted(set(expected))


@pytest.mark.parametrize(
    "sides, fixed", [((), False), (("lower",), False), (("upper",), False), (("lower", "upper"), True)]
)
def test_a_config_is_fixed_where_both_bounds_are(sides, fixed):
    start = {"lower": 0.8, "upper": 1.3}
    changes = {f"ratio_{side}_{end}": start[side] for side in sides for end in ("start", "max")}
    assert BAPOConfig(**changes).fixed is fixed


def test_every_option_of_the_search_is_among_those_that_are_changed():
    of_the_worker = {"bound_scope"}  # on which tokens a search is made: tests/unit/test_worker.py
    assert CHANGED.keys() | of_the_worker == BAPOConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize("option", CHANGED)
def test_every_option_changes_what_a_search_finds(option):
    def found(**changes):
        config = BAPOConfig(**changes)
        return [values_found(*make_batch(seed, rows=12), config, clip_ratio_c=3.0) for seed in range(8)]

    assert found(**{option: CHANGED[option]}) != found()
