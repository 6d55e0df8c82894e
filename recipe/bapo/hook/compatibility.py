# SPDX-License-Identifier: Apache-2.0
"""Which of verl's settings cannot be used with ``loss_mode=bapo``, and why.

The worker refuses them in every run before the first update; preflight calls the same function before Ray starts.
"""

from collections.abc import Callable
from typing import Any

from verl.workers.utils.losses import ppo_loss

# The reasons for refusing other strategies than fsdp, fsdp2 and megatron, for those that we looked into.
UNSUPPORTED_STRATEGIES = {
    "veomni": "(verl 0.9.1 runs VeOmni's forward only in bfloat16, and no test compares its bounds with FSDP's.)",
    "torchtitan": "(verl 0.9.1's engine for it does not import with torchtitan 0.3.0.)",
    "automodel": "(verl 0.9.1 has no actor config for it.)",
}


def require_ppo_loss(function: Callable, policy_loss: Any) -> None:
    """Refuse a run whose loss function is not the one that calls a policy loss, such as that of distillation.

    Args:
        function: the loss function that verl gives the worker.
        policy_loss: the ``BAPOPolicyLossConfig`` or ``MonitorConfig``.

    Raises:
        ValueError: names both and the fix.
    """
    if function is not ppo_loss:
        cls, name = type(policy_loss), getattr(function, "__qualname__", function)
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss._target_={cls.__module__}.{cls.__qualname__} needs verl's ppo_loss "
            f"(distillation.enabled=false), not {name}."
        )


def refuse_unusable_settings(actor_config: Any, model_config: Any) -> None:
    """Refuse settings under which the bounds or the loss would be wrong, or the search would fail.

    Args:
        actor_config: verl's ``ActorConfig``.
        model_config: verl's ``HFModelConfig``, or the config's section ``actor_rollout_ref.model``.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    if actor_config.strategy == "megatron":
        _refuse_on_megatron(actor_config)
    elif actor_config.strategy in ("fsdp", "fsdp2"):
        _refuse_on_fsdp(actor_config, model_config)
    else:
        reason = UNSUPPORTED_STRATEGIES.get(actor_config.strategy, "It was not tried.")
        raise ValueError(
            f"invalid actor_rollout_ref.actor.strategy={actor_config.strategy} with loss_mode=bapo: set it to "
            f"fsdp, fsdp2 or megatron. {reason}"
        )
    if actor_config.clip_ratio_c is not None and not actor_config.clip_ratio_c > 1:
        raise ValueError(
            f"invalid actor_rollout_ref.actor.clip_ratio_c={actor_config.clip_ratio_c}: it is the dual clip's "
            "bound on the ratio. Set it to a number above 1."
        )
    if actor_config.loss_agg_mode == "seq-mean-token-sum-norm" and actor_config.loss_scale_factor is None:
        raise ValueError(
            "invalid actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm with loss_scale_factor=null: "
            "verl divides by each micro-batch's padded width, so the loss would depend on how the mini-batch is split. "
            "Set actor_rollout_ref.actor.loss_scale_factor to a constant such as the maximum response length."
        )


def refuse_to_monitor(actor_config: Any, model_config: Any) -> None:
    """Refuse settings under which a run with another loss than BAPO's cannot be measured.

    Args:
        actor_config: verl's ``ActorConfig`` with a ``MonitorConfig``.
        model_config: not looked at; ``refuse_unusable_settings`` has the same arguments.

    Raises:
        ValueError: says why. The worker tells it to the user and leaves verl's loss as it is.
    """
    if actor_config.strategy not in ("fsdp", "fsdp2", "megatron"):
        raise ValueError(f"strategy={actor_config.strategy} was not tried.")
    if actor_config.strategy == "megatron":
        _require_megatron_section(actor_config)
        if actor_config.megatron.dynamic_context_parallel:
            raise ValueError(
                "with megatron.dynamic_context_parallel=true each rank has samples of its own, but only one reports."
            )
    if actor_config.clip_ratio_c is not None and not actor_config.clip_ratio_c > 1:
        raise ValueError(f"the search needs a clip_ratio_c above 1 or null, not {actor_config.clip_ratio_c}.")


def _refuse_on_fsdp(actor_config: Any, model_config: Any) -> None:
    parallel = actor_config.engine.ulysses_sequence_parallel_size
    attention = model_config.override_config.get("attn_implementation", "flash_attention_2")
    if parallel > 1 and not str(attention).startswith("flash_attention"):
        raise ValueError(
            f"invalid actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={parallel} with "
            f"attn_implementation={attention}: the GPUs exchange their parts of a sequence only in flash attention. "
            "Without it each would silently attend to its own part alone. Install flash-attn, or set it to 1."
        )


def _require_megatron_section(actor_config: Any) -> None:
    if not hasattr(actor_config, "megatron"):
        raise ValueError(
            "invalid actor_rollout_ref.actor.strategy=megatron without Megatron's section of the config: set "
            "model_engine=megatron, which sets the strategy and adds the section."
        )


def _refuse_on_megatron(actor_config: Any) -> None:
    _require_megatron_section(actor_config)
    if actor_config.policy_loss.bound_scope == "micro_batch":
        raise ValueError(
            "invalid actor_rollout_ref.actor.policy_loss.bound_scope=micro_batch with strategy=megatron: use "
            "mini_batch. Only the last stage of a pipeline calls the loss, so the others could not join a search there."
        )
    if actor_config.megatron.dynamic_context_parallel:
        raise ValueError(
            "invalid actor_rollout_ref.actor.megatron.dynamic_context_parallel=true with loss_mode=bapo: each "
            "rank then has samples of its own, but only one rank reports its outputs, so the bounds would be found on "
            "a part of the tokens. Set it to false."
        )
