# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the tests of the actor."""

import pytest

from recipe.bapo.config import cpu_environment


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """Set, for the processes that the tests start, the CPU path's variables and a folder for temporary files.

    The folder is our own, because verl leaves a lock file there for each checkpoint.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        for name, value in cpu_environment().items():
            patch.setenv(name, value)
        yield
