# SPDX-License-Identifier: Apache-2.0
"""Every key and every type of a config, against verl's own dataclasses and defaults.

verl builds its dataclasses by Hydra's ``instantiate``, which checks no type: ``ppo_epochs: abc`` fails minutes later.
Here each value has to be of the type that verl's dataclass declares or, where there is none, that verl's default has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from recipe.bapo.checks.composing import known_keys, location, unknown_key, verls_defaults

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "null"}
# Sections that go to other libraries as they are.
FREE = ("ray_kwargs", "transfer_queue")


def problems(config: DictConfig, groups: str | Path | None = None) -> list[str]:
    """A line for each key that is not known and each value of a wrong type.

    Args:
        config: resolved.
        groups: the folder of the groups, to name the file in which a key stands.
    """
    found = {}
    for key, value, line in _of_section(config, verls_defaults(), "", groups):
        found.setdefault((key.rpartition(".")[2], str(value)), line)  # verl copies some keys into other sections
    return list(found.values())


def _of_section(section: DictConfig, defaults: Any, path: str, groups) -> Iterator[tuple[str, Any, str]]:
    hints = get_type_hints(get_class(section._target_)) if section.get("_target_") else {}
    for name in section:
        if OmegaConf.is_missing(section, name):
            continue
        key, value = f"{path}{name}", section[name]
        default = defaults._get_node(name) if isinstance(defaults, DictConfig) and name in defaults else None
        if default is None and name not in hints and not _may_be_there(key, bool(hints)):
            yield key, value, unknown_key(key, f"{key}={value}", groups)
        elif isinstance(value, DictConfig):
            yield from _of_section(value, default, f"{key}.", groups)
        elif isinstance(default, DictConfig) and not default._is_none() and value is not None:
            where = location(key, groups, value)
            yield key, value, f"{key}={value} is not usable: it is a section with keys of its own{where}."
        else:
            given = None if default is None or default._is_interpolation() else default._value()
            hint = hints.get(name) or (type(given) if type(given) in (int, float, bool) else Any)
            if _is_wrong(value, hint) and (type(value), value) != (type(given), given):
                kinds = " or ".join(WORDS[kind] for kind in _kinds(hint))
                where = location(key, groups, value)
                yield key, value, f"{key}={value!r} is not usable: set it to {kinds}{where}."


def _may_be_there(key: str, has_dataclass: bool) -> bool:
    """Sections without a dataclass may have keys that verl's defaults do not list, but none that is a slip of one."""
    parent, _, name = key.rpartition(".")
    if key in known_keys() or parent.startswith(FREE):
        return True
    if has_dataclass or parent in ("", "watchdog"):
        return False
    misplaced = parent in known_keys() and sum(known.endswith(f".{name}") for known in known_keys()) == 1
    siblings = [known for known in known_keys() if known.rpartition(".")[0] == parent]
    return not misplaced and not difflib.get_close_matches(key, siblings, 1, 0.95)


def _kinds(hint) -> tuple:
    return get_args(hint) or (hint,)


def _is_wrong(value, hint) -> bool:
    if get_origin(hint) not in (None, Union, UnionType) or not set(_kinds(hint)) <= WORDS.keys():
        return False
    try:
        TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return True
    return False
