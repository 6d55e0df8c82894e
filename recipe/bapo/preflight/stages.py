# SPDX-License-Identifier: Apache-2.0
"""The stages of preflight, in order. To add one, write a function here or in the module of its subject, and a row."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from recipe.bapo.config import compose_config, is_of_our_trainer, prepare
from recipe.bapo.config.errors import explain, innermost
from recipe.bapo.preflight import CheckSkipped, CheckWarning, blame, data, machine, model, reward
from recipe.bapo.preflight.keys import misread_switches, unknown_keys
from recipe.bapo.preflight.loss import check_loss
from recipe.bapo.preflight.rules import check_rules
from recipe.bapo.preflight.settings import ACTOR, ROLLOUT
from verl.trainer.distillation import distillation_ppo_loss, is_distillation_enabled
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import import_external_libs
from verl.workers.utils.losses import ppo_loss

WRITTEN_LATE = (  # keys of folders to which the run writes only hours later; by default the others are below run_dir
    "run_dir",
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    f"{ACTOR}.policy_loss.record_dir",
    f"{ACTOR}.policy_loss.token_dir",
)


@dataclass(frozen=True)
class Result:
    """What a stage found; ``status`` is ``ok``, ``warning``, ``failed`` or ``skipped``."""

    name: str
    status: str
    detail: str


def check_verls_config(config) -> str:
    """Build verl's dataclasses, and call its validation. Returns the loss."""
    libraries = config.actor_rollout_ref.model.external_lib
    libraries = OmegaConf.to_container(libraries) if OmegaConf.is_list(libraries) else libraries
    with blame("actor_rollout_ref.model.external_lib", libraries):  # may register a loss, or an advantage estimator
        import_external_libs(libraries)
    built = {}
    for section in (ACTOR, ROLLOUT, *(["critic"] if need_critic(config) else [])):
        with blame(section):
            built[section] = omega_conf_to_dataclass(OmegaConf.select(config, section))
    with blame("the config"):
        validate_config(config, need_reference_policy(config), need_critic(config))
    estimator = config.algorithm.adv_estimator
    with blame("algorithm.adv_estimator", estimator):
        get_adv_estimator_fn(estimator)
    loss_mode = built[ACTOR].policy_loss.loss_mode
    with blame(f"{ACTOR}.policy_loss.loss_mode", loss_mode):
        get_policy_loss_fn(loss_mode)
    # verl/workers/engine_workers.py:638
    function = distillation_ppo_loss if is_distillation_enabled(config.get("distillation")) else ppo_loss
    return check_loss(built[ACTOR], config.actor_rollout_ref.model, function)


def check_folders(config) -> str:
    """Check that the run can write to the folders that it uses only later."""
    paths = {key: OmegaConf.select(config, key) for key in WRITTEN_LATE}
    if config.trainer.save_freq <= 0:
        paths.pop("trainer.default_local_dir")
    folders = {key: Path(path).absolute() for key, path in paths.items() if path}
    if not folders:
        raise CheckSkipped("the config names no folder")
    for key, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with blame("run_dir (OUTPUT_DIR)" if key == "run_dir" else key, folder, "choose another folder"):
            tempfile.TemporaryDirectory(dir=existing).cleanup()
    return ", ".join(sorted({str(folder) for folder in folders.values()}))


def check_unknown_keys(config, overrides: list[str]) -> str:
    """Warn of keys in a yaml file that nothing reads."""
    found = unknown_keys(config, overrides)
    if found:
        raise CheckWarning(
            f"neither verl nor BAPO has {', '.join(found)}. If you misspelled it, the default is in force."
        )
    return "all known"


# Name, function, and the stages without which it is not run, because it would only report their failure again.
STAGES: tuple[tuple[str, Callable, tuple[str, ...]], ...] = (
    ("keys", check_unknown_keys, ()),
    ("versions", machine.check_versions, ()),
    ("GPU memory", machine.check_gpu_memory, ()),
    ("CPUs", machine.check_cpus, ()),
    ("other runs", machine.check_other_runs, ()),
    ("verl's config", check_verls_config, ()),
    ("settings", check_rules, ("verl's config",)),
    ("folders", check_folders, ()),
    ("checkpoint", data.check_checkpoint, ()),
    ("reward", reward.check_reward, ()),
    ("model", model.check_model, ()),
    ("data", data.check_files, ("model",)),
    ("disk", machine.check_disk, ()),
)


def other_entry_point(config, config_name: str = "") -> str | None:
    """Name the entry point for which a config is, if it is neither ``verl.trainer.main_ppo`` nor our trainer.

    Args:
        config: the config.
        config_name: Hydra's ``--config-name``. The config of DAPO's recipe has no section by which to tell it.
    """
    if "async_training" in config:
        return "verl.experimental.fully_async_policy.fully_async_main"
    if "rollout" in config:
        return "verl.experimental.one_step_off_policy.main_ppo"
    of_dapo = config_name.removesuffix(".yaml") in ("dapo_trainer", "dapo_megatron_trainer")
    return "recipe.dapo.main_dapo" if of_dapo else None


def run_stages(config, overrides: list[str] | None = None, config_name: str = "") -> list[Result]:
    """Run the stages. Those that rely on a failed one are skipped.

    If a switch is a text, only that is reported.

    Args:
        config: resolved, and of our trainer also prepared.
        overrides: the ``key=value`` arguments that gave the config.
        config_name: Hydra's ``--config-name``.
    """
    other = other_entry_point(config, config_name)
    if other is not None:
        return [Result("keys", "skipped", f"nothing was checked, because this is a config of {other}")]
    misread = misread_switches(config)
    if misread:
        return [Result("keys", "failed", line) for line in misread]
    results = []
    lost: list[str] = []  # stages that failed, or rely on one that did
    for name, stage, relies_on in STAGES:
        missing = [one for one in relies_on if one in lost]
        if missing:
            result = Result(name, "skipped", f"it relies on {', '.join(missing)}")
        else:
            result = _result(name, stage, config, **({"overrides": overrides or []} if name == "keys" else {}))
        if missing or result.status == "failed":
            lost.append(name)
        results.append(result)
    return results


def _result(name, stage, config, **given):
    try:
        return Result(name, "ok", stage(config, **given))
    except CheckSkipped as reason:
        return Result(name, "skipped", str(reason))
    except CheckWarning as warning:
        return Result(name, "warning", str(warning))
    except Exception as error:  # a stage with an error of its own must not hide the others
        return Result(name, "failed", str(error) if isinstance(error, ValueError) else innermost(error))


def table(results: list[Result]) -> str:
    """Format results as a table for the terminal."""
    return "\n".join(f"{result.status:<8} {result.name:<16} {result.detail}" for result in results)


def run_preflight(overrides: list[str], **where) -> list[Result]:
    """Compose a config and run all stages. If it cannot be composed, the only result says why.

    Args:
        overrides: the ``key=value`` arguments.
        where: the other arguments of ``compose_config``.
    """
    try:
        config = compose_config(overrides, **where)
        (prepare if is_of_our_trainer(config) else OmegaConf.resolve)(config)
    except Exception as error:
        return [Result("keys", "failed", explain(error))]
    return run_stages(config, overrides, where.get("name", ""))
