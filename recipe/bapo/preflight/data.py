# SPDX-License-Identifier: Apache-2.0
"""Check what a run reads besides the model: data, reward function, and the checkpoint that it resumes from.

verl's own data set and scorers read the data. Only the check of the rows' schema is our own, because verl fails at the
first bad row, perhaps hours later.
"""

import asyncio
import inspect
import json
import re
from contextlib import suppress
from pathlib import Path

import datasets
from omegaconf import OmegaConf

from recipe.bapo.host.files import latest_checkpoint
from recipe.bapo.preflight import CheckSkipped, CheckWarning, blame, innermost, root_cause
from recipe.bapo.preflight.model import model_of
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.reward_score import default_compute_score

DATA_PAGE = "docs/running.md, Data"
# The forms in which verl's scorers read an answer N.
FORMS = ("#### N", "\\boxed{N}", "Answer: N")
LONGEST_ANSWER = 200  # characters; the scorer is not asked about a longer answer, only whether it exists
READABLE = f"give parquet or json files in verl's schema ({DATA_PAGE})"


def check_files(config) -> str:
    """Check the data: verl reads them, each row has verl's schema, enough rows are usable, and right answers score.

    A data set class of the user's own is only made: its rows are its own.

    Raises:
        ValueError: names the field and the fix.
        CheckWarning: a batch needs more rows, or the scorer does not accept an answer that the data call right.
    """
    model, data, counts, doubts = model_of(config), config.data, [], []
    unasked: dict[str, bool] = {}  # sources, in their order
    for kind in ("train", "val"):
        what = f"data.{kind}_files={data[f'{kind}_files']}"
        dataset = load_dataset(config, kind, model.tokenizer, model.processor)
        counts.append(len(dataset))
        if kind == "train" and len(dataset):
            with blame("data.seed (seed)", data.seed):
                create_rl_sampler(data, dataset)
        usable = len(dataset)
        if data.custom_cls.path is None:
            rows = dataset.dataframe.to_list()
            check_rows(rows, data.prompt_key, what, use_of_truth(config))
            with blame(f"data.{kind}_files", data[f"{kind}_files"], "give rows that verl can read with this model"):
                dataset[0]
            # Without the filter verl's agent loop cuts a long prompt from the left, whatever data.truncation says. So
            # count long prompts where truncation=error asks for an error, too.
            if data.filter_overlong_prompts or data.truncation == "error":
                dataset.filter_overlong_prompts = True
                usable = len(dataset.maybe_filter_out_long_prompts(dataset.dataframe))
            if usable < len(dataset) and not data.filter_overlong_prompts:
                raise ValueError(
                    f"{what} has {len(dataset) - usable} prompts of more tokens than data.max_prompt_length="
                    f"{data.max_prompt_length}, and verl cuts them in spite of data.truncation=error: raise the "
                    "length, or set data.filter_overlong_prompts=true."
                )
            doubts += _check_scored(rows, what, config, unasked)
        more = f"give more (data.{kind}_max_samples), or raise data.max_prompt_length={data.max_prompt_length}"
        if usable == 0:
            doubts.append(f"{what} has no usable row: {more}")
        elif kind == "train" and usable < data.train_batch_size and not config.trainer.val_only:
            doubts.append(
                f"{what} has {usable} usable rows, fewer than data.train_batch_size={data.train_batch_size}: lower it, "
                f"{more}"
            )
    text = f"rows: {counts[0]:,} for training and {counts[1]:,} for validation"
    if unasked:
        text += f"; verl's scorer was not asked about the ground_truth of {', '.join(unasked)}, which no answer repeats"
    if doubts:
        raise CheckWarning("; ".join((text, *doubts)))
    return text


def load_dataset(config, kind, tokenizer, processor):
    """Load verl's data set of the ``kind`` ``train`` or ``val``, without its filter of long prompts."""
    data, field = config.data, f"data.{kind}_files"
    files = data[f"{kind}_files"]
    datasets.disable_caching()  # each filtering would leave a file
    unfiltered = {"filter_overlong_prompts": False, "filter_overlong_prompts_workers": None}  # no worker processes
    settings, most = OmegaConf.merge(data, unfiltered), data.get(f"{kind}_max_samples", -1)
    with blame(field, files, READABLE):
        return create_rl_dataset(files, settings, tokenizer, processor, kind == "train", most)


def training_steps(config) -> int:
    """Return the number of steps that the run makes, without those that a filter of long prompts takes away."""
    model, trainer = model_of(config), config.trainer
    rows = len(load_dataset(config, "train", model.tokenizer, model.processor))
    steps = rows // config.data.train_batch_size * trainer.total_epochs
    return min(steps, trainer.total_training_steps or steps)


def check_rows(rows, prompt_key, what, truth="scored") -> None:
    """Raise a ValueError for the first row that is not in verl's schema.

    Args:
        rows: the rows as dicts.
        prompt_key: the column of the prompt.
        what: names the rows' files.
        truth: what becomes of the right answers, as ``use_of_truth`` says.
    """
    for index, row in enumerate(rows):
        missing = _missing_in(row, prompt_key, truth)
        if missing:
            raise ValueError(f"{what}, row {index}: {missing}; see {DATA_PAGE}.")


