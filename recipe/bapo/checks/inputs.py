# SPDX-License-Identifier: Apache-2.0
"""What a run reads beside the model: data, reward function, and the checkpoint it goes on from."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.parquet
from pydantic import BaseModel, Field, ValidationError, model_validator

from recipe.bapo.checks import call, innermost
from recipe.bapo.checks.model import model_of, template_arguments
from recipe.bapo.records.checkpoints import latest_checkpoint
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import normalize_token_ids

DATA_PAGE = "docs/running.md, Data"


def check_files(config) -> str:
    """The data: every row in verl's schema, enough of them usable, scored, and readable by verl's data set."""
    rows = {field: check_data(config, config.data[field], f"data.{field}") for field in ("train_files", "val_files")}
    tokenizer = model_of(config).tokenizer
    for field, found in rows.items():
        what = f"data.{field}={config.data[field]}"
        needed = config.data.train_batch_size if field == "train_files" and not config.trainer.val_only else 1
        usable = _count_usable(found, what, config, tokenizer, needed)
        if found and usable < needed:
            raise ValueError(
                f"{what} has {usable} usable rows, and a batch is data.train_batch_size={needed}: lower it, give more "
                f"rows, or raise data.max_prompt_length={config.data.max_prompt_length}."
            )
        _check_scored(found, what, config)
        _check_first_rows(config.data[field], what, config, tokenizer)
    repeated = len(rows["train_files"]) - len({repr(row[config.data.prompt_key]) for row in rows["train_files"]})
    counts = " and ".join(f"{len(found):,} to {field.split('_')[0]}" for field, found in rows.items())
    return f"rows: {counts}" + (f"; {repeated:,} to train have a prompt that was there before" if repeated else "")


def check_data(config, files, field) -> list[dict]:
    """The rows of every local parquet file, each in verl's schema; files of other kinds are left to verl."""
    if not files:
        raise ValueError(f"{field} is not set: give a parquet file in verl's schema.")
    rows = []
    for name in [files] if isinstance(files, str) else files:
        path = Path(name).expanduser()
        if "://" in name:
            continue
        if path.is_dir() or not path.exists():
            why = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"{field}={name} {why}: give a parquet file in verl's schema.")
        if path.suffix == ".parquet":
            rows += _rows_of(path, f"{field}={name}", config)
        elif path.suffix not in (".json", ".jsonl"):
            raise ValueError(f"{field}={name} is not usable: verl reads files named .parquet, .json or .jsonl.")
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


def _rows_of(path, what, config) -> list[dict]:
    """The rows of a parquet file, each checked; a ValueError names the row."""
    key = config.data.prompt_key
    columns = ("data_source", key, "reward_model")
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            missing = [column for column in columns if column not in names]
            rows = [] if missing else table.read(columns=list(columns)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{what} is not a readable parquet file: {str(error).strip().splitlines()[0]}") from error
    if missing:
        raise ValueError(f"{what} lacks the columns {missing}: it has {names}; see {DATA_PAGE}.")
    if not rows:
        raise ValueError(f"{what} has no rows.")
    for index, row in enumerate(rows):
        try:
            Row.model_validate({**row, "prompt": row[key]})
        except ValidationError as error:
            first = error.errors()[0]
            fields = {**Row.model_fields, **Message.model_fields}  # not the names of a union's types
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in fields)
            raise ValueError(f"{what}, row {index}, {where}: {first['msg']}; see {DATA_PAGE}.") from error
    return rows


def _count_usable(rows, what, config, tokenizer, needed) -> int:
    """Rows that a run uses, counted up to ``needed`` where verl leaves out prompts that are too long.

    Where it does not, it cuts them from the left without a word, which ``data.truncation=error`` is to prevent.
    """
    data, limit, usable = config.data, config.data.max_prompt_length, 0
    kwargs = template_arguments(config)
    filtered = data.get("filter_overlong_prompts")
    if not filtered and data.get("truncation", "error") != "error":
        return len(rows)
    template = None
    for index, row in enumerate(rows):
        messages = row[data.prompt_key]
        text = "".join(message["content"] for message in messages if isinstance(message["content"], str))
        size = len(text.encode())  # no more tokens than bytes
        if template is None:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
            template = len(rendered.encode()) - size
        if size + template + 64 * (len(messages) - 1) > limit:
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **kwargs)
            length = len(normalize_token_ids(tokens))
            if length > limit and filtered:
                continue
            if length > limit:
                raise ValueError(
                    f"{what}, row {index}: the prompt has {length} tokens, and data.max_prompt_length={limit}: raise "
                    "it, or set data.filter_overlong_prompts=true."
                )
        usable += 1
        if filtered and usable == needed:
            break
    return usable


