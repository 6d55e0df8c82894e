# SPDX-License-Identifier: Apache-2.0
"""A reward function is imported, and called only where the user asks for it."""

import pytest
from support.configs import composed

from recipe.bapo.preflight import CheckSkipped, CheckWarning
from recipe.bapo.preflight.reward import call_reward, check_reward

REWARDS = """
import functools
import verl.utils.reward_score

def usual(data_source, solution_str, ground_truth, extra_info=None): return float(ground_truth in solution_str)
def keywords(**kwargs): return {"score": usual(**kwargs), "acc": 1}
def of_kwargs(solution_str, ground_truth, weight, **_): return weight * (ground_truth in solution_str)
async def waits(data_source, solution_str, ground_truth, extra_info): return float(ground_truth in solution_str)
class Scorer:
    def __init__(self, weight=1): pass
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None): return 1.0 * bool(solution_str)
scorer = Scorer()
partial = functools.partial(of_kwargs, weight=2)
def nothing(data_source, solution_str, ground_truth, extra_info=None): print("scored")
def without_score(data_source, solution_str, ground_truth, extra_info=None): return {"reward": 1.0}
def pair(data_source, solution_str, ground_truth, extra_info=None): return 1.0, "right"
def raises(data_source, solution_str, ground_truth, extra_info=None): return extra_info["no such key"]
def never_right(data_source, solution_str, ground_truth, extra_info=None): return 0.0
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


@pytest.mark.parametrize("name", ["usual", "nothing", "raises"])
def test_a_reward_function_is_imported_and_not_called(name, with_reward):
    assert check_reward(with_reward(name)).startswith(f"{name} of /")


def test_a_package_that_a_reward_function_lacks_here_is_a_warning(task, tmp_path):
    (tmp_path / "rewards.py").write_text("import no_such_package")
    with pytest.raises(CheckWarning, match="rewards.py, name=compute_score: No module named 'no_such_package' on this"):
        check_reward(composed(task, f"reward.custom_reward_function.path={tmp_path}/rewards.py"))


@pytest.mark.parametrize(
    "name, kind, said",
    [
        ("usual", None, ", the right answer of the first row, 0 for no response"),
        ("waits", None, "1 for '"),
        ("keywords", None, "1 for '"),
        ("never_right", None, "0 for '"),
        ("nothing", ValueError, "TypeError: float"),
        ("without_score", ValueError, "KeyError: 'score'"),
        ("pair", ValueError, "TypeError: float"),
        ("raises", ValueError, "KeyError: 'no such key'"),
    ],
)
def test_a_call_of_the_reward_function_tells_what_it_gives(name, kind, said, with_reward):
    if kind is None:
        assert said in call_reward(with_reward(name))
    else:
        with pytest.raises(kind) as found:
            call_reward(with_reward(name))
        assert said in str(found.value)


def test_a_reward_that_no_function_gives_is_not_called(with_reward):
    with pytest.raises(CheckSkipped):
        call_reward(with_reward("usual", "actor_rollout_ref.rollout.agent.agent_loop_config_path=/my/loops.yaml"))
