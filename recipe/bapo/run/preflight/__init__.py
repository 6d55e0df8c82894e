# SPDX-License-Identifier: Apache-2.0
"""Preflight: do before Ray starts what a run would do minutes later, so that errors surface now.

``stages`` lists the stages. Each calls what a run calls (verl, vLLM, transformers, wandb), and fails with the words of
its owner and the field of ours. ``rules`` has what no owner refuses although a run would hang, or train something else
than it says. A stage returns a text on what it found, and raises ``CheckWarning`` for a warning.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class CheckWarning(Exception):
    """A warning: the run will start, but may not do what the user wants. Any other exception is a failure."""


@contextmanager
def blame(field: str, value="", fix: str = "") -> Iterator[None]:
    """Turn an exception of the block into a ValueError that names the field, its value, the reason and the fix."""
    try:
        yield
    except CheckWarning:
        raise
    except (Exception, SystemExit) as error:
        given = field if value == "" else f"{field}={value}"
        reason = innermost(error).rstrip(".")
        if "is not usable" in reason:  # it names its field itself
            raise ValueError(f"{given}: {reason}.") from error
        raise ValueError(f"{given} is not usable: {reason}{'; ' if fix else ''}{fix}.") from error


def innermost(error: BaseException) -> str:
    """Return type and message of the first exception in the chain of causes, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
