# SPDX-License-Identifier: Apache-2.0
"""The model as verl reads it: its config, tokenizer and chat template, and the headers of its weights.

transformers and verl are called and say what is wrong; a rule of our own is only for what they accept.
"""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers.utils import logging

from recipe.bapo.checks import call
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
    check_tokenizer(config, model)
    _check_lengths(config, model.hf_config.get_text_config())
    if _folder(config).is_dir():  # else it is a name on the hub
        call(PATH, model.path, "give whole weights, of the shapes in its config.json", _load_headers, model)
    return f"{model.hf_config.model_type}, {len(model.tokenizer)} tokens, eos {model.tokenizer.eos_token!r}"


def _folder(config):
    return Path(str(config.actor_rollout_ref.model.path)).expanduser()


def model_of(config):
    """verl's ``HFModelConfig``: the model's config, tokenizer and processor."""
    model = config.actor_rollout_ref.model
    if str(model.path).startswith(("/", ".", "~")) and not _folder(config).is_dir():
        raise ValueError(f"{PATH}={model.path} is not a folder: give a Hugging Face model folder or a hub name.")
    return call(PATH, model.path, "give a whole Hugging Face model", omega_conf_to_dataclass, model)


def empty_model_of(config):
    """The run's model on the meta device: shapes and no weights."""
    model = model_of(config)
    automodel = get_hf_auto_model_class(model.hf_config)
    with torch.device("meta"):
        return automodel.from_config(
            model.hf_config, trust_remote_code=model.trust_remote_code, attn_implementation="eager"
        )


def template_arguments(config) -> dict:
    """What a run gives to the chat template beside the messages."""
    return OmegaConf.to_container(OmegaConf.create(config.data.get("apply_chat_template_kwargs") or {}))


def check_tokenizer(config, model) -> None:
    """Its tokens are the model's, and its chat template can be rendered as a run's agent loop does."""
    path, tokenizer = config.actor_rollout_ref.model.path, model.tokenizer
    if len(tokenizer) < 3 or tokenizer.eos_token_id is None:
        raise ValueError(
            f"{PATH}={path}: its tokenizer has {len(tokenizer)} tokens and the end token {tokenizer.eos_token!r}: give "
            "the model's tokenizer files, or set eos_token."
        )

    def render():  # some models' builders need a newline that is one token
        builder = create_continuous_token_builder(
            tokenizer,
            hf_model_type=model.hf_config.model_type,
            chat_template_kwargs=template_arguments(config),
            processor=model.processor,
        )
        builder.build_initial_tokens([{"role": "user", "content": "1+1="}], tools=None)

    call(PATH, path, "mend its tokenizer or chat template, or set model.custom_chat_template", render)
    vocabulary = model.hf_config.get_text_config().vocab_size
    highest = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id)  # tokens added beside may never be used
    if highest >= vocabulary:
        raise ValueError(
            f"{PATH}={path}: its tokenizer uses token {highest}, and the model's vocabulary ends at {vocabulary - 1}: "
            "give tokenizer and config.json of the same model."
        )


def _check_lengths(config, text):
    """verl's vLLM server refuses a length beyond the model's positions; below the response's it cuts without a word."""
    data, path, positions = config.data, config.actor_rollout_ref.model.path, text.max_position_embeddings
    field, limit = "actor_rollout_ref.rollout.max_model_len", config.actor_rollout_ref.rollout.max_model_len
    if limit is not None and limit > positions:
        raise ValueError(
            f"{field}={limit} is more than the {positions} positions of {PATH}={path}: lower it, or for a model that "
            "can be extended set model.override_config.max_position_embeddings."
        )
    needed = data.max_prompt_length + data.max_response_length
    if (limit or positions) < needed:
        raise ValueError(
            f"{field}={limit or positions} is less than data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length}: vLLM would cut responses there. Set it to {needed}, "
            "or lower the lengths."
        )


def _load_headers(model):
    """Have transformers load the weights onto the meta device: names and shapes, and no bytes."""
    logging.disable_progress_bar()
    loaded, found = get_hf_auto_model_class(model.hf_config).from_pretrained(
        model.local_path,
        config=model.hf_config,
        trust_remote_code=model.trust_remote_code,
        attn_implementation="eager",
        device_map="meta",
        ignore_mismatched_sizes=True,  # without it the message names none
        output_loading_info=True,
    )
    if found["mismatched_keys"]:
        name, given, wanted = min(found["mismatched_keys"])
        raise ValueError(f"{name} has the shape {tuple(given)}, and config.json asks for {tuple(wanted)}")
    if found["missing_keys"] >= loaded.state_dict().keys():
        raise ValueError(f"none of its weights is one of config.json's model ({min(found['missing_keys'])})")
