# SPDX-License-Identifier: Apache-2.0
"""What a run reads beside the model: data, reward function, and the checkpoint it goes on from.

verl's own data set and scorers read the data. The rows' schema is ours, because verl finds out row by row, hours later.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from recipe.bapo.checks import call
from recipe.bapo.checks.model import model_of, template_arguments
from recipe.bapo.records import latest_checkpoint
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import normalize_token_ids

DATA_PAGE = "docs/running.md, Data"


def check_files(config) -> str:
    """The data: readable by verl's data set, every row in verl's schema, enough of them usable, and scored."""
    tokenizer, counts = model_of(config).tokenizer, []
    for field in ("train_files", "val_files"):
        what = f"data.{field}={config.data[field]}"
        rows = check_data(config, config.data[field], f"data.{field}")
        needed = config.data.train_batch_size if field == "train_files" and not config.trainer.val_only else 1
        usable = _count_usable(rows, what, config, tokenizer, needed)
        if rows and usable < needed:
            raise ValueError(
                f"{what} has {usable} usable rows, and a batch is data.train_batch_size={needed}: lower it, give more "
                f"rows, or raise data.max_prompt_length={config.data.max_prompt_length}."
            )
        _check_scored(rows, what, config)
        counts.append(f"{len(rows):,} to {field.partition('_')[0]}")
    return f"rows: {' and '.join(counts)}"


def check_data(config, files, field) -> list[dict]:
    """The rows of the files as verl's data set reads them, each in verl's schema; files elsewhere are left to verl."""
    names = [files] if isinstance(files, str) else list(files or [])
    if not names:
        raise ValueError(f"{field}={files} is not usable: give a parquet file in verl's schema.")
    if any("://" in name for name in names):
        return []
    data = config.data.copy()
    data.filter_overlong_prompts = False
    fix = f"give parquet or json files in verl's schema ({DATA_PAGE})"
    dataset = call(field, files, fix, create_rl_dataset, names, data, None, None)
    key, rows = config.data.prompt_key, dataset.dataframe.to_list()
    missing = [
        column for column in ("data_source", key, "reward_model") if column not in dataset.dataframe.column_names
    ]
    if missing or not rows:
        lacks = f"lacks the columns {missing}: it has {dataset.dataframe.column_names}" if missing else "has no rows"
        raise ValueError(f"{field}={files} {lacks}; {fix}.")
    for index, row in enumerate(rows):
        try:
            Row.model_validate({**row, "prompt": row[key]})
        except ValidationError as error:
            first = error.errors()[0]
            fields = {**Row.model_fields, **Message.model_fields}  # not the names of a union's types
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in fields)
            raise ValueError(f"{field}={files}, row {index}, {where}: {first['msg']}; see {DATA_PAGE}.") from error
    call(field, files, fix, dataset.__getitem__, 0)
    return rows


class Message(BaseModel):
    """One message of a prompt."""

    role: str
    content: Annotated[str, Field(min_length=1)] | list  # a list: text and images


class RewardModel(BaseModel):
    """By what a response is scored; a rule needs the right answer."""

    style: str | None = None
    ground_truth: Any = None

    @model_validator(mode="after")
    def _a_rule_has_a_ground_truth(self):
        if self.ground_truth is None and self.style in (None, "rule"):
            raise ValueError("no ground_truth, by which a rule scores")
        return self


class Row(BaseModel):
    """What verl needs of a row; ``prompt`` stands for the column that ``data.prompt_key`` names."""

    data_source: str
    prompt: Annotated[list[Message], Field(min_length=1)]
    reward_model: RewardModel


def _count_usable(rows, what, config, tokenizer, needed) -> int:
    """Rows that a run uses, counted up to ``needed`` where verl leaves out prompts that are too long.

    Where it does not, it cuts them from the left without a word, which ``data.truncation=error`` is to prevent.
    """
    data, usable = config.data, 0
    if not data.filter_overlong_prompts and data.truncation != "error":
        return len(rows)
    for index, row in enumerate(rows):
        tokens = tokenizer.apply_chat_template(
            row[data.prompt_key], add_generation_prompt=True, tokenize=True, **template_arguments(config)
        )
        length = len(normalize_token_ids(tokens))
        if length > data.max_prompt_length and not data.filter_overlong_prompts:
            raise ValueError(
                f"{what}, row {index}: the prompt has {length} tokens, and data.max_prompt_length="
                f"{data.max_prompt_length}: raise it, or set data.filter_overlong_prompts=true."
            )
        usable += length <= data.max_prompt_length
        if data.filter_overlong_prompts and usable == needed:
            break
    return usable


def _check_scored(rows, what, config):
    """verl's own scorer of each data source that occurs, called once as a run calls it, with an empty response."""
    if config.reward.custom_reward_function.path or config.reward.reward_model.enable:
        return
    for source, row in {row["data_source"]: row for row in rows}.items():
        try:
            default_compute_score(source, "", row["reward_model"]["ground_truth"])
        except NotImplementedError as error:
            raise ValueError(
                f"{what}: verl has no scorer for data_source={source}: set reward.custom_reward_function.path and "
                f"name, or rewrite the column; see {DATA_PAGE}."
            ) from error
        except Exception:  # of a scorer that wants more of a response
            continue


