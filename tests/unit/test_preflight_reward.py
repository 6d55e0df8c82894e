# SPDX-License-Identifier: Apache-2.0
"""A reward function is imported, and called only where the user asks for it."""

import pytest
from support.configs import composed

from recipe.bapo.preflight import CheckWarning
from recipe.bapo.preflight.reward import check_answers, check_reward

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
    "name, said",
    [
        ("usual", "/rewards.py gives 1 for '3' and 0 for no response"),
        ("waits", "gives 1 for '3' and 0 for no"),
        ("keywords", "gives 1 for '3' and 0 for no"),
        ("never_right", "gives 0 for '3' and 0 for no response"),
        ("nothing", "TypeError: float"),
        ("without_score", "KeyError: 'score'"),
        ("pair", "TypeError: float"),
        ("raises", "KeyError: 'no such key'"),
    ],
)
def test_a_call_of_the_reward_function_tells_what_it_gives(name, said, with_reward):
    rows = [{"data_source": "guess", "reward_model": {"ground_truth": "3"}, "extra_info": None}]
    if "Error" in said:
        with pytest.raises(ValueError, match=said):
            check_answers(rows, "files", with_reward(name), call_reward=True)
    else:
        (note,), denied = check_answers(rows, "files", with_reward(name), call_reward=True)
        assert said in note and not denied


@pytest.mark.parametrize("call_reward, manager", [(False, "register"), (True, "importlib")])
def test_a_reward_function_is_not_called_unasked(call_reward, manager, with_reward):
    config = with_reward("raises", f"reward.reward_manager.source={manager}")
    assert check_answers([{}], "files", config, call_reward) == ([], [])
