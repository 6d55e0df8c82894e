# SPDX-License-Identifier: Apache-2.0
"""Preflight: do before Ray starts what a run would do minutes later, so that errors surface now.

It takes the arguments of any run of verl, with or without the lines that turn on BAPO or its monitor, and of our
trainer. ``stages`` lists what is looked at. A stage calls what the run calls, of verl and transformers, and has four
answers:

- failed: verl itself refuses this, in verl's words. Or, by rules of our own, the run would train something else than
  its command says, wait for ever or lose data.
- warning: what verl fails for only late, what the user may not want, and what this machine lacks (packages, memory,
  disk), which need not be the one that trains. A stage raises ``CheckWarning``.
- skipped: it looked at nothing, with the reason. A stage raises ``CheckSkipped``.
- ok: with a text on what it found.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from recipe.bapo.config.errors import innermost, root_cause


class CheckWarning(Exception):
    """A warning: the run will start, but may fail later or not do what the user wants."""


class CheckSkipped(Exception):
    """A stage that could not look. Any exception but this and ``CheckWarning`` is a failure."""


@contextmanager
def blame(field: str, value="", fix: str = "", kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turn an exception of the block into one of ``kind`` that names the field, its value, the reason and the fix.

    Without a value ``field`` is a section of the config. A package that this machine lacks is a warning.
    """
    try:
        yield
    except (CheckWarning, CheckSkipped):
        raise
    except (Exception, SystemExit) as error:
        reason, cause = innermost(error).rstrip("."), root_cause(error)
        if isinstance(cause, ModuleNotFoundError) and not str(cause.name).startswith("verl"):
            raise CheckWarning(f"{field}={value}: {cause} on this machine: install it, or set PYTHONPATH.") from error
        if value == "":  # a section of the config: the reason names a key in it
            raise kind(f"{field}: {reason}.") from error
        raise kind(f"invalid {field}={value}: {reason}{'; ' if fix else ''}{fix}.") from error
