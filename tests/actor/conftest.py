# SPDX-License-Identifier: Apache-2.0
"""What the tests of the actor share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def folder_for_temporary_files(tmp_path_factory):
    """verl leaves a lock file of each checkpoint in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))  # read by the processes that the tests start
        yield
