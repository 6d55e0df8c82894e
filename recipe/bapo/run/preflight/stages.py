# SPDX-License-Identifier: Apache-2.0
"""The stages of preflight, in order. To add one, write a function here or in the module of its subject, and a row."""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from recipe.bapo.compatibility import refuse_unusable_settings
from recipe.bapo.config import compose_config
from recipe.bapo.run.preflight import CheckWarning, blame, data, innermost, machine, model
from recipe.bapo.run.preflight.keys import explain, unusable_keys
from recipe.bapo.run.preflight.rules import check_counts, check_rules
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.tracking import Tracking

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WRITTEN_LATE = (  # keys of folders to which the run writes only hours later
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    f"{ACTOR}.policy_loss.record_dir",
)


@dataclass(frozen=True)
class Result:
    """What a stage found; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


def check_verls_config(config) -> str:
    """Build verl's dataclasses, and call its validation and the constructor of its trainer. Returns the loss."""
    from verl.trainer.ppo.v1 import get_trainer_cls  # its import warns of engines that are not installed

    built = {}
    for section in (ACTOR, ROLLOUT, "algorithm", *(["critic"] if need_critic(config) else [])):
        with blame(section):
            built[section] = omega_conf_to_dataclass(OmegaConf.select(config, section))
    loss = built[ACTOR].policy_loss
    if getattr(loss, "loss_mode", None) == "bapo":
        refuse_unusable_settings(built[ACTOR], config.actor_rollout_ref.model)
    with blame("the config"):
        validate_config(config, need_reference_policy(config), need_critic(config))
    mode = config.trainer.v1.trainer_mode
    with blame("trainer.v1.trainer_mode", mode):
        get_trainer_cls(mode)(config.copy())
    if not hasattr(loss, "bound_scope"):
        return f"loss_mode={loss.loss_mode}, without BAPO's monitor"
    scope = loss.bound_scope
    if loss.loss_mode != "bapo":
        scope = f"none, because loss_mode={loss.loss_mode} is only monitored"
    return (
        f"c_low [{loss.ratio_lower_start:g}, {loss.ratio_lower_max:g}], c_high [{loss.ratio_upper_start:g}, "
        f"{loss.ratio_upper_max:g}], target {loss.positive_contribution_target:g} ({loss.contribution}, "
        f"{loss.token_weight}), bound_scope={scope}"
    )


def check_advantages(config) -> str:
    """Call the advantage function of verl's V1 trainer on two prompts with two responses of three tokens."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    names = ["response_mask", "token_level_scores", "token_level_rewards", "rollout_log_probs", "old_log_probs"]
    names += ["ref_log_prob"] * need_reference_policy(config) + ["values"] * need_critic(config)
    tensors = {name: torch.ones(4, 3) for name in names}
    tensors["token_level_rewards"] = torch.tensor([[0.0, 0.0, right] for right in (0.0, 1.0, 1.0, 0.0)])
    prompts = ["a", "a", "b", "b"]
    rows = DataProto.from_dict(tensors, non_tensors={"uid": np.array(prompts, dtype=object)})
    name = config.algorithm.adv_estimator
    with blame("algorithm.adv_estimator", name, "use grpo, or another that verl's V1 trainer has the fields for"):
        found = compute_advantage_for_multi_trajectories(
            rows,
            batch_keys=[f"{prompt}_{number % 2}_0" for number, prompt in enumerate(prompts)],
            adv_estimator=name,
            gamma=config.algorithm.gamma,
            lam=config.algorithm.lam,
            num_repeat=2,
            norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
            config=config.algorithm,
        )
    return f"{name}, {found.batch['advantages'].abs().max():.3g} at most for rewards of 0 and 1"


def check_loggers(config) -> str:
    """Import what ``trainer.logger`` names, and ask wandb for its key."""
    loggers = config.trainer.logger
    for name in loggers:
        with blame("trainer.logger", name):
            if name not in Tracking.supported_backend:
                raise ValueError(f"verl logs to {', '.join(Tracking.supported_backend)}")
            if name not in ("file", "console", "rl_insight"):
                package = importlib.import_module({"vemlp_wandb": "volcengine_ml_platform"}.get(name, name))
            if name == "wandb":
                package.login()  # raises without a key and a terminal; asks the server unless WANDB_MODE=offline
    return ", ".join(loggers)


def check_folders(config) -> str:
    """Check that the run can write to the folders that it uses only later."""
    for key in WRITTEN_LATE:
        path = OmegaConf.select(config, key)
        if path and not (key == "trainer.default_local_dir" and config.trainer.save_freq <= 0):
            folder = Path(path).absolute()
            existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
            with blame(key, path, "choose another folder"):
                tempfile.TemporaryDirectory(dir=existing).cleanup()
    return str(config.run_dir)


# Name, function, and the stages that have to pass first: after one of these failed, this one would repeat its fault.
STAGES: tuple[tuple[str, Callable, tuple[str, ...]], ...] = (
    ("versions", machine.check_versions, ()),
    ("devices", machine.check_devices, ()),
    ("GPU memory", machine.check_gpu_memory, ("devices",)),
    ("CPUs", machine.check_cpus, ("devices",)),
    ("other runs", machine.check_other_runs, ()),
    ("shared memory", machine.check_shared_memory, ()),
    ("disk", machine.check_disk, ()),
    ("verl's config", check_verls_config, ()),
    ("settings", check_rules, ("verl's config",)),
    ("advantages", check_advantages, ("verl's config",)),
    ("loggers", check_loggers, ()),
    ("folders", check_folders, ()),
    ("checkpoint", data.check_checkpoint, ()),
    ("reward", data.check_reward, ()),
    ("model", model.check_model, ()),
    ("data", data.check_files, ("model",)),
)


def run_stages(config) -> list[Result]:
    """Resolve the config in place, add the file logger, and run the stages, except those that rely on a failed one.

    If the config has an unknown key, a wrong type or a value that cannot be resolved, only that is reported.
    """
    unusable = unusable_keys(config)
    if unusable:
        return [Result("keys", "failed", line) for line in unusable]
    OmegaConf.resolve(config)
    migrate_legacy_reward_impl(config)  # moves old keys of the reward, which verl's V1 trainer does not read
    counts = _result("counts", check_counts, config)
    if counts.status == "failed":
        return [counts]
    _add_file_logger(config)
    results: dict[str, Result] = {}
    for name, stage, relies_on in STAGES:
        if all(other in results and results[other].status != "failed" for other in relies_on):
            results[name] = _result(name, stage, config)
    return list(results.values())


def _result(name, stage, config):
    try:
        return Result(name, "ok", stage(config))
    except CheckWarning as warning:
        return Result(name, "warning", str(warning))
    except Exception as error:  # a stage with an error of its own must not hide the others
        return Result(name, "failed", str(error) if isinstance(error, ValueError) else innermost(error))


def table(results: list[Result]) -> str:
    """Format results as a table for the terminal."""
    return "\n".join(f"{result.status:<8} {result.name:<16} {result.detail}" for result in results)


def run_preflight(overrides: list[str], groups: str | None) -> list[Result]:
    """Compose the config and run all stages. If it cannot be composed, the only result says why."""
    try:
        return run_stages(compose_config(overrides, groups))
    except Exception as error:
        return [Result("keys", "failed", explain(error))]


def _add_file_logger(config):
    """Add verl's file logger, because console, watchdog and pictures read what it writes."""
    loggers = config.trainer.logger or []
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    config.trainer.logger = [*loggers, *(["file"] if "file" not in loggers else [])]