def check_reward(config) -> str:
    """The reward function and the reward manager, imported as verl imports them."""
    function, manager = config.reward.custom_reward_function, config.reward.reward_manager
    named = f"{function.path} and name={function.name}"
    fix = "give a file or pkg://module, and the name of a function in it"
    score = call("reward.custom_reward_function.path", named, fix, get_custom_reward_fn, config)
    call("reward.reward_manager.name", manager.name, "use naive or dapo", resolve_reward_manager_cls, config)
    return f"{function.name} of {function.path}" if score else "verl's own, by data_source"


def check_checkpoint(config) -> str:
    """The checkpoint from which the run goes on: there, complete, and saved on as many ranks."""
    trainer, ways = config.trainer, ("disable", "auto", "resume_path")
    if trainer.resume_mode not in ways:
        raise ValueError(f"trainer.resume_mode={trainer.resume_mode} is not usable: use one of {', '.join(ways)}.")
    if trainer.resume_mode == "disable":
        return "training starts anew (trainer.resume_mode=disable)"
    if trainer.resume_mode == "auto":
        folder = latest_checkpoint(Path(trainer.default_local_dir))
        if folder is None:
            return f"none in {trainer.default_local_dir}: training starts anew"
    else:
        folder = Path(str(trainer.resume_from_path))
        if "global_step_" not in folder.name or not folder.is_dir():
            raise ValueError(
                f"trainer.resume_from_path={folder} is not usable: name a checkpoint's folder, global_step_N."
            )
    go_back = (
        f"go on from an earlier one with trainer.resume_mode=resume_path trainer.resume_from_path="
        f"{trainer.default_local_dir}/global_step_N, or start anew with trainer.resume_mode=disable."
    )
    there = sorted(path.name for path in (folder / "actor").glob("*.pt"))
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    kinds = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
    # On several nodes each may have saved for itself.
    for rank in range(ranks if trainer.nnodes == 1 else 0):
        for content in set(config.actor_rollout_ref.actor.checkpoint.load_contents) & kinds.keys():
            name = f"{kinds[content]}_world_size_{ranks}_rank_{rank}.pt"
            if name not in there:
                raise ValueError(f"{folder} lacks actor/{name}, which {ranks} ranks need; there are {there}: {go_back}")
    for file in (*(folder / "actor" / name for name in there), folder / "data.pt"):
        if file.exists() and not zipfile.is_zipfile(file):  # torch's format ends with the table of contents
            raise ValueError(f"{file} is not complete: {go_back}")
    return f"training goes on from {folder}"
