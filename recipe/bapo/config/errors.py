# SPDX-License-Identifier: Apache-2.0
"""Say in one line why a config cannot be composed or prepared, and what the first cause of an exception was."""

import re
import traceback

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

RESOLVING = re.compile(r"\w+ raised while resolving interpolation: ")  # OmegaConf writes it before a resolver's error
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what composing a config may raise


def explain(error: Exception) -> str:
    """Say in one line why a config could not be composed or prepared, in the words of Hydra, OmegaConf or verl."""
    cause = (error.__cause__ if isinstance(error, HydraException) else None) or error
    key = getattr(cause, "full_key", None) or ""
    lines = f"{error} {cause if cause is not error else ''}".partition("Config search path:")[0].splitlines()
    kept = [line for line in lines if not line.strip().startswith(("full_key", "object_type", "reference_type"))]
    text = RESOLVING.sub("", " ".join(" ".join(kept).split()))
    if isinstance(cause, OverrideParseException):
        return f"{cause.override}: {text}: put quotes around a value with ( ) [ ] {{ }} , = or ~: 'key=\"value\"'"
    return f"{key}: {text}" if key and key not in text else text or innermost(error)


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def innermost(error: BaseException) -> str:
    """Return type and message of the first exception in the chain of causes, as one line.

    The type of a ValueError is left out. An assertion without a message is quoted from the source.
    """
    error = root_cause(error)
    text = " ".join(str(error).split())
    if not text and error.__traceback__ is not None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{where.line} ({where.filename}:{where.lineno})"
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
