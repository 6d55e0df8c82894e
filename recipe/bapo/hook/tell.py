# SPDX-License-Identifier: Apache-2.0
"""Tell the user something in the output of a run, also instead of ending it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def tell(text: str) -> None:
    """Print one line that begins with ``BAPO:``, which Ray forwards from a worker to the run's output.

    This is not a logger, because vLLM sets the root logger and its handlers to ERROR in the process of a worker
    (``model_hosting_container_standards.logging_config``), and the warnings of all other libraries are lost there.
    """
    print(f"BAPO: {' '.join(text.split())}", file=sys.stderr, flush=True)


class Guard:
    """Keeps what only observes a run from ending it. Each kind of trouble is told once."""

    def __init__(self):
        self._told: set[str] = set()

    def tell_once(self, kind: str, text: str) -> None:
        """Tell a text, unless one of this kind was told before."""
        if kind not in self._told:
            self._told.add(kind)
            tell(text)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Turn an exception into one line. ``what`` says what is done here, such as "measuring an update"."""
        try:
            yield
        except Exception as error:
            self.tell_once(what, f"{what} failed ({type(error).__name__}: {error}). Training goes on without it.")
