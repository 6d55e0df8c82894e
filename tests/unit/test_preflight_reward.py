# SPDX-License-Identifier: Apache-2.0
"""A reward function is imported, and not called."""

import pytest
from support.configs import composed

from recipe.bapo.preflight import CheckWarning
from recipe.bapo.preflight.reward import check_reward, use_of_truth

REWARDS = """
def usual(data_source, solution_str, ground_truth, extra_info=None): return float(ground_truth in solution_str)
def raises(data_source, solution_str, ground_truth, extra_info=None): return extra_info["no such key"]
"""


@pytest.fixture(scope="module")
def with_reward(task, tmp_path_factory):
    """Return a function: the example's config with a reward function of ``REWARDS``."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)

    def changed(name, *overrides):
        function = "reward.custom_reward_function"
        return composed(task, f"{function}.path={path}", f"{function}.name={name}", *overrides)

    return changed


@pytest.mark.parametrize("name", ["usual", "raises"])
def test_a_reward_function_is_imported_and_not_called(name, with_reward):
    assert check_reward(with_reward(name)).startswith(f"{name} of /")


def test_a_package_that_a_reward_function_lacks_here_is_a_warning(task, tmp_path):
    (tmp_path / "rewards.py").write_text("import no_such_package")
    with pytest.raises(CheckWarning, match="rewards.py, name=compute_score: No module named 'no_such_package' on this"):
        check_reward(composed(task, f"reward.custom_reward_function.path={tmp_path}/rewards.py"))


def test_a_reward_function_gets_right_answers_also_beside_a_reward_model(with_reward):
    model, loop = (
        "reward.reward_model.enable=true",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=/my/loops.yaml",
    )
    assert [use_of_truth(with_reward("usual", one)) for one in (model, loop)] == ["read", "unused"]
    assert use_of_truth(with_reward("null", "reward.custom_reward_function.path=null", model)) == "unused"