def _check_scored(rows, what, config):
    """verl's own scorer of each data source that occurs, called once as a run calls it, with an empty response."""
    if config.reward.custom_reward_function.path or config.reward.reward_model.enable:
        return
    first = {row["data_source"]: row for row in reversed(rows)}
    for source, row in first.items():
        try:
            default_compute_score(source, "", row["reward_model"]["ground_truth"])
        except NotImplementedError as error:
            raise ValueError(
                f"{what}: verl has no scorer for data_source={source}: set reward.custom_reward_function.path and "
                f"name, or rewrite the column; see {DATA_PAGE}."
            ) from error
        except Exception:  # of a scorer that wants more of a response
            continue


def _check_first_rows(names, what, config, tokenizer):
    """The files as verl's data set class reads them, and its first rows."""
    if any("://" in name for name in ([names] if isinstance(names, str) else names)):
        return  # elsewhere
    data = config.data.copy()
    data.filter_overlong_prompts = data.shuffle = False
    try:
        dataset = create_rl_dataset(names, data, tokenizer, None, max_samples=4)
        for index in range(len(dataset)):
            dataset[index]
    except Exception as error:
        raise ValueError(f"{what} cannot be read by verl's data set: {innermost(error)}; see {DATA_PAGE}.") from error


def check_reward(config) -> str:
    """The reward function and the reward manager, imported as verl imports them."""
    if config.custom_reward_function.path:
        raise ValueError(
            f"custom_reward_function.path={config.custom_reward_function.path} is not usable: verl's V1 trainer does "
            "not read it; set reward.custom_reward_function.path and name."
        )
    function, manager = config.reward.custom_reward_function, config.reward.reward_manager
    named = f"{function.path} and name={function.name}"
    fix = "give a file or pkg://module, and the name of a function in it"
    score = call("reward.custom_reward_function.path", named, fix, get_custom_reward_fn, config)
    call("reward.reward_manager.name", manager.name, "use naive or dapo", resolve_reward_manager_cls, config)
    return f"{function.name} of {function.path}" if score else "verl's own, by data_source"


def check_checkpoint(config) -> str:
    """The checkpoint from which the run goes on: there, complete, and saved on as many ranks."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return "training starts anew (trainer.resume_mode=disable)"
    if trainer.resume_mode == "auto":
        folder = latest_checkpoint(Path(trainer.default_local_dir))
        if folder is None:
            return f"none in {trainer.default_local_dir}: training starts anew"
        what = str(folder)
    else:
        folder, what = Path(str(trainer.resume_from_path)), f"trainer.resume_from_path={trainer.resume_from_path}"
        if trainer.resume_mode != "resume_path":
            raise ValueError(f"trainer.resume_mode={trainer.resume_mode} is not usable: disable, auto or resume_path.")
        if "global_step_" not in folder.name or not folder.is_dir():
            raise ValueError(f"{what} is not a checkpoint's folder, global_step_N.")
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    kinds = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
    contents = config.actor_rollout_ref.actor.checkpoint.load_contents
    for content in contents:
        if content not in kinds:
            continue
        other = {p.name for p in (folder / "actor").glob(f"{kinds[content]}_world_size_*_rank_*.pt")}
        for rank in range(ranks):
            name = f"{kinds[content]}_world_size_{ranks}_rank_{rank}.pt"
            if name not in other and (trainer.nnodes == 1 or (rank == 0 and other)):  # nodes may save for themselves
                fix = f"{ranks} ranks need it; there are {sorted(other)}" if other else _go_back(trainer)
                raise ValueError(f"{what} lacks actor/{name}: {fix}")
    for file in (*(folder / "actor").glob("*.pt"), folder / "data.pt"):
        if file.exists() and not zipfile.is_zipfile(file):  # torch's format ends with the table of contents
            raise ValueError(f"{file} is not complete: {_go_back(trainer)}")
    return f"training goes on from {folder}"


def _go_back(trainer):
    return (
        f"go on from an earlier one with trainer.resume_mode=resume_path trainer.resume_from_path="
        f"{trainer.default_local_dir}/global_step_N, or start anew with trainer.resume_mode=disable."
    )
