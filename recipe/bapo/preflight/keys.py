# SPDX-License-Identifier: Apache-2.0
"""Find what verl would silently misread in a config.

Hydra refuses an unknown key on the command line, but takes one in a yaml file. And verl does not look at the type of a
value, so it takes the text "false" for true.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import recipe.bapo.config
import verl

OURS = Path(recipe.bapo.config.__file__).with_name("bapo_trainer.yaml")
VERLS = Path(verl.__file__).parent / "trainer" / "config"  # has the default config of each engine in one file as well
OF_GROUPS = ("model_engine", "staleness")  # keys that only a file of a config group defines
# Sections that name a dataclass by _target_, as do those below them, and of which verl makes no instance.
NEVER_BUILT = ("algorithm", "reward")
OPEN_SECTIONS = ("ray_kwargs", "transfer_queue")  # Ray and TransferQueue take keys that verl's config does not list


def misread_switches(config) -> list[str]:
    """Return a line for each text that stands where verl's config has true or false.

    Args:
        config: resolved.
    """
    values = dict(items_of(OmegaConf.to_container(config)))
    return [
        f"invalid {key}={value!r}: verl takes any text for true. Write it without quotes."
        for key, value in values.items()
        if isinstance(value, str) and isinstance(verls_defaults().get(key), bool)
    ]


def unknown_keys(config, overrides: list[str]) -> list[str]:
    """Return the keys of yaml files that nothing reads: neither verl nor BAPO has them, nor were they added with ``+``.

    A section of which verl's config lists no keys may have any. Where verl makes an instance of the class that
    ``_target_`` names, that class refuses unknown keys itself.

    Args:
        config: the config.
        overrides: the ``key=value`` arguments of the command.
    """
    values = dict(items_of(OmegaConf.to_container(config)))
    added = {override.partition("=")[0].lstrip("+") for override in overrides if override.startswith("+")}
    known = known_keys()
    sections = {key.rpartition(".")[0] for key in known if key.partition(".")[0] not in OPEN_SECTIONS}

    def is_unknown(key):
        section = key.rpartition(".")[0]
        is_built = f"{section}._target_" in values and section.partition(".")[0] not in NEVER_BUILT
        return key not in known and section in sections and not is_built

    def is_added(key):
        return any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in added)

    return [key for key in values if is_unknown(key) and not is_added(key)]


def items_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a config's dict with its value. Sections are included."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from items_of(value, f"{prefix}{name}.")


@functools.cache
def verls_defaults() -> dict[str, Any]:
    """verl's own configs of all engines in one, as it ships them, by dotted key; FSDP's value wins."""
    found: dict[str, Any] = {}
    for path in sorted(VERLS.glob("_generated_ppo_*.yaml")):  # ppo_trainer, which is FSDP's, is neither first nor last
        found |= dict(items_of(OmegaConf.to_container(OmegaConf.load(path))))
    return found | dict(items_of(OmegaConf.to_container(OmegaConf.load(VERLS / "_generated_ppo_trainer.yaml"))))


@functools.cache
def known_keys() -> frozenset[str]:
    """The dotted keys of verl's configs and of ``bapo_trainer.yaml``."""
    ours = dict(items_of(OmegaConf.to_container(OmegaConf.load(OURS))))
    return frozenset((*verls_defaults(), *ours, *OF_GROUPS))