def _missing_in(row, prompt_key, truth):
    """Return what a run would miss in a row, or None."""
    if not isinstance(row.get("data_source"), str):
        return "data_source has to be a name"
    prompt = row.get(prompt_key)
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(_is_message(one) for one in messages):
        return f"{prompt_key} (data.prompt_key) has to be a list of messages, each with role and content"
    reward = row.get("reward_model")
    if truth != "unused" and not (isinstance(reward, dict) and "ground_truth" in reward):
        return "reward_model has to be a section with ground_truth"
    if truth == "scored" and reward["ground_truth"] is None and reward.get("style") in (None, "rule"):
        return "reward_model has no ground_truth, with which a rule compares responses"
    return None


def _is_message(one) -> bool:
    if not (isinstance(one, dict) and one.get("role")):
        return False
    return isinstance(one.get("content"), str | list) or bool(one.get("tool_calls"))  # None is rendered as "None"


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


def _check_scored(rows, what, config, unasked) -> list[str]:
    """Ask verl's scorer of each data source whether it accepts a model's right answer. Returns a warning per refusal.

    Some scorers compare texts. They never accept a number, and raise no error. The sources of answers that no response
    could repeat become keys of ``unasked``.

    Raises:
        ValueError: verl has no scorer for a source, or the scorer rejects a ground_truth only because it is not text.
    """
    if use_of_truth(config) != "scored":
        return []
    denied: list[str] = []
    kinds: dict[tuple, object] = {}
    for row in rows:
        truth = row["reward_model"].get("ground_truth")
        written = str(truth).strip()
        kinds.setdefault((row["data_source"], type(truth), not written, as_written(truth) == written), truth)
    for (source, *_), truth in kinds.items():  # one row of each kind
        try:
            denial = _ask_scorer(source, truth, str(truth))
        except NotImplementedError as error:
            raise ValueError(
                f"{what}: verl has no scorer for data_source={source}: set reward.custom_reward_function.path and "
                f"name, or rewrite the column; see {DATA_PAGE}."
            ) from error
        answer = as_written(truth)
        if answer is None or len(str(truth)) > LONGEST_ANSWER:
            unasked[source] = True
            continue
        if answer != str(truth).strip():
            denial = _ask_scorer(source, truth, answer)
        if denial is None:
            continue
        denial = (
            f"{what}: verl's scorer for data_source={source} rejects the answer {answer!r} where the ground_truth is "
            f"{truth!r} ({denial})"
        )
        if not (as_text := _ask_scorer(source, answer, answer)) and isinstance(truth, int | float):
            raise ValueError(f"{denial}, because it is not text: store the column as text, {answer!r}.")
        fix = "check data_source" if as_text else f"store the column as {answer!r}"
        denied.append(f"{denial} in any of the forms {', '.join(FORMS)}: {fix}, or set reward.custom_reward_function")
    return denied


def as_written(truth) -> str | None:
    """Return a right answer as a model would write it: 5 for ``5.0``, ``["5"]`` and ``005``; the first of several.

    None for what no response could repeat, such as the tests of a program.
    """
    if isinstance(truth, str) and truth.strip().startswith(("[", "{")):
        with suppress(ValueError):
            found = json.loads(truth)
            # [-3, -1] is an interval, as a model would write it.
            return as_written(found) if isinstance(found, dict) or not _are_numbers(found) else truth.strip()
    if isinstance(truth, list) and truth:
        return None if isinstance(truth[0], list) else as_written(truth[0])
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        return None
    text = str(truth).strip()
    number = re.fullmatch(r"(-?)0*(\d+?)(?:\.(\d*?)0*)?", text)
    if number is None:
        return text
    sign, whole, fraction = number.groups()
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def _are_numbers(values) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _ask_scorer(source, truth, answer):
    """Return None if verl's scorer accepts ``answer`` in one of ``FORMS``, else what it says of the last form."""
    denial = None
    for form in FORMS:
        response = form.replace("N", answer) if len(answer) <= LONGEST_ANSWER else ""
        try:
            scored = default_compute_score(source, response, truth)
        except NotImplementedError:  # verl has no scorer
            raise
        except Exception as error:  # it wants more of a response, or another ground truth
            denial = innermost(error)
            continue
        score = scored.get("score", 0) if isinstance(scored, dict) else scored
        if score > 0:
            return None
        denial = f"it gives {score:g}"
    return denial


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


def check_checkpoint(config) -> str:
    """Check that the checkpoint to resume from is there.

    Raises:
        ValueError: verl would silently start from scratch.
        CheckWarning: verl would end once everything is loaded.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return "training starts from scratch (trainer.resume_mode=disable)"
    if trainer.resume_mode == "auto":
        folder = latest_checkpoint(Path(trainer.default_local_dir))
        if folder is None:
            return f"none in {trainer.default_local_dir}: training starts from scratch"
    else:
        folder = Path(str(trainer.resume_from_path))
        if not re.search(r"global_step_\d+$", str(trainer.resume_from_path)) or not folder.is_dir():
            raise CheckWarning(
                f"invalid trainer.resume_from_path={folder}: name a checkpoint's folder, global_step_N, with "
                "no slash behind it."
            )
    return f"training goes on from {folder}"
