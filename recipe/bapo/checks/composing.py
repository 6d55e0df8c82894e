# SPDX-License-Identifier: Apache-2.0
"""Says in one line why a config does not come together: a slip in a yaml file, a misspelt key, a broken override.

Preflight and a run call it on whatever Hydra, OmegaConf or yaml raise. Whoever changes it has to keep that each
message is one line with the field or the file, line and column.
"""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import recipe.bapo.config
import verl

OURS = Path(recipe.bapo.config.__file__).parent
# verl ships its default config in one file as well.
VERLS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what composing a config may raise


def explain(error: Exception, groups: str | Path | None = None) -> str:
    """Why a config could not be composed or resolved, in one line.

    Args:
        error: one of ``ERRORS``, or what one of our resolvers raised.
        groups: the folder of the groups ``size``, ``experiment`` and ``method``.
    """
    cause = error.__cause__ or error
    if isinstance(error, yaml.MarkedYAMLError):
        return _slip(error)
    key = getattr(cause, "full_key", None) or ""
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "not in struct" in str(cause):
        given = re.search(r"\+(\S+=.*)", str(error))
        return unknown_key(key, given[1] if given else key, groups)
    said = str(error).partition("Config search path:")[0] if isinstance(error, MissingConfigException) else str(error)
    text = " ".join(f"{said} {cause if cause is not error else ''}".split())
    text = re.sub(r" ?(object_type=\w+|reference_type=\S+|See https://\S+ for details)", "", text)
    return text + location(key, groups)


def _slip(error: yaml.MarkedYAMLError) -> str:
    missing_colon = error.context == "while scanning a simple key"
    mark = error.context_mark if missing_colon else error.problem_mark
    what = "a key needs a colon and a space before its value" if missing_colon else error.problem
    return f"{_short(mark.name)}, line {mark.line + 1}, column {mark.column + 1}: {what}."


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def unknown_key(key: str, given: str, groups: str | Path | None = None) -> str:
    """The line for a key that neither verl's config nor ours has, with the nearest one that is there."""
    parent, _, name = key.rpartition(".")
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == name]
    siblings = [known for known in known_keys() if known.rpartition(".")[0] == parent]
    close = (
        difflib.get_close_matches(key, elsewhere, 1, 0)
        or difflib.get_close_matches(key, siblings, 1, 0.6)
        or difflib.get_close_matches(key, known_keys(), 1, 0.6)
    )
    fix = f"use {close[0]}" if close else "remove it"
    return f"{given} is not usable: the config has no key {key}: {fix}{location(key, groups)}."


@functools.cache
def verls_defaults() -> DictConfig:
    """verl's own config, as it ships it."""
    return OmegaConf.load(VERLS)


@functools.cache
def known_keys() -> tuple[str, ...]:
    """The dotted keys of verl's config and of ``bapo_trainer.yaml``."""
    of_groups = OmegaConf.create({"staleness": None, "model_engine": None})
    merged = OmegaConf.merge(verls_defaults(), OmegaConf.load(OURS / "bapo_trainer.yaml"), of_groups)

    def keys(node, prefix):
        for key in node:
            yield f"{prefix}{key}"
            if OmegaConf.is_dict(node._get_node(key)) and not OmegaConf.is_missing(node, key):
                yield from keys(node._get_node(key), f"{prefix}{key}.")

    return tuple(key for key in keys(merged, "") if key.partition(".")[0] not in ("hydra", "defaults"))


def location(key: str, groups: str | Path | None = None, value: object = ...) -> str:
    """``(FILE, line N, column N)`` of a key in our yaml files, with this value if one is given; or nothing."""
    parent, _, name = key.rpartition(".")
    folders = [OURS, *([Path(groups)] if groups else [])]
    for file in (file for folder in folders for file in sorted(folder.rglob("*.yaml"))):
        for found, node in _children(parent.split(".") if parent else [], file):
            if found.value == name and (value is ... or _is_value(node, value)):
                mark = found.start_mark
                return f" ({_short(str(file))}, line {mark.line + 1}, column {mark.column + 1})"
    return ""


def _is_value(node, value) -> bool:
    stated = yaml.safe_load(yaml.serialize(node))
    return type(stated) is type(value) and stated == value


def _children(path, file):
    node = yaml.compose(file.read_text(), yaml.SafeLoader)
    for part in path:
        node = next((value for key, value in getattr(node, "value", []) if key.value == part), None)
        if not isinstance(node, yaml.MappingNode):
            return []
    return node.value


def resolve(config, groups: str | Path | None = None) -> None:
    """Resolve the config in place.

    Raises:
        ValueError: an interpolation cannot be resolved; the message names its key.
    """
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        # The least nested key that fails is most likely the one that the others refer to.
        for key, value in sorted(_leaves(OmegaConf.to_container(config), ""), key=lambda leaf: leaf[0].count(".")):
            try:
                OmegaConf.select(config, key)
            except OmegaConfBaseException as of_key:
                first = " ".join(str(of_key).partition("full_key")[0].split())
                raise ValueError(f"{key}={value} cannot be resolved: {first}{location(key, groups)}.") from None
        raise error


def _leaves(node, prefix):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
