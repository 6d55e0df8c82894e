# SPDX-License-Identifier: Apache-2.0
"""Check the reward function and the reward manager, and call the function where the user asks for it."""

import asyncio
import inspect

from recipe.bapo.config.errors import root_cause
from recipe.bapo.preflight import CheckSkipped, CheckWarning, blame
from recipe.bapo.preflight.data import load_dataset
from recipe.bapo.preflight.model import model_of
from recipe.bapo.preflight.scorer import FORMS, as_written, use_of_truth
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.utils.reward_score import default_compute_score


def check_reward(config) -> str:
    """Import the reward function and the reward manager as verl imports them, and look whether verl can call it.

    The function is not called.

    Raises:
        ValueError: one cannot be imported, or each of verl's calls would raise.
        CheckWarning: the function imports what this machine lacks.
    """
    settings, manager = config.reward.custom_reward_function, config.reward.reward_manager
    named = f"{settings.path}, name={settings.name}"
    with blame("reward.custom_reward_function", named):
        try:
            function = get_custom_reward_fn(config)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, ModuleNotFoundError) and not str(cause.name).startswith("verl"):
                raise CheckWarning(
                    f"reward.custom_reward_function={named}: {cause} on this machine: install it, or set PYTHONPATH."
                ) from error
            raise
    with blame("reward.reward_manager", manager.name):
        resolve_reward_manager_cls(config)
    if function is None:
        return "verl's own, by data_source"
    if manager.source != "register":
        return f"{settings.name} of {settings.path}, which the reward manager {manager.name} calls in its own way"
    raw, given = function.args  # type: ignore[attr-defined]  # a partial: verl/trainer/ppo/reward.py:84
    fix = f"write def {settings.name}(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
    with blame("reward.custom_reward_function", named, f"{fix}, which returns a number or a dict with a score"):
        if inspect.isclass(raw) or inspect.isgeneratorfunction(raw) or inspect.isasyncgenfunction(raw):
            raise ValueError("it is a class or a generator, and verl takes what the call returns for the score")
        passed = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
        if config.reward.reward_model.enable:
            passed |= dict.fromkeys(("reward_router_address", "reward_model_tokenizer"))
        try:
            signature = inspect.signature(raw)
        except ValueError:  # of some functions that are not written in Python
            return f"{settings.name} of {settings.path}"
        try:
            signature.bind(**{**passed, **given})
        except TypeError as error:
            raise ValueError(f"verl calls it with {', '.join({**passed, **given})}: {error}") from None
    return f"{settings.name} of {settings.path}"


def call_reward(config) -> str:
    """Call the run's reward function on the right answer of the first row, and on an empty response.

    Raises:
        ValueError: it raises, or returns no score. verl drops such responses.
        CheckWarning: the right answer has no higher score than the empty response.
    """
    if use_of_truth(config) == "unused":
        raise CheckSkipped("a reward model, a manager or an agent loop gives the reward")
    model, function = model_of(config), get_custom_reward_fn(config) or default_compute_score
    row = load_dataset(config, "train", model.tokenizer, model.processor)[0]
    truth = row["reward_model"]["ground_truth"]

    def score(response):
        with blame("reward.custom_reward_function", config.reward.custom_reward_function.path):
            found = function(
                data_source=row["data_source"],
                solution_str=response,
                ground_truth=truth,
                extra_info={**(row.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}},
            )
            found = asyncio.run(found) if inspect.isawaitable(found) else found
            return float(found["score"] if isinstance(found, dict) else found)

    answers = dict.fromkeys((str(truth), as_written(truth) or str(truth)))
    scores = {
        response: score(response) for one in answers for response in (one, *(form.replace("N", one) for form in FORMS))
    }
    best, empty = max(scores, key=scores.__getitem__), score("")
    text = f"{scores[best]:g} for {best!r}, the right answer of the first row, {empty:g} for no response"
    if not scores[best] > empty:
        raise CheckWarning(f"{text}: the function seems to read none of the forms {', '.join(FORMS)}.")
    return text
