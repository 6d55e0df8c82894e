# SPDX-License-Identifier: Apache-2.0
"""Say in one line why a config cannot be composed, and find its unknown keys and wrong types.

Hydra refuses an unknown key on the command line, but takes one in a yaml file; and verl builds its dataclasses with
Hydra's ``instantiate``, which checks no types. So a misspelled key would leave verl's default in force without a word.
"""

import difflib
import functools
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.errors import HydraException, OverrideParseException
from hydra.utils import get_class
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

import recipe.bapo.config
import verl
from recipe.bapo.compatibility import UNSUPPORTED_STRATEGIES
from recipe.bapo.run.preflight import blame

OURS = Path(recipe.bapo.config.__file__).with_name("bapo_trainer.yaml")
# verl ships its default config of each engine in one file as well.
VERLS = {
    engine: Path(verl.__file__).parent / "trainer" / "config" / f"_generated_ppo_{name}.yaml"
    for engine, name in {"dp": "trainer", "megatron": "megatron_trainer"}.items()
}
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what composing a config may raise
OF_GROUPS = ("model_engine", "staleness")  # keys that only a file of a config group defines


def explain(error: Exception) -> str:
    """Say in one line why a config could not be composed; ``error`` is one of ``ERRORS`` or from a resolver of ours.

    For an unknown key in a section whose keys are all known, this is the nearest of them. Otherwise it is what Hydra,
    OmegaConf or yaml say; in a section that takes further keys, Hydra's answer is ``+key=value``.
    """
    cause = (error.__cause__ if isinstance(error, HydraException) else None) or error
    key = getattr(cause, "full_key", None) or ""
    if "not in struct" in str(cause) and not takes_any_key(key.rpartition(".")[0], "dp"):
        return _unknown_key(key, "dp")
    lines = f"{error} {cause if cause is not error else ''}".partition("Config search path:")[0].splitlines()
    kept = [line for line in lines if not line.strip().startswith(("full_key", "object_type", "reference_type"))]
    text = " ".join(" ".join(kept).split())
    if isinstance(cause, OverrideParseException):
        return f"{cause.override}: {text}: put quotes around a value with ( ) [ ] {{ }} , = or ~: 'key=\"value\"'"
    return f"{key}: {text}" if key and key not in text else text


def unusable_keys(config) -> list[str]:
    """Return a line for each unknown key and each wrong type, or one for the first value that cannot be resolved.

    A wrong value that other keys copy is reported once.

    Args:
        config: not resolved.

    Raises:
        ValueError: ``model_engine`` is neither ``dp`` nor ``megatron``, or a ``_target_`` cannot be imported.
    """
    engine = config.model_engine
    if engine not in VERLS:
        reason = UNSUPPORTED_STRATEGIES.get(engine, "It was not tried.")
        raise ValueError(f"model_engine={engine!r} is not usable: set it to dp, which is FSDP, or megatron. {reason}")
    given = dict(items_of(OmegaConf.to_container(config)))  # as they are written: with interpolations
    unresolvable = _unresolvable(config, given)
    if unresolvable:
        return [unresolvable]
    values = dict(items_of(OmegaConf.to_container(config, resolve=True)))
    found = []
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        types = _types(values.get(section) or {}, section)
        if key not in known_keys(engine) and name not in types:
            if not takes_any_key(section, engine) and (types or section in ("", "watchdog") or nearest_key(key)):
                found.append(_unknown_key(f"{key}={value}", engine))
        elif value != verls_defaults(engine).get(key) and not str(value).startswith("${"):
            wanted = _wanted(values[key], types.get(name) or _type_of_default(key, engine), key, engine)
            found += [f"{key}={values[key]!r} is not usable: {wanted}."] if wanted else []
    return found


def _unresolvable(config, given):
    """Say which value cannot be resolved; the least nested is most likely the one that the others refer to."""
    for key in sorted(given, key=lambda key: key.count(".")):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            return f"{key} cannot be resolved: {' '.join(str(error).partition('full_key')[0].split())}."
    return None


