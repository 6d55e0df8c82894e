# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the unit tests."""

import sys
import uuid

import pytest

from recipe.bapo.host import cleanup, locks


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """Make the folders in which a run looks for other runs and for what they leave."""
    folder = tmp_path_factory.mktemp("machine")
    for name in ("sockets", "shared_memory"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(autouse=True)
def alone(machine, monkeypatch):
    """Keep a test from seeing other runs and tests on this machine, and them from being refused because of it."""
    for module in (cleanup, locks):
        monkeypatch.setattr(module, "SOCKETS", machine / "sockets")
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", machine / "shared_memory")
    monkeypatch.setattr(locks, "FIRST_JOB", uuid.uuid4().hex)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # tests/gpu needs it


@pytest.fixture(autouse=True)
def no_cached_data(monkeypatch):
    """Have datasets find nothing in its cache. Hashing a tokenizer for the key is half the time of a preflight."""
    datasets = sys.modules.get("datasets")
    if datasets is None:  # the README's check against the paper does not install it
        return
    hasher = datasets.fingerprint.Hasher
    monkeypatch.setattr(hasher, "hash", classmethod(lambda cls, value: uuid.uuid4().hex))
