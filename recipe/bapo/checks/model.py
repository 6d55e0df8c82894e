# SPDX-License-Identifier: Apache-2.0
"""The model as verl reads it: its config, tokenizer and chat template, and the headers of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open

from recipe.bapo.checks import call, innermost
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.utils.model import get_hf_auto_model_class
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

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


def template_arguments(config) -> dict:
    """What a run gives to the chat template beside the messages."""
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
    kind, kwargs = model.hf_config.model_type, template_arguments(config)
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
