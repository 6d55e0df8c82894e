# SPDX-License-Identifier: Apache-2.0
"""How the tests of the real stack tell a run's leftovers from other work on the machine."""

import mmap
import uuid
from pathlib import Path

import pytest
from support.stack_runs import left_since, temporary_files


@pytest.fixture
def shared_memory():
    path = Path("/dev/shm") / f"sem.mp-{uuid.uuid4().hex[:8]}"
    yield path
    path.unlink(missing_ok=True)


def test_shared_memory_that_nobody_uses_was_left_behind(shared_memory):
    before = temporary_files()
    shared_memory.write_bytes(b"x" * mmap.PAGESIZE)
    assert shared_memory in left_since(before)


def test_shared_memory_of_other_work_is_none_of_a_runs(shared_memory):
    before = temporary_files()
    shared_memory.write_bytes(b"x" * mmap.PAGESIZE)
    with open(shared_memory, "r+b") as opened:
        assert shared_memory not in left_since(before)
        mapped = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
    assert shared_memory not in left_since(before)  # closed, but mapped
    mapped.close()
    assert shared_memory in left_since(before)
