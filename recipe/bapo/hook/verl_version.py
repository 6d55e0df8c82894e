# SPDX-License-Identifier: Apache-2.0
"""Which verl is imported, and with which versions BAPO was run."""

import verl

# The table of docs/your_own_run.md, Versions, has what was run of each.
RUN_WITH = "the two lines and the monitor were run with verl 0.8.0, 0.9.0 and 0.9.1"


def verl_version() -> str:
    """Return the version of the verl that is imported. A copy without metadata has it, too."""
    return str(getattr(verl, "__version__", "of an unknown version"))