def takes_any_key(section: str, engine: str) -> bool:
    """Whether keys that verl's config does not list may be meant: for another library, or below an unknown key."""
    return section != "" and section not in _sections(engine)


@functools.cache
def _sections(engine):
    """The sections that have keys in verl's config or ours, except for those that Ray reads."""
    parents = {key.rpartition(".")[0] for key in known_keys(engine)}
    return frozenset(key for key in parents if key.partition(".")[0] not in ("ray_kwargs", "transfer_queue"))


def _unknown_key(given, engine):
    key = given.partition("=")[0]
    if key not in known_keys(engine) and key in known_keys("dp"):  # verl's other engines lack keys that FSDP has
        return f"{given} is not usable: verl has no key {key} with model_engine={engine}: remove it with ~{key}."
    meant = nearest_key(key)
    return f"{given} is not usable: the config has no key {key}: {f'use {meant}' if meant else 'remove it'}."


def nearest_key(key: str) -> str | None:
    """The known key that was most likely meant: a similar name in the same section, or the same name in another."""
    section, _, name = key.rpartition(".")
    known = {other: other.rpartition(".") for other in known_keys("dp") if other != key}
    siblings = {part[2]: other for other, part in known.items() if part[0] == section}
    close = difflib.get_close_matches(name, siblings, 1, cutoff=0.7)
    if close:
        return siblings[close[0]]
    top = key.partition(".")[0]
    return next((other for other, part in known.items() if part[2] == name and other.startswith(f"{top}.")), None)


def items_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a config's dict with its value. Sections are included."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from items_of(value, f"{prefix}{name}.")


@functools.cache
def verls_defaults(engine: str) -> dict[str, Any]:
    """verl's own config, as it ships it, by dotted key; interpolations are as they are written.

    Args:
        engine: the config's ``model_engine``, ``dp`` (FSDP) or ``megatron``.
    """
    return dict(items_of(OmegaConf.to_container(OmegaConf.load(VERLS[engine]))))


@functools.cache
def known_keys(engine: str) -> tuple[str, ...]:
    """The dotted keys of verl's config for an engine, and of ``bapo_trainer.yaml``."""
    ours = dict(items_of(OmegaConf.to_container(OmegaConf.load(OURS))))
    kept = [key for key in ours if key.partition(".")[0] not in ("hydra", "defaults")]
    return tuple(dict.fromkeys((*verls_defaults(engine), *kept, *OF_GROUPS)))


def _types(section, key):
    """Return the types that the dataclass of a section's ``_target_`` declares, by field."""
    target = section.get("_target_")
    if target is None or key == "reward":  # verl does not build the dataclass that this section names
        return {}
    with blame(f"{key}._target_", target, "name a class of verl or ours"):
        return _hints(get_class(target))


@functools.cache
def _hints(dataclass):
    return get_type_hints(dataclass)


def _type_of_default(key, engine):
    """Return the type that verl's default shows where verl has no dataclass; a whole number may mean any number."""
    default = verls_defaults(engine).get(key)
    if isinstance(default, bool):
        return bool
    return float if isinstance(default, int | float) and key.startswith(("data.", "trainer.")) else None


def _wanted(value, hint, key, engine):
    """Say what pydantic wants in place of a value. None if it is usable, or if its type is not known."""
    default = verls_defaults(engine).get(key)
    if hint is None or isinstance(value, dict) or is_dataclass(hint):
        return "it has to be a section" if isinstance(default, dict) and not isinstance(value, dict | None) else None
    try:
        TypeAdapter(hint).validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return " or ".join(dict.fromkeys(one["msg"][0].lower() + one["msg"][1:] for one in error.errors()))
    except PydanticUserError:  # pydantic does not know the declared type
        pass
    return None
