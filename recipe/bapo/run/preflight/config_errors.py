# SPDX-License-Identifier: Apache-2.0
"""Say in one line why a config cannot be composed or used: a slip in a yaml file, an unknown key, a wrong type.

Preflight and a run call ``explain`` on what Hydra, OmegaConf or yaml raise, and ``problems`` on a composed config. Keep
each message to one line that names the field, or the file, line and column.
"""

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
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
from recipe.bapo.compatibility import UNSUPPORTED_STRATEGIES
from recipe.bapo.run.preflight import blame_field

OURS = Path(recipe.bapo.config.__file__).with_name("bapo_trainer.yaml")
# verl ships its default config of each engine in one file as well.
VERLS = {
    engine: Path(verl.__file__).parent / "trainer" / "config" / f"_generated_ppo_{name}.yaml"
    for engine, name in {"dp": "trainer", "megatron": "megatron_trainer"}.items()
}
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what composing a config may raise
OF_GROUPS = ("model_engine", "staleness")  # keys that only a file of a config group defines
OF_RAY = ("ray_kwargs", "transfer_queue")  # sections that go to other libraries as they are
# How to say what a value of a declared type may be.
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "null"}
COPY = re.compile(r"\$\{[\w.]+\}")  # a value that is copied from another key; an error is reported at that key


def explain(error: Exception) -> str:
    """Say in one line why a config could not be composed; ``error`` is one of ``ERRORS`` or from a resolver of ours."""
    cause = (error.__cause__ if isinstance(error, HydraException) else None) or error
    if isinstance(error, yaml.MarkedYAMLError):
        missing_colon = error.context == "while scanning a simple key"
        mark = error.context_mark if missing_colon else error.problem_mark
        what = "a key needs a colon and a space before its value" if missing_colon else error.problem
        return f"{_position(mark.name, mark)}: {what}."
    key = getattr(cause, "full_key", None) or ""
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "not in struct" in str(cause):
        given = re.search(r"\+(\S+=.*)", str(error))
        return _unknown_key(key, given[1] if given else key)
    said = str(error).partition("Config search path:")[0] if isinstance(error, MissingConfigException) else str(error)
    text = " ".join(f"{said} {cause if cause is not error else ''}".split())
    return re.sub(r" ?(object_type=\w+|reference_type=\S+|See https://\S+ for details)", "", text)


def _unknown_key(key, given, where="", engine="dp"):
    if key not in known_keys(engine) and key in known_keys():  # verl's other engines lack keys that FSDP has
        fix = f"remove it with ~{key} on the command line"
        return f"{given} is not usable: verl has no key {key} with model_engine={engine}: {fix}{where}."
    name = given.partition("=")[0]  # as given; if its first section is wrong, Hydra names only that
    whole = [other for other in known_keys() if "." in name and other.endswith(f".{name}")]
    meant = min(whole, key=lambda other: other.count(".")) if whole else nearest_key(key)
    return f"{given} is not usable: the config has no key {key}: {f'use {meant}' if meant else 'remove it'}{where}."


def nearest_key(key: str) -> str | None:
    """The known key that was most likely meant: a similar name in the same section, or the same name in another."""
    section, _, name = key.rpartition(".")
    known = {other: other.rpartition(".") for other in known_keys() if other != key}
    siblings = {part[2]: other for other, part in known.items() if part[0] == section}
    close = difflib.get_close_matches(name, siblings, 1, cutoff=0.7)
    if close:
        return siblings[close[0]]
    top = key.partition(".")[0]
    return next((other for other, part in known.items() if part[2] == name and other.startswith(f"{top}.")), None)


def _location(key, value):
    """`` (FILE, line N, column N)`` if the key has this value in ``bapo_trainer.yaml``, else nothing."""
    name, node = None, yaml.compose(OURS.read_text(), yaml.SafeLoader)
    for part in key.split("."):
        children = node.value if isinstance(node, yaml.MappingNode) else []
        name, node = next((child for child in children if child[0].value == part), (None, None))
    written = name is not None and repr(yaml.safe_load(yaml.serialize(node))) == repr(value)
    return f" ({_position(OURS, name.start_mark)})" if written else ""


def _position(file, mark):
    path = Path(file)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}"


def items_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a config's dict with its value. Sections are included."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from items_of(value, f"{prefix}{name}.")


@functools.cache
def verls_defaults(engine: str = "dp") -> dict[str, Any]:
    """verl's own config, as it ships it, by dotted key; interpolations are as they are written.

    Args:
        engine: the config's ``model_engine``, ``dp`` (FSDP) or ``megatron``.
    """
    return dict(items_of(OmegaConf.to_container(OmegaConf.load(VERLS[engine]))))


