# SPDX-License-Identifier: Apache-2.0
"""Says before a cluster is started what would go wrong, by trying what verl itself will call.

verl's dataclasses, registries, tokenizer, data set and reward function are called as a run calls them; rules of our own
are only for what verl accepts and should not. Each message names the field, the value and the fix: a check returns what
is fine, and raises ``ValueError`` for a failure or ``CheckWarning`` for a warning. Its place is in ``preflight.py``.
"""

import tempfile
from pathlib import Path

from omegaconf import OmegaConf


class CheckWarning(Exception):
    """A warning: it will run, and may do something that was not wanted. A ``ValueError`` is a failure."""


def require(config, field: str, usable, fix: str) -> None:
    """Raise a ValueError unless ``usable(value)`` holds of the value of ``field``."""
    value = OmegaConf.select(config, field)
    if not usable(value):
        raise ValueError(f"{field}={value!r} is not usable: set it to {fix}.")


def blame_field(field: str, value, fix: str, function, *arguments):
    """Call ``function`` and return its result; an exception becomes a ValueError that names field, value and fix."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ValueError(f"{field}={value} is not usable: {innermost(error).rstrip('.')}; {fix}.") from error


def innermost(error: BaseException) -> str:
    """The text of what went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def require_writable(field: str, folder: Path) -> None:
    """Raise a ValueError unless the folder can be made and written to; nothing is left behind."""

    def write():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        tempfile.TemporaryDirectory(dir=existing).cleanup()

    blame_field(field, folder, "choose another folder", write)
