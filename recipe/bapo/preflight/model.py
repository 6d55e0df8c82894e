# SPDX-License-Identifier: Apache-2.0
"""Check the model: config, weights, lengths, attention and fused kernels.

verl and transformers read it as in a run. We add rules for what they accept although a run would train something else,
and one for what fails only after the model is loaded.
"""

from pathlib import Path

from transformers.utils import logging

from recipe.bapo.preflight import CheckWarning, blame
from recipe.bapo.preflight.settings import Settings
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.model import get_hf_auto_model_class
from verl.workers.rollout.utils import get_max_position_embeddings

PATH = "actor_rollout_ref.model.path (MODEL_PATH)"
FUSED = "actor_rollout_ref.model.use_fused_kernels"
# Options of a model's config that change the logits after the output layer. verl's fused kernels ignore them.
AFTER_THE_OUTPUT_LAYER = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_model(config) -> str:
    """Check the model as verl reads it, and the headers of the weights."""
    model = model_of(config)
    _check_lengths(config, model.hf_config)
    _check_fused_kernels(config, model)
    about = Path(model.local_path) / "about.txt"  # of the language model (recipe.bapo.language_model)
    text = f"{about.read_text()}; " if about.is_file() else ""
    text += f"{model.hf_config.model_type}, {len(model.tokenizer)} tokens, eos {model.tokenizer.eos_token!r}"
    if not Path(model.local_path).is_dir():  # it is a name on the hub
        return text
    return f"{text}, {_check_weights(model).num_parameters():,} parameters"


def model_of(config):
    """Build verl's ``HFModelConfig``: the model's config, tokenizer and processor."""
    model = config.actor_rollout_ref.model
    with blame(PATH, model.path, "give a complete model folder or a hub name"):
        return omega_conf_to_dataclass(model)


def _check_lengths(config, hf_config):
    """Refuse a ``max_model_len`` with which the vLLM server cuts long responses and says nothing."""
    rollout, needed = config.actor_rollout_ref.rollout, Settings(config).longest
    if rollout.name != "vllm":
        return
    positions = get_max_position_embeddings(hf_config)
    length = rollout.max_model_len or positions
    if length < needed:
        raise ValueError(
            f"invalid data.max_prompt_length + data.max_response_length={needed} with actor_rollout_ref.rollout."
            f"max_model_len={rollout.max_model_len} and {PATH}={config.actor_rollout_ref.model.path}, which has "
            f"{positions} positions: vLLM would cut responses where prompt and response reach {length} tokens. Change "
            "one of the lengths or, for a model that can be extended, set max_position_embeddings for the trainer in "
            "+actor_rollout_ref.model.override_config and for the servers in +actor_rollout_ref.rollout.engine_kwargs."
            "vllm.hf_overrides."
        )


def _check_weights(model):
    """Load the weights with transformers onto the meta device: names and shapes, but no data. Returns that model.

    Raises:
        ValueError: weights are missing, or the attention does not compute this model.
        CheckWarning: transformers cannot load them, for example because of their shapes.
    """
    logging.disable_progress_bar()
    path, attention = f"{PATH}={model.path}", model.override_config.get("attn_implementation")
    capped = getattr(model.hf_config.get_text_config(), "attn_logit_softcapping", None)
    if attention == "torch_varlen":
        from recipe.bapo.verl_patches.attention import (
            refuse_model,  # it imports a module that older versions of torch do not have
        )

        refuse_model(model.hf_config, model.use_remove_padding)
    if attention == "sdpa" and capped is not None:
        raise ValueError(
            f"invalid {path} with attn_implementation={attention}, which drops the cap of its attention "
            f"(attn_logit_softcapping={capped}), so all log-probs would be wrong: set model.override_config."
            "attn_implementation=eager or flash_attention_2."
        )
    with blame(PATH, model.path, "give complete weights with the shapes of its config.json", CheckWarning):
        loaded, found = get_hf_auto_model_class(model.hf_config).from_pretrained(
            model.local_path,
            config=model.hf_config,
            trust_remote_code=model.trust_remote_code,
            attn_implementation=attention if attention in ("sdpa", "eager") else "eager",  # others may need a GPU
            device_map="meta",
            output_loading_info=True,
        )
    if found["missing_keys"]:  # transformers would fill them at random and only log a warning
        missing, count = min(found["missing_keys"]), len(loaded.state_dict())
        raise ValueError(
            f"invalid {path}: {len(found['missing_keys'])} of the {count} tensors are missing ({missing} is "
            "one); give complete weights."
        )
    return loaded


def _check_fused_kernels(config, model):
    """Find what verl's fused kernels cannot do.

    Raises:
        ValueError: log-probs would be wrong.
        CheckWarning: verl fails at the first log-probs of the reference model.
    """
    if not model.use_fused_kernels:
        return
    text = model.hf_config.get_text_config()
    for name in AFTER_THE_OUTPUT_LAYER:
        if getattr(text, name, None) not in (None, 1):
            raise ValueError(
                f"invalid {FUSED}=true with {PATH}={model.path}, whose config.json has {name}="
                f"{getattr(text, name)}: the kernels multiply by the output layer alone, so all log-probs would be "
                "wrong. Set it to false."
            )
    libraries = [model.external_lib] if isinstance(model.external_lib, str) else model.external_lib or []
    reference = need_reference_policy(config) and (model.lora_rank or 0) <= 0  # LoRA needs none
    sharded = config.actor_rollout_ref.ref.strategy == "fsdp2" and not model.hf_config.tie_word_embeddings
    if reference and sharded and "recipe.bapo.verl_patches.fused_heads" not in libraries:
        raise CheckWarning(
            f"invalid {FUSED}=true with a reference model (actor.use_kl_loss, algorithm.use_kl_in_reward) whose "
            "embeddings are not tied: verl builds it before it loads our patch. Set actor_rollout_ref.model."
            f"external_lib=[{','.join([*libraries, 'recipe.bapo.verl_patches.fused_heads'])}], or use_fused_kernels="
            "false."
        )
