# SPDX-License-Identifier: Apache-2.0
"""Compose a run's config from verl's config, ours, and the groups platform, size, experiment and method."""

import os
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipe.bapo.config.memory import choose_share

OURS = "bapo_trainer"
EXAMPLE = Path(__file__).parents[1] / "example" / "files"


def compose_config(
    overrides: list[str], groups: str | Path | None = None, name: str = OURS, folder: str | Path | None = None
) -> DictConfig:
    """Compose the config that a run gets from the same command line.

    Args:
        overrides: the ``key=value`` arguments of the command line.
        groups: Hydra's ``--config-dir``, a folder of further groups; with ``configs`` these are ``size``,
            ``experiment`` and ``method``.
        name: Hydra's ``--config-name``: ``bapo_trainer`` for our trainer, ``ppo_trainer`` for verl's.
        folder: Hydra's ``--config-path``. None: ours or verl's. A relative one is relative to the folder of verl's
            entry point that has a config of this name: ``trainer``, or one below ``experimental``.

    Raises:
        hydra.errors.HydraException: an override is invalid.
        ValueError: a folder is not there.
    """
    if groups is not None:  # quoted, because a folder's name may hold parentheses
        if not Path(groups).is_dir():
            raise ValueError(f"invalid --config-dir={groups}: there is no such folder.")
        path = f"[pkg://verl.trainer.config,'file://{Path(groups).absolute()}']"
        overrides = [f"hydra.searchpath={path}", *overrides]
    import verl  # imported here, because verl's plugins import this module

    name = name.removesuffix(".yaml")
    if folder is None and name == OURS:
        found = Path(__file__).parent
    else:
        of_verl = Path(verl.__file__).parent
        folders = [entry / (folder or "config") for entry in (of_verl / "trainer", *of_verl.glob("experimental/*"))]
        found = next((path for path in folders if (path / f"{name}.yaml").is_file()), folders[0])
        primary = found / f"{name}.yaml"
        if groups is None and primary.is_file():
            # It may build on verl's config, and look for that below the folder of a clone of verl.
            own = OmegaConf.select(OmegaConf.load(primary), "hydra.searchpath") or []
            path = ",".join(f"'{one}'" for one in (*own, "pkg://verl.trainer.config"))
            overrides = [f"hydra.searchpath=[{path}]", *overrides]
    with initialize_config_dir(str(found), version_base=None):
        return compose(name, overrides)


def prepare(config: DictConfig) -> None:
    """Do in place what our trainer does to a config before anything reads it, and verl's own entry point does not.

    Keys of verl's older reward config are moved to those that its V1 trainer reads. The file logger is added, because
    console, watchdog and pictures read what it writes.
    """
    from verl.experimental.reward_loop import migrate_legacy_reward_impl  # verl's plugins import this module

    OmegaConf.resolve(config)
    migrate_legacy_reward_impl(config)
    loggers = config.trainer.logger or []
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)  # verl takes a single name, too
    config.trainer.logger = [*loggers, *(["file"] if "file" not in loggers else [])]


def is_of_our_trainer(config: DictConfig) -> bool:
    """Whether a config is for our trainer (``bapo_trainer.yaml``), and not for verl's own entry point."""
    return "watchdog" in config


def cpu_environment() -> dict[str, str]:
    """Return the environment variables that every process of a CPU run needs, preferably before it imports torch."""
    settings = OmegaConf.load(Path(__file__).parent / "platform" / "cpu.yaml")
    return {str(name): str(value) for name, value in settings.ray_kwargs.ray_init.runtime_env.env_vars.items()}


def joins_a_cluster(config: DictConfig) -> bool:
    """Whether the run uses a Ray that is already running; otherwise it starts its own."""
    addresses = os.environ.get("RAY_ADDRESS"), OmegaConf.select(config, "ray_kwargs.ray_init.address")
    return any(address not in (None, "", "local") for address in addresses) or config.trainer.nnodes > 1


def mini_batch_size(train_batch_size: int, ppo_epochs: int, staleness: int) -> int:
    """Return the number of prompts per update with which a rollout batch gives ``staleness`` updates.

    Raises:
        ValueError: an argument is not a whole number of 1 or more, or ``staleness`` does not divide
            ``train_batch_size * ppo_epochs``.
    """
    numbers = {"data.train_batch_size": train_batch_size, "ppo_epochs": ppo_epochs, "staleness": staleness}
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"invalid {name}={value!r}: give a whole number of 1 or more.")
    size, rest = divmod(train_batch_size * ppo_epochs, staleness)
    if rest:
        raise ValueError(
            f"The updates per rollout batch (staleness, or parameter_sync_step), {staleness}, do not divide "
            f"data.train_batch_size * ppo_epochs = {train_batch_size * ppo_epochs}: choose a divisor."
        )
    return size


def threads_of_a_rank(ranks: int) -> str:
    """Return the number of OpenMP threads with which ``ranks`` processes use all cores of this machine."""
    return str(min(16, max(1, len(os.sched_getaffinity(0)) // ranks)))


# OmegaConf has no arithmetic, so the yaml files call these.
OmegaConf.register_new_resolver("bapo.mini_batch_size", mini_batch_size, replace=True)
OmegaConf.register_new_resolver("bapo.absolute", lambda path: path and os.path.abspath(str(path)), replace=True)
OmegaConf.register_new_resolver("bapo.example", lambda name: str(EXAMPLE / name), replace=True)
OmegaConf.register_new_resolver("bapo.half", lambda number: -(-int(number) // 2), replace=True)
OmegaConf.register_new_resolver("bapo.minus", lambda all_of_them, some: int(all_of_them) - some, replace=True)
OmegaConf.register_new_resolver("bapo.threads", threads_of_a_rank, replace=True)
OmegaConf.register_new_resolver("bapo.sum", lambda *numbers: sum(numbers), replace=True)
OmegaConf.register_new_resolver("bapo.vllm_share", choose_share, replace=True)
