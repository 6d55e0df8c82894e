# SPDX-License-Identifier: Apache-2.0
"""Which of verl's settings cannot be used with ``loss_mode=bapo``, and why.

The worker refuses them in every run before the first update; preflight calls the same function before Ray starts.
"""


def refuse_unusable_settings(actor_config, model_config) -> None:
    """Refuse settings under which the bounds or the loss would be wrong, or the search would fail.

    Args:
        actor_config, model_config: verl's ``ActorConfig`` and ``HFModelConfig``, or the model's section of the config.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    if actor_config.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={actor_config.strategy} is not usable with loss_mode=bapo: set it to "
            "fsdp or fsdp2. (In pipelines only the last stage calls the loss, and its collective would hang.)"
        )
    parallel = actor_config.engine.ulysses_sequence_parallel_size
    attention = model_config.override_config.get("attn_implementation", "flash_attention_2")
    if parallel > 1 and not str(attention).startswith("flash_attention"):
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={parallel} is not usable with "
            f"attn_implementation={attention}: verl exchanges the parts of a sequence in flash attention alone, and "
            "each GPU would silently attend to its own part. Install flash-attn, or set it to 1."
        )
    if actor_config.loss_agg_mode == "seq-mean-token-sum-norm" and actor_config.loss_scale_factor is None:
        raise ValueError(
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm is not usable with loss_scale_factor=null: "
            "verl divides by each micro-batch's padded width, so the loss would depend on the cut. Set "
            "actor_rollout_ref.actor.loss_scale_factor to a constant such as the maximum response length."
        )
    if actor_config.policy_loss.bound_scope == "mini_batch" and model_config.enable_activation_offload:
        raise ValueError(
            "actor_rollout_ref.model.enable_activation_offload=true is not usable with bound_scope=mini_batch: verl's "
            "offloading expects a backward after every forward, and the search makes a forward without one. Set it to "
            "false, or use bound_scope=previous_batch, which makes no such forward."
        )
