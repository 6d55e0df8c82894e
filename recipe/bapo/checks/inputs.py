# SPDX-License-Identifier: Apache-2.0
"""What a run reads, checked before a cluster is started: model, data, and the checkpoint it goes on from."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.parquet
from pydantic import BaseModel, Field, ValidationError, model_validator

from recipe.bapo.records.checkpoints import latest_checkpoint

DATA_PAGE = "docs/running.md, Data"


def check_model(config) -> str:
    """The config and the tokenizer of ``actor_rollout_ref.model``: readable, with all that training needs."""
    model = config.actor_rollout_ref.model
    field, path = "actor_rollout_ref.model.path (MODEL_PATH)", str(model.path)
    local = Path(path).expanduser()
    if path.startswith(("/", ".", "~")) and not local.is_dir():
        raise ValueError(f"{field}={path} is not a folder: give a Hugging Face model folder or a hub name.")
    try:
        hf_config = hf_config_of(config)
        tokenizer = tokenizer_of(config)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{field}={path} cannot be read as a Hugging Face model: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{field}={path}: its tokenizer has no end-of-sequence token; set eos_token.")
    if tokenizer.chat_template is None and not model.get("custom_chat_template"):
        raise ValueError(f"{field}={path}: its tokenizer has no chat template; set model.custom_chat_template.")
    vocabulary = hf_config.get_text_config().vocab_size
    highest = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id)  # tokens added beside may never be used
    if highest >= vocabulary:
        raise ValueError(
            f"{field}={path}: its tokenizer uses token {highest}, and the model's vocabulary ends at {vocabulary - 1}: "
            "the two do not belong together."
        )
    # As verl's vLLM server checks it, in a worker and a minute later.
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    positions = (model.get("override_config") or {}).get("max_position_embeddings", positions)
    wanted = config.actor_rollout_ref.rollout.max_model_len
    if positions is not None and wanted is not None and wanted > positions:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={wanted} is more than the {positions} positions of {field}={path}"
            ": lower it, or for a model that can be extended set model.override_config.max_position_embeddings."
        )
    return f"{hf_config.model_type}, {len(tokenizer)} tokens, eos {tokenizer.eos_token!r}"


def hf_config_of(config):
    """The config of the run's model."""
    from transformers import AutoConfig

    return _read(AutoConfig, config, "hf_config_path")


def tokenizer_of(config):
    """The run's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer, model = _read(AutoTokenizer, config, "tokenizer_path"), config.actor_rollout_ref.model
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def _read(kind, config, key):
    model = config.actor_rollout_ref.model
    local = Path(str(model.path)).expanduser()
    source = model.get(key) or (str(local) if local.is_dir() else str(model.path))
    return kind.from_pretrained(source, trust_remote_code=bool(model.get("trust_remote_code", False)))


def check_train_data(config) -> str:
    """The training files: readable, in verl's schema, every row usable."""
    return check_data(config, config.data.train_files, "data.train_files")


def check_val_data(config) -> str:
    """The validation files, likewise."""
    return check_data(config, config.data.val_files, "data.val_files")


def check_data(config, files, field) -> str:
    """Every local parquet file in turn; other kinds are left to verl."""
    if not files:
        raise ValueError(f"{field} is not set: give a parquet file in verl's schema.")
    rows, prompts = 0, set()
    for name in [files] if isinstance(files, str) else files:
        path = Path(name).expanduser()
        if "://" in name:
            continue
        if not path.is_file():
            raise ValueError(f"{field}={name} does not exist: give a parquet file in verl's schema.")
        if path.suffix == ".parquet":
            found = _check_parquet(path, f"{field}={name}", config)
            rows += len(found)
            prompts.update(found)
    repeated = rows - len(prompts)
    return f"{rows:,} rows" + (f", {repeated:,} of them with a prompt that was there before" if repeated else "")


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


def _check_parquet(path, what, config):
    """Raise a ValueError that names the row; returns the prompts as text."""
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
    _check_lengths([row[key] for row in rows], what, config)
    return [repr(row[key]) for row in rows]


def _check_lengths(prompts, what, config):
    """verl stops at a prompt that is too long, unless it leaves such prompts out or cuts them."""
    limit = config.data.max_prompt_length
    if config.data.get("filter_overlong_prompts") or config.data.get("truncation", "error") != "error":
        return
    tokenizer = None
    for index, messages in enumerate(prompts):
        text = "".join(message["content"] for message in messages if isinstance(message["content"], str))
        if len(text.encode()) + 64 <= limit:  # no more tokens than bytes, and a chat template's own
            continue
        tokenizer = tokenizer or tokenizer_of(config)
        length = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        if length > limit:
            raise ValueError(
                f"{what}, row {index}: the prompt has {length} tokens, and data.max_prompt_length={limit}: raise "
                "it, or set data.filter_overlong_prompts=true."
            )


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
