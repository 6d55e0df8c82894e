# SPDX-License-Identifier: Apache-2.0
"""Check the reward function and the reward manager, and call the function where the user asks for it."""

import asyncio
import inspect

from recipe.bapo.preflight import CheckSkipped, blame
from recipe.bapo.preflight.data import load_dataset
from recipe.bapo.preflight.model import model_of
from recipe.bapo.preflight.scorer import FORMS, as_written, use_of_truth
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.utils.reward_score import default_compute_score


def check_reward(config) -> str:
    """Import the reward function and the reward manager as a run does. The function is not called.

    Raises:
        ValueError: one cannot be imported.
        CheckWarning: it imports a package that this machine lacks.
    """
    settings, manager = config.reward.custom_reward_function, config.reward.reward_manager
    named = f"{settings.path}, name={settings.name}"
    with blame("reward.custom_reward_function", named):
        function = get_custom_reward_fn(config)
    with blame("reward.reward_manager", manager.name):
        resolve_reward_manager_cls(config)
    if function is None:
        return "verl's own, by data_source"
    return f"{settings.name} of {settings.path}"


def call_reward(config) -> str:
    """Call the run's reward function on the right answer of the first row, and on an empty response.

    Raises:
        ValueError: it raises, or returns no score. verl drops such responses.
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
    return f"{scores[best]:g} for {best!r}, the right answer of the first row, {empty:g} for no response"
