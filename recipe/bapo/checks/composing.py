# SPDX-License-Identifier: Apache-2.0
"""Says in one line why a config does not come together: a slip in a yaml file, an unknown key, a value of a wrong type.

Preflight and a run call ``explain`` on whatever Hydra, OmegaConf or yaml raise, and ``problems`` on a config that came
together. Whoever changes it has to keep that each message is one line with the field or the file, line and column.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import recipe.bapo.config
import verl
from recipe.bapo.checks import call

OURS = Path(recipe.bapo.config.__file__).parent
# verl ships its default config in one file as well.
VERLS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what composing a config may raise
OF_GROUPS = ("model_engine", "staleness")  # keys that come with a file of a group
OF_RAY = ("ray_kwargs", "transfer_queue")  # sections that go to other libraries as they are
# What a value of a declared type may be, and how to say so.
TYPES = {int: (int,), float: (float, int), bool: (bool,), str: (str,), NoneType: (NoneType,)}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "null"}


def explain(error: Exception, groups: str | Path | None = None) -> str:
    """Why a config could not be composed or resolved, in one line.

    Args:
        error: one of ``ERRORS``, or what one of our resolvers raised.
        groups: the folder of the groups ``size``, ``experiment`` and ``method``.
    """
    cause = (error.__cause__ if isinstance(error, HydraException) else None) or error
    if isinstance(error, yaml.MarkedYAMLError):
        missing_colon = error.context == "while scanning a simple key"
        mark = error.context_mark if missing_colon else error.problem_mark
        what = "a key needs a colon and a space before its value" if missing_colon else error.problem
        return f"{_position(mark.name, mark)}: {what}."
    key = getattr(cause, "full_key", None) or ""
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "not in struct" in str(cause):
        given = re.search(r"\+(\S+=.*)", str(error))
        return unknown_key(key, given[1] if given else key, groups)
    said = str(error).partition("Config search path:")[0] if isinstance(error, MissingConfigException) else str(error)
    text = " ".join(f"{said} {cause if cause is not error else ''}".split())
    text = re.sub(r" ?(object_type=\w+|reference_type=\S+|See https://\S+ for details)", "", text)
    return text + location(key, groups)


def unknown_key(key: str, given: str, groups: str | Path | None = None) -> str:
    """The line for a key that neither verl's config nor ours has, with the nearest one that is there."""
    close = difflib.get_close_matches(key, [known for known in known_keys() if known != key], 1)
    fix = f"use {close[0]}" if close else "remove it"
    return f"{given} is not usable: the config has no key {key}: {fix}{location(key, groups)}."


def location(key: str, groups: str | Path | None = None, value: object = ...) -> str:
    """``(FILE, line N, column N)`` of a key in our yaml files, with this value if one is given; or nothing."""
    *path, name = key.split(".")
    for folder in (OURS, *([Path(groups)] if groups else [])):
        for file in sorted(folder.rglob("*.yaml")):
            node = yaml.compose(file.read_text(), yaml.SafeLoader)
            for part in path:
                node = next((child for at, child in _children(node) if at.value == part), None)
            for at, child in _children(node):
                if at.value == name and (value is ... or repr(yaml.safe_load(yaml.serialize(child))) == repr(value)):
                    return f" ({_position(str(file), at.start_mark)})"
    return ""


def _children(node):
    return node.value if isinstance(node, yaml.MappingNode) else []


def _position(file, mark):
    path = Path(file)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}"


def items_of(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a config, sections among them, with its value."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from items_of(value, f"{prefix}{name}.")


@functools.cache
def verls_defaults() -> dict[str, Any]:
    """verl's own config, as it ships it, by dotted key; interpolations are as they are written."""
    return dict(items_of(OmegaConf.to_container(OmegaConf.load(VERLS))))


@functools.cache
def known_keys() -> tuple[str, ...]:
    """The dotted keys of verl's config and of ``bapo_trainer.yaml``."""
    ours = dict(items_of(OmegaConf.to_container(OmegaConf.load(OURS / "bapo_trainer.yaml"))))
    kept = [key for key in ours if key.partition(".")[0] not in ("hydra", "defaults")]
    return tuple(dict.fromkeys((*verls_defaults(), *kept, *OF_GROUPS)))


def resolve(config, groups: str | Path | None = None) -> None:
    """Resolve the config in place.

    Raises:
        ValueError: an interpolation cannot be resolved; the message names its key.
    """
    # The least nested key that fails is most likely the one that the others refer to.
    for key, value in sorted(items_of(OmegaConf.to_container(config)), key=lambda item: item[0].count(".")):
        try:
            found = OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            first = " ".join(str(error).partition("full_key")[0].split())
            raise ValueError(f"{key}={value} cannot be resolved: {first}{location(key, groups)}.") from None
        if isinstance(found, str) and "${" in found:  # of the environment
            raise ValueError(f"{key}={found} is not usable: set it to a value without ${{.")
    OmegaConf.resolve(config)


def problems(config, groups: str | Path | None = None) -> list[str]:
    """A line for each key that is not known and each value of a wrong type.

    verl builds its dataclasses by Hydra's ``instantiate``, which checks no type: a wrong one fails minutes later.
    Each value has to be of the type that verl's dataclass declares or, where there is none, that verl's default has.

    Args:
        config: one that can be resolved.
        groups: the folder of the groups, to name the file in which a key stands.
    """
    whole = OmegaConf.to_container(config, resolve=True)
    values, defaults, known = {"": whole, **dict(items_of(whole))}, verls_defaults(), set(known_keys())
    copies = {key for key, value in defaults.items() if str(value).startswith("${")}  # of keys in other sections
    unknown, wrong, free = {}, {}, set(OF_RAY)
    for key, value in items_of(whole):
        parent, _, name = key.rpartition(".")
        hints = _hints(parent, values[parent].get("_target_"))
        default = None if key in copies else defaults.get(key)
        if {key, parent} & free or value == "???":
            free.add(key)
        elif key not in known and name not in hints:
            if hints or parent in ("", "watchdog") or defaults.get(parent):
                unknown[key] = unknown_key(key, f"{key}={value}", groups)
            free.add(key)  # with what is below it: verl hands such sections on
        elif isinstance(default, dict) and not isinstance(value, dict):
            wrong[key] = "a section with keys of its own"
        elif not isinstance(value, dict):
            kinds = _kinds(hints.get(name), default)
            if kinds and repr(value) != repr(default) and not any(type(value) in TYPES[kind] for kind in kinds):
                wrong[key] = " or ".join(WORDS[kind] for kind in kinds)
    originals = {repr(values[key]) for key in wrong if key not in copies}
    return [*unknown.values()] + [
        f"{key}={values[key]!r} is not usable: set it to {fix}{location(key, groups, values[key])}."
        for key, fix in wrong.items()
        if key not in copies or repr(values[key]) not in originals
    ]


@functools.cache
def _hints(section, target):
    if not target:
        return {}
    return get_type_hints(call(f"{section}._target_", target, "name a class of verl or ours", get_class, target))


def _kinds(hint, default):
    """The types that a value may have; none where verl does not say, or says more than ``TYPES``."""
    if hint is None:
        return (type(default),) if type(default) in (int, float, bool) else ()
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return kinds if set(kinds) <= TYPES.keys() else ()
