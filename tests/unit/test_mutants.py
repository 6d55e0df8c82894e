# SPDX-License-Identifier: Apache-2.0
"""The list of mutants keeps up with the code."""

import pytest
from mutants import MUTANTS, ROOT, TESTS


@pytest.mark.parametrize("file", MUTANTS)
def test_every_mutant_can_be_made(file):
    text = (ROOT / file).read_text()
    assert [old for old, new in MUTANTS[file] if old not in text or old == new] == []
    assert all((ROOT / name).exists() for name in TESTS[file].split())


def test_every_file_with_tests_of_its_own_has_mutants():
    assert TESTS.keys() == MUTANTS.keys()
