# SPDX-License-Identifier: Apache-2.0
"""The model: config, tokenizer, chat template, weights, adapters and fused kernels.

transformers, peft and verl read it as in a run; rules of our own are for what they accept and a run cannot use.
"""

from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers.utils import logging

from recipe.bapo.checks import blame_field
from recipe.bapo.checks.config import longest_sequence
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.utils.model import get_hf_auto_model_class
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

PATH = "actor_rollout_ref.model.path (MODEL_PATH)"
FUSED = "actor_rollout_ref.model.use_fused_kernels"
# Options of a model's config that change its logits after the output layer, where verl's fused kernels do not look.
AFTER_THE_OUTPUT_LAYER = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_model(config) -> str:
    """The model as verl reads it: config, tokenizer, chat template, and the weights' headers."""
    libraries = config.actor_rollout_ref.model.external_lib
    libraries = OmegaConf.to_container(libraries) if OmegaConf.is_list(libraries) else libraries
    fix = "name modules that can be imported, or null"
    blame_field("actor_rollout_ref.model.external_lib", libraries, fix, import_external_libs, libraries)
    model = model_of(config)
    check_tokenizer(config, model)
    _check_lengths(config, model.hf_config.get_text_config())
    _check_fused_kernels(config, model)
    if (model.lora_rank or 0) > 0 and model.lora_adapter_path is None:
        fix = "name modules of the model, or all-linear"
        blame_field("actor_rollout_ref.model.target_modules", model.target_modules, fix, _add_adapters, model)
    if Path(model.local_path).is_dir():  # else it is a name on the hub
        blame_field(PATH, model.path, "give whole weights, of the shapes in its config.json", _load_headers, model)
    about = Path(model.local_path) / "about.txt"  # of the language model (recipe.bapo.language_model)
    text = f"{about.read_text()}; " if about.is_file() else ""
    return f"{text}{model.hf_config.model_type}, {len(model.tokenizer)} tokens, eos {model.tokenizer.eos_token!r}"


def model_of(config):
    """verl's ``HFModelConfig``: the model's config, tokenizer and processor."""
    model = config.actor_rollout_ref.model
    return blame_field(PATH, model.path, "give a whole model folder or a hub name", omega_conf_to_dataclass, model)


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
            chat_template_kwargs=dict(config.data.get("apply_chat_template_kwargs") or {}),
            processor=model.processor,
        )
        builder.build_initial_tokens([{"role": "user", "content": "1+1="}], tools=None)

    blame_field(PATH, path, "fix its tokenizer or chat template, or set model.custom_chat_template", render)


def _check_lengths(config, text):
    """verl's vLLM server refuses a length beyond the model's positions; below the response's it silently cuts."""
    positions, needed = getattr(text, "max_position_embeddings", None), longest_sequence(config)
    if positions is None:  # verl then says what it misses
        return
    length = config.actor_rollout_ref.rollout.max_model_len
    if not needed <= (length or positions) <= positions:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={length} is not usable: it has to be at least data."
            f"max_prompt_length + data.max_response_length={needed} and at most the {positions} positions of {PATH}="
            f"{config.actor_rollout_ref.model.path}: change one of them or, for a model that can be extended, set "
            "model.override_config.max_position_embeddings."
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
    if found["missing_keys"]:  # transformers would make them at random, with a warning in the log
        missing, count = min(found["missing_keys"]), len(loaded.state_dict())
        raise ValueError(f"{len(found['missing_keys'])} of the {count} tensors are not there ({missing} is one)")


def _check_fused_kernels(config, model):
    """What verl's fused kernels cannot do, for which verl has no message before the first log-probs, or none at all."""
    if not model.use_fused_kernels:
        return
    if model.fused_kernel_options.get("impl_backend") not in ("torch", "triton", "liger"):
        raise ValueError(
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend={model.fused_kernel_options.get('impl_backend')}"
            f" is not usable with {FUSED}=true: set it to torch, triton or liger. verl would skip the kernels."
        )
    text = model.hf_config.get_text_config()
    for name in AFTER_THE_OUTPUT_LAYER:
        if getattr(text, name, None) not in (None, 1):
            raise ValueError(
                f"{FUSED}=true is not usable with {PATH}={model.path}, whose config.json has {name}="
                f"{getattr(text, name)}: the kernels multiply by the output layer alone, so all log-probs would be "
                "wrong. Set it to false."
            )
    libraries = [model.external_lib] if isinstance(model.external_lib, str) else model.external_lib or []
    reference = need_reference_policy(config) and (model.lora_rank or 0) <= 0  # LoRA's is the model without adapters
    sharded = config.actor_rollout_ref.ref.strategy == "fsdp2" and not model.hf_config.tie_word_embeddings
    if reference and sharded and "recipe.bapo.fused_head" not in libraries:
        raise ValueError(
            f"{FUSED}=true is not usable with a reference model (actor.use_kl_loss, algorithm.use_kl_in_reward) whose "
            "embeddings are not tied: verl builds it before it loads our patch. Set actor_rollout_ref.model."
            "external_lib=recipe.bapo.fused_head, or use_fused_kernels=false."
        )


def _add_adapters(model):
    """Have peft add LoRA's adapters as verl does, to a model of shapes and no weights."""
    from peft import LoraConfig, TaskType, get_peft_model

    get_peft_model(
        empty_model_of(model),
        LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=convert_to_regular_types(model.target_modules),
            target_parameters=convert_to_regular_types(model.target_parameters),
            exclude_modules=convert_to_regular_types(model.exclude_modules),
        ),
    )


def empty_model_of(model):
    """The model of verl's ``HFModelConfig`` on torch's meta device: shapes and no weights."""
    with torch.device("meta"):
        return get_hf_auto_model_class(model.hf_config).from_config(
            model.hf_config, trust_remote_code=model.trust_remote_code, attn_implementation="eager"
        )
