# SPDX-License-Identifier: Apache-2.0
"""A reward function that verl cannot call is refused without a call, and a call tells what it gives."""

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
def two(solution_str, ground_truth): return 1.0
def renamed(data_source, response, ground_truth, extra_info=None): return 1.0
def needs_more(data_source, solution_str, ground_truth, extra_info, tokenizer): return 1.0
def batch(data_sources, solution_strs, ground_truths, extra_infos=None): return [1.0]
def positional(data_source, solution_str, ground_truth, extra_info=None, /): return 1.0
def no_extra(data_source, solution_str, ground_truth): return 1.0
class Takes:
    def __init__(self, data_source, solution_str, ground_truth, extra_info=None): pass
def yields(data_source, solution_str, ground_truth, extra_info=None): yield 1.0
async def yields_late(data_source, solution_str, ground_truth, extra_info=None): yield 1.0
def nothing(data_source, solution_str, ground_truth, extra_info=None): print("scored")
def without_score(data_source, solution_str, ground_truth, extra_info=None): return {"reward": 1.0}
def pair(data_source, solution_str, ground_truth, extra_info=None): return 1.0, "right"
def raises(data_source, solution_str, ground_truth, extra_info=None): return extra_info["no such key"]
def never_right(data_source, solution_str, ground_truth, extra_info=None): return 0.0
"""
CALLED = "verl calls it with data_source, solution_str, ground_truth, extra_info: "


@pytest.fixture(scope="module")
def with_reward(task, tmp_path_factory):
    """Return a function: the example's config with a reward function of ``REWARDS``."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)

    def changed(name, *overrides):
        function = "reward.custom_reward_function"
        return composed(task, f"{function}.path={path}", f"{function}.name={name}", *overrides)

    return changed


WEIGHT = "+reward.custom_reward_function.reward_kwargs.weight=1"


@pytest.mark.parametrize("name", ["usual", "keywords", "waits", "scorer", "partial", "nothing", "raises"])
def test_a_reward_function_that_verl_can_call_passes_uncalled(name, with_reward):
    assert check_reward(with_reward(name)).startswith(f"{name} of /")
    assert check_reward(with_reward("of_kwargs", WEIGHT))


@pytest.mark.parametrize(
    "name, said",
    [
        ("of_kwargs", f"{CALLED}missing a required argument: 'weight'; write def of_kwargs(data_source, "),
        ("two", f"{CALLED}got an unexpected keyword argument 'data_source'"),
        ("renamed", f"{CALLED}missing a required argument: 'response'"),
        ("needs_more", f"{CALLED}missing a required argument: 'tokenizer'"),
        ("batch", f"{CALLED}missing a required argument: 'data_sources'"),
        ("positional", f"{CALLED}"),
        ("no_extra", f"{CALLED}got an unexpected keyword argument 'extra_info'"),
        ("Takes", "it is a class or a generator, and verl takes what the call returns for the score"),
        ("Scorer", "it is a class or a generator"),
        ("yields", "it is a class or a generator"),
        ("yields_late", "it is a class or a generator"),
    ],
)
def test_one_that_verl_cannot_call_is_refused(name, said, with_reward):
    with pytest.raises(ValueError) as refused:
        check_reward(with_reward(name))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    fixed = with_reward("keywords")  # def f(**kwargs)
    assert check_reward(fixed)


def test_a_package_that_a_reward_function_lacks_here_is_a_warning(task, tmp_path):
    (tmp_path / "rewards.py").write_text("import no_such_package")
    with pytest.raises(CheckWarning, match="rewards.py, name=compute_score: No module named 'no_such_package' on this"):
        check_reward(composed(task, f"reward.custom_reward_function.path={tmp_path}/rewards.py"))


def test_an_argument_of_a_reward_model_is_passed_where_there_is_one(with_reward):
    router = ["reward.reward_model.enable=true", "reward.reward_model.model_path=/m"]
    with pytest.raises(ValueError, match="unexpected keyword argument 'reward_router_address'"):
        check_reward(with_reward("usual", *router))
    assert check_reward(with_reward("keywords", *router))


@pytest.mark.parametrize(
    "name, kind, said",
    [
        ("usual", None, ", the right answer of the first row, 0 for no response"),
        ("waits", None, "1 for '"),
        ("keywords", None, "1 for '"),
        (
            "never_right",
            CheckWarning,
            "0 for no response: the function seems to read none of the forms #### N, ",
        ),
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
