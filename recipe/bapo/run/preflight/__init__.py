# SPDX-License-Identifier: Apache-2.0
"""Preflight: call verl's own loaders and validators, so that errors surface before Ray starts.

verl's dataclasses, registries, tokenizer, data set and reward function are called as a run calls them. We add rules
only for inputs that verl accepts but a run cannot use. A check returns a text that describes what it found. It raises
``ValueError`` for a failure and ``CheckWarning`` for a warning; the message names the field, the value and the fix.
``preflight.py`` lists the checks.
"""

import tempfile
from pathlib import Path

from omegaconf import OmegaConf


class CheckWarning(Exception):
    """A warning: the run will start, but may not do what the user wants. A ``ValueError`` is a failure."""


def require(config, field: str, usable, fix: str) -> None:
    """Raise a ValueError unless ``usable(value)`` is true for the value of ``field``."""
    value = OmegaConf.select(config, field)
    if not usable(value):
        raise ValueError(f"{field}={value!r} is not usable: set it to {fix}.")


def blame_field(field: str, value, fix: str, function, *arguments):
    """Call ``function`` and return its result. Turn an exception into a ValueError that names field, value and fix."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ValueError(f"{field}={value} is not usable: {innermost(error).rstrip('.')}; {fix}.") from error


def innermost(error: BaseException) -> str:
    """Return the message of the first exception in the chain of causes, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def require_writable(field: str, folder: Path) -> None:
    """Raise a ValueError unless the folder can be created and written to. Nothing is left behind."""

    def write():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        tempfile.TemporaryDirectory(dir=existing).cleanup()

    blame_field(field, folder, "choose another folder", write)
