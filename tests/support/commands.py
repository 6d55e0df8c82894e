# SPDX-License-Identifier: Apache-2.0
"""How long tests wait for a command at most, and how they wait for a condition."""

import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds after which what a test waits for has failed to come: many times what a busy machine needs


def until(true, seconds, what):
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"{what} did not come within {seconds} seconds"
        time.sleep(0.1)
    return found
