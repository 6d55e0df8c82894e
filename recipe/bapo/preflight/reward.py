# SPDX-License-Identifier: Apache-2.0
"""Check the reward function and the reward manager, and whether right answers of the data get a reward."""

import json
import re
from contextlib import suppress

from recipe.bapo.preflight import blame
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.utils.reward_score import default_compute_score

DATA_PAGE = "docs/running.md, Data"
# The forms in which a model writes an answer N, and in which verl's scorers read it.
FORMS = ("N", "#### N", "\\boxed{N}", "Answer: N")
LONGEST_ANSWER = 200  # characters; a longer answer is not tried
MOST_FORMS = 300  # of the answers of a source, of which one each is tried: a scorer may take 60 ms for it


def check_reward(config) -> str:
    """Import the reward function and the reward manager as a run does. The function is not called.

    Raises:
        ValueError: one cannot be imported.
        CheckWarning: it imports a package that this machine lacks.
    """
    settings, manager = config.reward.custom_reward_function, config.reward.reward_manager
    with blame("reward.custom_reward_function", f"{settings.path}, name={settings.name}"):
        function = get_custom_reward_fn(config)
    with blame("reward.reward_manager", manager.name):
        resolve_reward_manager_cls(config)
    return "verl's own, by data_source" if function is None else f"{settings.name} of {settings.path}"


def use_of_truth(config) -> str:
    """Say what becomes of the data's right answers.

    Returns:
        ``scored``: verl's scorers compare responses with them. ``read``: a reward function of the user's gets them.
        ``unused``: a reward model, or a manager or agent loop of the user's, gives the reward.
    """
    reward, own_loop = config.reward, config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    if reward.reward_manager.source != "register" or own_loop:
        return "unused"
    if reward.custom_reward_function.path:  # verl's managers call it, also beside a reward model
        return "read"
    return "unused" if reward.reward_model.enable else "scored"


def check_answers(rows, what, config) -> tuple[list[str], list[str]]:
    """Ask verl's scorers whether they give a right answer more than an empty response.

    Some compare texts. They never accept a number, and raise no error. One answer of each form is tried, such as
    ``72``, ``1,234`` or ``$18``.

    Args:
        rows: the rows as dicts.
        what: names the rows' files.
        config: resolved.

    Returns:
        What was found, and a warning for each source with an answer that gets no more.

    Raises:
        ValueError: a scorer raises, as it would in a run, which drops such responses.
        CheckWarning: a package that a scorer needs is missing.
    """
    if use_of_truth(config) != "scored":
        return [], []
    source_of = f"{what}, data_source"
    forms: dict[str, dict[tuple, tuple]] = {}  # by source, a row and its answer for each form
    for row in rows:
        truth = row["reward_model"].get("ground_truth")
        answer = as_written(truth) if len(str(truth)) <= LONGEST_ANSWER else None
        form = answer and re.sub(r"[^\W\d]+", "a", re.sub(r"\d+", "0", str(truth).strip()))
        of_source = forms.setdefault(row["data_source"], {})
        of_source.setdefault((type(truth), form, answer == str(truth).strip()), (row, answer))
    unasked: list[str] = []
    denied: dict[str, str] = {}  # by source
    tried = [(source, *one) for source, found in forms.items() for one in list(found.values())[:MOST_FORMS]]
    for source, row, answer in tried:
        truth = row["reward_model"].get("ground_truth")
        with blame(source_of, source, f"set reward.custom_reward_function.path, or see {DATA_PAGE}"):
            scores = scores_of(row, answer)
        if answer is None:
            unasked.append(f"no answer was tried of data_source={source}, whose ground_truth is no short answer")
        elif max(scores.values()) == scores[""]:
            denied.setdefault(
                source,
                f"{source_of}={source}: verl's scorer gives the answer {answer!r} no more than an empty response "
                f"({scores['']:g}) where the ground_truth is {truth!r}, in any of the forms {', '.join(FORMS)}: store "
                "answers as text in the form that it reads, or set reward.custom_reward_function",
            )
    return unasked, list(denied.values())


def scores_of(row, answer: str | None) -> dict[str, float]:
    """Call verl's scorer as a run does, on an empty response and on ``answer``, if any, in each of ``FORMS``.

    Returns:
        the scores by response.
    """
    responses = ["", *(() if answer is None else (form.replace("N", answer) for form in FORMS))]

    def score(response):
        found = default_compute_score(
            data_source=row["data_source"],
            solution_str=response,
            ground_truth=row["reward_model"].get("ground_truth"),
            extra_info={**(row.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}},
        )
        return float(found["score"] if isinstance(found, dict) else found)

    return {response: score(response) for response in responses}


def as_written(truth) -> str | None:
    """Return a right answer as a model would write it: 5 for ``5.0``, ``["5"]`` and ``005``; the first of several.

    None for what no response could repeat, such as the tests of a program.
    """
    if isinstance(truth, str) and truth.strip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            found = json.loads(truth)
            if not isinstance(found, list) or not all(isinstance(one, int | float) for one in found):
                return as_written(found)  # [-3, -1] is an interval, as a model would write it
    if isinstance(truth, list) and truth and not isinstance(truth[0], list):
        return as_written(truth[0])
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        return None
    text = str(truth).strip()
    number = re.fullmatch(r"(-?)0*(\d+?)(?:\.(\d*?)0*)?", text)
    if number is None:
        return text
    sign, whole, fraction = number.groups()
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"
