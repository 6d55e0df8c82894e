# SPDX-License-Identifier: Apache-2.0
"""Ask verl's scorers whether they accept the right answers of the data, as a model would write them."""

import json
import re
from contextlib import suppress

from recipe.bapo.config.errors import innermost
from recipe.bapo.preflight import blame
from verl.utils.reward_score import default_compute_score

DATA_PAGE = "docs/running.md, Data"
# The forms in which verl's scorers read an answer N.
FORMS = ("#### N", "\\boxed{N}", "Answer: N")
LONGEST_ANSWER = 200  # characters; the scorer is not asked about a longer answer, only whether it exists


def use_of_truth(config) -> str:
    """Say what becomes of the data's right answers.

    Returns:
        ``scored``: verl's scorers compare responses with them. ``read``: a reward function of the user's gets them.
        ``unused``: a reward model, or a manager or agent loop of the user's, gives the reward.
    """
    reward = config.reward
    not_verls = reward.reward_model.enable or reward.reward_manager.source != "register"
    if not_verls or config.actor_rollout_ref.rollout.agent.agent_loop_config_path:
        return "unused"
    return "read" if reward.custom_reward_function.path else "scored"


def check_scored(rows, what, config, unasked) -> list[str]:
    """Ask verl's scorer of each data source whether it accepts a model's right answer. Returns a warning per refusal.

    Some scorers compare texts. They never accept a number, and raise no error. One answer of each form is tried, such
    as ``72``, ``1,234`` or ``$18``. The sources of answers that no response could repeat become keys of ``unasked``.

    Raises:
        ValueError: verl has no scorer for a source, or the scorer rejects a ground_truth only because it is not text.
        CheckWarning: a package that the scorer needs is missing.
    """
    if use_of_truth(config) != "scored":
        return []
    forms: dict[tuple, object] = {}
    for row in rows:
        truth = row["reward_model"].get("ground_truth")
        form = re.sub(r"[^\W\d]+", "a", re.sub(r"\d+", "0", str(truth).strip()))
        forms.setdefault((row["data_source"], type(truth), form, as_written(truth) == str(truth).strip()), truth)
    denied: dict[str, list[str]] = {}  # by source
    for (source, *_), truth in forms.items():
        answer = as_written(truth)
        with blame(f"{what}, data_source", source, f"set reward.custom_reward_function.path, or see {DATA_PAGE}"):
            asked = answer is not None and len(str(truth)) <= LONGEST_ANSWER
            denial = _ask_scorer(source, truth, answer if asked else "")
        if not asked:
            unasked[source] = True
        elif denial is not None:
            as_text = _ask_scorer(source, answer, answer) is None
            denial = (
                f"{what}: verl's scorer for data_source={source} rejects the answer {answer!r} where the ground_truth "
                f"is {truth!r} ({denial})"
            )
            if as_text and isinstance(truth, int | float):
                raise ValueError(f"{denial}, because it is not text: store the column as text, {answer!r}.")
            fix = f"store the column as {answer!r}" if as_text else "write it as the scorer reads it, check data_source"
            denied.setdefault(source, []).append(
                f"{denial} in any of the forms {', '.join(FORMS)}: {fix}, or set reward.custom_reward_function"
            )
    return [
        first + (f"; answers of other forms that it rejects: {len(others)}" if others else "")
        for first, *others in denied.values()
    ]


def as_written(truth) -> str | None:
    """Return a right answer as a model would write it: 5 for ``5.0``, ``["5"]`` and ``005``; the first of several.

    None for what no response could repeat, such as the tests of a program.
    """
    if isinstance(truth, str) and truth.strip().startswith(("[", "{")):
        with suppress(ValueError):
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


def _ask_scorer(source, truth, answer):
    """Return None if verl's scorer accepts ``answer`` in one of ``FORMS``, else what it says of the last form."""
    denial = None
    for form in FORMS:
        try:
            scored = default_compute_score(source, form.replace("N", answer), truth)
        except (NotImplementedError, ImportError):  # verl has no scorer, or its package is missing
            raise
        except Exception as error:  # it wants more of a response, or another ground truth
            denial = innermost(error)
            continue
        score = scored.get("score", 0) if isinstance(scored, dict) else scored
        if score > 0:
            return None
        denial = f"it gives {score:g}"
    return denial
