# SPDX-License-Identifier: Apache-2.0
"""Check that BAPO's loss, or its monitor, can work in a run."""

from collections.abc import Callable

from recipe.bapo.hook.compatibility import refuse_to_monitor, refuse_unusable_settings, require_ppo_loss
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from recipe.bapo.preflight import CheckWarning


def check_loss(actor, model_config, function: Callable) -> str:
    """Check that BAPO's loss or monitor can work with a run's actor. Returns what the loss is.

    Args:
        actor: verl's ``ActorConfig``.
        model_config: the config's section ``actor_rollout_ref.model``.
        function: the loss function that verl will give the worker.

    Raises:
        ValueError: the loss is invalid. Names the field, its value and the fix.
        CheckWarning: the monitor will do nothing.
    """
    loss = actor.policy_loss
    ours = f"actor_rollout_ref.actor.policy_loss._target_={BAPOPolicyLossConfig.__module__}."
    if isinstance(loss, MonitorConfig):
        try:
            require_ppo_loss(function, loss)
            refuse_to_monitor(actor, model_config)
        except ValueError as error:
            raise CheckWarning(f"{ours}{MonitorConfig.__name__} does nothing in this run: {error}") from error
        scope = f"none, because loss_mode={loss.loss_mode} is only monitored"
    elif isinstance(loss, BAPOPolicyLossConfig):
        require_ppo_loss(function, loss)
        refuse_unusable_settings(actor, model_config)
        scope = loss.bound_scope
    elif loss.loss_mode == "bapo":
        raise ValueError(f"invalid loss_mode=bapo without its config: set {ours}{BAPOPolicyLossConfig.__name__}.")
    else:
        return f"loss_mode={loss.loss_mode}, without BAPO's monitor"
    return (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), bound_scope={scope}"
    )
