# SPDX-License-Identifier: Apache-2.0
"""What the launcher knows of BAPO: the module that trains, the check of its loss, and what of its metrics is shown.

To launch another recipe, write another such module. Two parts of the package are made for BAPO's users, and name its
options or configs as well: ``preflight`` and ``choose``. The parent process imports this module, so it imports neither
verl nor torch before they are needed.
"""

from statistics import fmean

NAME = "BAPO"  # the prefix of the worker's sentences in the log
TRAINING = "recipe.bapo.main_bapo"  # the module of the training process
CONFIG_NAME = "bapo_trainer"
SKIPPED = "actor/bapo/skipped"  # share of the updates that verl skipped; logged with BAPO's loss or the monitor
# What a step's line shows, by metric.
IN_A_LINE = {
    "actor/bapo/positive_contribution_start": "  rho {:.3f}",
    "actor/bapo/positive_contribution": " -> {:.3f}",
    "actor/bapo/clip_low": "  bounds [{:.3f},",
    "actor/bapo/clip_high": " {:.3f}]",
}
# What the run's picture shows: each panel by its title, with its metrics and how the legend names them.
PANELS = {
    "Positive contribution rho": {
        "actor/bapo/positive_contribution": "at the bounds",
        "actor/bapo/positive_contribution_start": "start",
    },
    "Upper bound, mean of the updates": {"actor/bapo/clip_high": ""},
    "Lower bound, mean of the updates": {"actor/bapo/clip_low": ""},
    "Clipped tokens, share of their sign": {
        "actor/bapo/clipfrac_positive": "positive",
        "actor/bapo/clipfrac_negative": "negative",
    },
    "Saturated searches, share of updates": {"actor/bapo/saturated": ""},
}


def train(config) -> None:
    """Train, in the process of the task runner. ``config`` is the composed config."""
    from recipe.bapo.trainer import BAPOTaskRunner

    BAPOTaskRunner().run(config)


def check_loss(actor, model_config) -> tuple[str, bool]:
    """Check that BAPO's loss or monitor can work with a run's actor.

    Args:
        actor: verl's ``ActorConfig``.
        model_config: the config's section ``actor_rollout_ref.model``.

    Returns:
        What the loss is, and False; or a warning that the monitor will do nothing, and True.

    Raises:
        ValueError: the loss is not usable. Names the field, its value and the fix.
    """
    from recipe.bapo.compatibility import refuse_to_monitor, refuse_unusable_settings
    from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig

    loss = actor.policy_loss
    ours = f"actor_rollout_ref.actor.policy_loss._target_={BAPOPolicyLossConfig.__module__}."
    if isinstance(loss, MonitorConfig):
        try:
            refuse_to_monitor(actor, model_config)
        except ValueError as error:
            return f"{ours}{MonitorConfig.__name__} does nothing in this run: {error}", True
        scope = f"none, because loss_mode={loss.loss_mode} is only monitored"
    elif isinstance(loss, BAPOPolicyLossConfig):
        refuse_unusable_settings(actor, model_config)
        scope = loss.bound_scope
    elif loss.loss_mode == "bapo":
        raise ValueError(f"loss_mode=bapo is not usable without its config: set {ours}{BAPOPolicyLossConfig.__name__}.")
    else:
        return f"loss_mode={loss.loss_mode}, without BAPO's monitor", False
    about = (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), bound_scope={scope}"
    )
    return about, False


def refuse_attention(name: str | None, model) -> None:
    """Refuse our attention for a model that it cannot serve.

    Args:
        name: the run's ``attn_implementation``.
        model: verl's ``HFModelConfig``.

    Raises:
        ValueError: says why, and which setting to change.
    """
    from recipe.bapo import attention

    if name == attention.NAME:
        attention.refuse_model(model.hf_config, model.use_remove_padding)


def applies(data: dict[str, float]) -> bool:
    """Whether the loss of a step used BAPO's bounds; otherwise they were only searched."""
    return data.get("actor/bapo/applied", 1.0) == 1


def relabel(line: str, data: dict[str, float]) -> str:
    """Write "BAPO's bounds" for "bounds" in a step's line if the loss of the step did not use them."""
    return line if applies(data) else line.replace("  bounds [", "  BAPO's bounds [")


def summary_lines(steps: list[dict[str, float]]) -> list[str]:
    """Format what the search for bounds did in a run, or would have done in a run with another loss, and its cost.

    Args:
        steps: the metrics of the training steps.
    """
    steps = [data for data in steps if "actor/bapo/met_by_moving" in data]
    if not steps:
        return []

    def mean(name):
        return fmean(data[f"actor/bapo/{name}"] for data in steps)

    applied = applies(steps[-1])
    rho = (mean("positive_contribution_start"), mean("positive_contribution"))
    at_the_bounds = "at the bounds used" if applied else "at the bounds found"
    rows = {
        "updates with the target met at the start": f"{mean('met_at_start'):.0%}",
        "updates with the target met by moving bounds": f"{mean('met_by_moving'):.0%}",
        "updates with a saturated search": f"{mean('saturated'):.0%}",
        "positive contribution (rho)": f"{rho[0]:.3f} at the start, {rho[1]:.3f} {at_the_bounds}",
        "bounds on the ratio": f"[{mean('clip_low'):.3f}, {mean('clip_high'):.3f}]",
    }
    if all("actor/bapo/redone" in data for data in steps):  # records of earlier versions have no costs
        rows["updates with an extra forward pass"] = f"{mean('extra_forward'):.0%}"
        rows["updates that were made twice"] = f"{mean('redone'):.0%}"
    head = "The search for bounds" if applied else "What BAPO would have done"
    return [f"{head}, mean of all updates:", *(f"  {name:<46}{text}" for name, text in rows.items())]
