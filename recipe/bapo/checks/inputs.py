# SPDX-License-Identifier: Apache-2.0
"""What a run reads, checked before a cluster is started: model, data, and the checkpoint it goes on from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.parquet
import torch
from omegaconf import OmegaConf
from pydantic import BaseModel, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from recipe.bapo.checks import call, innermost
from recipe.bapo.records.checkpoints import latest_checkpoint
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.utils.model import get_hf_auto_model_class
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

DATA_PAGE = "docs/running.md, Data"
PATH = "actor_rollout_ref.model.path (MODEL_PATH)"


def check_model(config) -> str:
    """The model as verl reads it: config, tokenizer, chat template, and the weights' headers."""
    libraries = config.actor_rollout_ref.model.external_lib
    libraries = OmegaConf.to_container(libraries) if OmegaConf.is_list(libraries) else libraries
    fix = "name modules that can be imported, recipe.bapo.plugin among them"
    call("actor_rollout_ref.model.external_lib", libraries, fix, import_external_libs, libraries)
    model = model_of(config)
    text, tokenizer = model.hf_config.get_text_config(), model.tokenizer
    check_tokenizer(config, model)
    _check_lengths_of_model(config, text)
    _check_weights(config)
    return f"{model.hf_config.model_type}, {len(tokenizer)} tokens, eos {tokenizer.eos_token!r}"


def model_of(config):
    """verl's ``HFModelConfig``: the model's config, tokenizer and processor."""
    path = str(config.actor_rollout_ref.model.path)
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ValueError(f"{PATH}={path} is not a folder: give a Hugging Face model folder or a hub name.")
    try:
        return omega_conf_to_dataclass(config.actor_rollout_ref.model)
    except Exception as error:
        raise ValueError(f"{PATH}={path} cannot be read as a Hugging Face model: {innermost(error)}") from error


def hf_config_of(config):
    """The config of the run's model."""
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    local = Path(str(model.path)).expanduser()
    source = model.get("hf_config_path") or (str(local) if local.is_dir() else str(model.path))
    return AutoConfig.from_pretrained(source, trust_remote_code=bool(model.get("trust_remote_code", False)))


def empty_model_of(config):
    """The run's model on the meta device: shapes and no weights."""
    hf_config = hf_config_of(config)
    trust = bool(config.actor_rollout_ref.model.get("trust_remote_code", False))
    with torch.device("meta"):
        return get_hf_auto_model_class(hf_config).from_config(hf_config, trust_remote_code=trust)


def _template_arguments(config) -> dict:
    return OmegaConf.to_container(OmegaConf.create(config.data.get("apply_chat_template_kwargs") or {}))


def check_tokenizer(config, model) -> None:
    """Its tokens are the model's, and its chat template can be rendered as a run's agent loop does."""
    what, tokenizer = f"{PATH}={config.actor_rollout_ref.model.path}", model.tokenizer
    if len(tokenizer) < 3:
        raise ValueError(f"{what}: its tokenizer has {len(tokenizer)} tokens: give the model's tokenizer files.")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{what}: its tokenizer has no end-of-sequence token; set eos_token.")
    if tokenizer.chat_template is None:
        raise ValueError(f"{what}: its tokenizer has no chat template; set model.custom_chat_template.")
    # As the agent loop of a run does; some models' need a newline that is one token.
    kind, kwargs = model.hf_config.model_type, _template_arguments(config)
    try:
        builder = create_continuous_token_builder(
            tokenizer, hf_model_type=kind, chat_template_kwargs=kwargs, processor=model.processor
        )
        builder.build_initial_tokens([{"role": "user", "content": "1+1="}], tools=None)
    except Exception as error:
        raise ValueError(
            f"{what}: its tokenizer or chat template cannot be used: {innermost(error)}. Mend them, or set "
            "model.custom_chat_template."
        ) from error
    vocabulary = model.hf_config.get_text_config().vocab_size
    highest = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id)  # tokens added beside may never be used
    if highest >= vocabulary:
        raise ValueError(
            f"{what}: its tokenizer uses token {highest}, and the model's vocabulary ends at {vocabulary - 1}: the two "
            "do not belong together."
        )


def _check_lengths_of_model(config, text):
    """verl's vLLM server refuses a length beyond the model's positions; below the response's it cuts without a word."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    positions = getattr(text, "max_position_embeddings", None)
    override = config.actor_rollout_ref.model.get("override_config") or {}
    positions = override.get("max_position_embeddings", positions)
    field, limit = "actor_rollout_ref.rollout.max_model_len", rollout.max_model_len
    if positions is not None and limit is not None and limit > positions:
        raise ValueError(
            f"{field}={limit} is more than the {positions} positions of {PATH}={config.actor_rollout_ref.model.path}: "
            "lower it, or for a model that can be extended set model.override_config.max_position_embeddings."
        )
    limit, needed = limit or positions, data.max_prompt_length + data.max_response_length
    if limit is not None and limit < needed:
        raise ValueError(
            f"{field}={limit} is less than data.max_prompt_length={data.max_prompt_length} + data.max_response_length="
            f"{data.max_response_length}: vLLM would cut responses there. Set it to {needed}, or lower the lengths."
        )


def _check_weights(config):
    """The headers of safetensors files against the shapes of the config's model; other formats are left to verl."""
    path = Path(str(config.actor_rollout_ref.model.path)).expanduser()
    if not path.is_dir():
        return  # a name on the hub
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    if not files:
        if not any(path.glob("*.bin")):
            raise ValueError(f"{PATH}={path} has no weights: give a folder with *.safetensors.")
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{PATH}={path}: {file.name} is not a whole safetensors file: {error}.") from error
    empty = call(PATH, path, "mend its config.json", empty_model_of, config)
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    for name in sorted(wanted.keys() & shapes.keys()):
        if wanted[name] != shapes[name]:
            raise ValueError(
                f"{PATH}={path}: the weight {name} has the shape {shapes[name]}, and config.json asks for "
                f"{wanted[name]}: give weights and config.json of the same model."
            )
    if not wanted.keys() & shapes.keys():
        raise ValueError(
            f"{PATH}={path}: none of the weights is one of config.json's model ({min(wanted)}): give weights and "
            "config.json of the same model."
        )


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
    kwargs = _template_arguments(config)
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
