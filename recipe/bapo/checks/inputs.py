"""What a run reads, checked before a cluster is started: model, data, and the checkpoint it goes on from."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet

from recipe.bapo.records.checkpoints import latest_checkpoint


def check_model(config) -> str:
    """The config and the tokenizer of ``actor_rollout_ref.model``: readable, with all that training needs."""
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    field, path = "actor_rollout_ref.model.path (MODEL_PATH)", str(model.path)
    local = Path(path).expanduser()
    if path.startswith(("/", ".", "~")) and not local.is_dir():
        raise ValueError(f"{field}={path} is not a folder: give a Hugging Face model folder or a hub name.")
    try:
        source = model.get("hf_config_path") or (str(local) if local.is_dir() else path)
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=bool(model.get("trust_remote_code", False)))
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


def tokenizer_of(config):
    """The run's tokenizer."""
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    local = Path(str(model.path)).expanduser()
    source = model.get("tokenizer_path") or (str(local) if local.is_dir() else str(model.path))
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=bool(model.get("trust_remote_code", False)))
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


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


def _check_parquet(path, what, config):
    """Raise a ValueError that names the row; returns the prompts as text."""
    key = config.data.prompt_key
    columns = ("data_source", key, "reward_model")
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            schema, number = table.schema_arrow, table.metadata.num_rows
            missing = [column for column in columns if column not in schema.names]
            rows = [] if missing else table.read(columns=list(columns)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{what} is not a readable parquet file: {str(error).strip().splitlines()[0]}") from error
    if missing:
        raise ValueError(f"{what} lacks the columns {missing}: it has {schema.names}; see docs/running.md.")
    if number == 0:
        raise ValueError(f"{what} has no rows.")
    _check_types(schema, key, what)
    for index, row in enumerate(rows):
        empty = [column for column in columns if row[column] is None]
        if empty:
            raise ValueError(f"{what}, row {index}: {empty[0]} is null; see docs/running.md.")
        if not any(message and message.get("content") for message in row[key]):
            raise ValueError(f"{what}, row {index}: {key} is empty; give at least one message with content.")
        if row["reward_model"].get("ground_truth") is None and row["reward_model"].get("style") in (None, "rule"):
            raise ValueError(f"{what}, row {index}: reward_model has no ground_truth, by which a rule scores.")
    _check_lengths([row[key] for row in rows], what, config)
    return [repr(row[key]) for row in rows]


def _check_types(schema, key, what):
    types = {name: schema.field(name).type for name in ("data_source", key, "reward_model")}

    def fields_of(type_):
        return {type_.field(i).name for i in range(type_.num_fields)} if pyarrow.types.is_struct(type_) else set()

    is_text = pyarrow.types.is_string(types["data_source"]) or pyarrow.types.is_large_string(types["data_source"])
    messages = getattr(types[key], "value_type", None)
    for name, right, wanted in (
        ("data_source", is_text or pyarrow.types.is_dictionary(types["data_source"]), "text"),
        (key, messages is not None and {"role", "content"} <= fields_of(messages), "a list of {role, content}"),
        ("reward_model", bool(fields_of(types["reward_model"])), "{style, ground_truth}"),
    ):
        if not right:
            raise ValueError(f"{what}: the column {name} is {types[name]}, not {wanted}; see docs/running.md.")


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
