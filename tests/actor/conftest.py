# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the tests of the actor."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def folder_for_temporary_files(tmp_path_factory):
    """Use our own folder for temporary files, because verl leaves a lock file there for each checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))  # for the processes that the tests start
        yield