@functools.cache
def known_keys(engine: str = "dp") -> tuple[str, ...]:
    """The dotted keys of verl's config for an engine, and of ``bapo_trainer.yaml``."""
    ours = dict(items_of(OmegaConf.to_container(OmegaConf.load(OURS))))
    kept = [key for key in ours if key.partition(".")[0] not in ("hydra", "defaults")]
    return tuple(dict.fromkeys((*verls_defaults(engine), *kept, *OF_GROUPS)))


def problems(config) -> list[str]:
    """Return a line for each wrong type and unknown key, or only one for the first value that cannot be resolved.

    A value that still contains ``${`` after it was resolved counts as one that cannot be resolved.

    verl builds its dataclasses with Hydra's ``instantiate``, which checks no types: a wrong type fails minutes later.
    Each value has to be of the type that verl's dataclass declares or, where there is none, that verl's default has. A
    key that verl does not list passes if something may still read it: below ``OF_RAY``, and in a section without a
    dataclass if no known key is similar or verl's section is empty. At the top level and in ``watchdog`` none passes.

    Args:
        config: not resolved, so that a wrong value that other keys copy is reported once.

    Raises:
        ValueError: ``model_engine`` is neither ``dp`` nor ``megatron``, or a ``_target_`` cannot be imported.
    """
    if config.model_engine not in VERLS:
        reason = UNSUPPORTED_STRATEGIES.get(config.model_engine, "It was not tried.")
        raise ValueError(
            f"model_engine={config.model_engine!r} is not usable: set it to dp, which is FSDP, or megatron. {reason}"
        )
    whole, defaults = OmegaConf.to_container(config), verls_defaults(config.model_engine)
    values, known = {"": whole, **dict(items_of(whole))}, set(known_keys(config.model_engine))
    found, free, resolved = [], set(OF_RAY), {}
    # The least nested value that cannot be resolved is most likely the one that the others refer to.
    for key in sorted(values.keys() - {""}, key=lambda key: key.count(".")):
        try:
            resolved[key] = OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            first = " ".join(str(error).partition("full_key")[0].split())
            return [f"{key}={values[key]} cannot be resolved: {first}{_location(key, values[key])}."]
        if isinstance(resolved[key], str) and "${" in resolved[key]:  # the text came from an environment variable
            return [f"{key}={resolved[key]} is not usable: set it to a value without '${{'."]
    for key, value in items_of(whole):
        parent, _, name = key.rpartition(".")
        hints = _hints_of(parent, values)
        if {key, parent} & free or value == "???":
            free.add(key)
        elif key not in known and name not in hints:
            # verl builds no dataclass for the section ``reward``, although it has a ``_target_``.
            built = hints and not key.startswith("reward.")
            if built or parent in ("", "watchdog") or (defaults.get(parent) and nearest_key(key)):
                found.append(_unknown_key(key, f"{key}={value}", _location(key, value), config.model_engine))
            free.add(key)  # and everything below it, because verl passes such sections on unread
        elif value != defaults.get(key) and not COPY.fullmatch(str(value)):
            used = resolved[key] if isinstance(value, str) and "${" in value else value
            fix = _type_wanted(used, hints.get(name), defaults.get(key))
            if fix:
                found.append(f"{key}={used!r} is not usable: set it to {fix}{_location(key, value)}.")
    return found


def _hints_of(section, values):
    """Return the field types of a section's dataclass, which its ``_target_`` or the field of its parent names."""
    target = values[section].get("_target_")
    if target:
        return _hints(blame_field(f"{section}._target_", target, "name a class of verl or ours", get_class, target))
    parent, _, name = section.rpartition(".")
    classes = _kinds(_hints_of(parent, values).get(name)) if section else ()
    return next((_hints(kind) for kind in classes if is_dataclass(kind)), {})


@functools.cache
def _hints(dataclass):
    return get_type_hints(dataclass)


def _kinds(hint):
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _type_wanted(value, hint, default):
    """Say in words which type the value should have. None if it is usable or verl declares no type."""
    if isinstance(value, dict) or repr(value) == repr(default):
        return None
    if isinstance(default, dict):
        return None if value is None and NoneType in _kinds(hint) else "a section with keys of its own"
    # Without a dataclass, a default that is a whole number does not mean int: accept a float there.
    kinds = _kinds(hint or {int: float, float: float, bool: bool}.get(type(default)))
    usable = type(value) in kinds or (type(value) is int and float in kinds)
    return None if usable or not set(kinds) <= WORDS.keys() else " or ".join(WORDS[kind] for kind in kinds)
