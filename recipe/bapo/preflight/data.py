# SPDX-License-Identifier: Apache-2.0
"""Check what a run reads besides the model: its data, and the checkpoint that it resumes from.

verl's own data set and scorers read the data. Our own are the rules for what verl meets only at the row itself, perhaps
hours later: its schema, its length, and a right answer without a reward.
"""

import re
from pathlib import Path

import datasets
from omegaconf import OmegaConf

from recipe.bapo.host.files import latest_checkpoint
from recipe.bapo.preflight import CheckWarning, blame
from recipe.bapo.preflight.model import model_of
from recipe.bapo.preflight.reward import DATA_PAGE, check_answers, use_of_truth
from verl.trainer.ppo.utils import create_rl_dataset

READABLE = f"give parquet or json files in verl's schema ({DATA_PAGE})"


def check_files(config) -> str:
    """Check the data: verl reads them, each row has verl's schema, no prompt is cut, a batch is there, right
    answers get a reward.

    A data set class of the user's own is only made: its rows are its own.

    Raises:
        ValueError: names the field and the fix.
        CheckWarning: a batch needs more rows, or an answer that the data call right gets no reward.
    """
    model, data, counts = model_of(config), config.data, []
    notes: list[str] = []
    doubts: list[str] = []
    for kind in ("train", "val"):
        what = f"data.{kind}_files={data[f'{kind}_files']}"
        dataset = load_dataset(config, kind, model.tokenizer, model.processor)
        counts.append(len(dataset))
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
            if usable < len(rows) and not data.filter_overlong_prompts:
                raise ValueError(
                    f"{what} has {len(rows) - usable} prompts of more tokens than data.max_prompt_length="
                    f"{data.max_prompt_length}, and verl cuts them in spite of data.truncation=error: raise the "
                    "length, or set data.filter_overlong_prompts=true."
                )
            found, denied = check_answers(rows, what, config)
            notes += found
            doubts += denied
        # verl finds that there is no batch only when everything is loaded: it divides by the steps of an epoch.
        if kind == "train" and usable < data.train_batch_size and not config.trainer.val_only:
            doubts.append(
                f"{what} has {usable} usable rows, fewer than data.train_batch_size={data.train_batch_size}: lower it, "
                f"give more (data.train_max_samples), or raise data.max_prompt_length={data.max_prompt_length}"
            )
    text = f"rows: {counts[0]:,} for training and {counts[1]:,} for validation"
    text = "; ".join((text, *dict.fromkeys(notes)))  # a source may be in both
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


def check_checkpoint(config) -> str:
    """Check that the checkpoint to resume from is there.

    Raises:
        ValueError: verl would silently start from scratch, or from another checkpoint.
        CheckWarning: verl would end once everything is loaded.
    """
    trainer = config.trainer
    if trainer.resume_from_path and trainer.resume_mode in ("auto", "disable"):
        raise ValueError(
            f"trainer.resume_from_path={trainer.resume_from_path} has no effect with trainer.resume_mode="
            f"{trainer.resume_mode}: set trainer.resume_mode=resume_path, or leave it out."
        )
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
                f"invalid trainer.resume_from_path={folder} with resume_mode={trainer.resume_mode}: name a "
                "checkpoint's folder, global_step_N, with no slash behind it, or set resume_mode=auto or disable."
            )
    return f"training goes on from {folder}"
