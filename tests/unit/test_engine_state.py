# SPDX-License-Identifier: Apache-2.0
"""What is set back before a pass is made again, and where it cannot be. A GPU and Megatron are stand-ins here."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.stand_in import Model

from recipe.bapo.hook import engine_state
from recipe.bapo.hook.engine_state import EngineState, can_be_restored


class Tracker:
    """A stand-in for Megatron's random generators. Drawing replaces the tensor of a state, as it does in Megatron."""

    def __init__(self, **states):
        self.states = states

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states


def engine_with(module):
    return SimpleNamespace(module=module, tf_config=SimpleNamespace(fp8=None))


@pytest.fixture
def tracker(monkeypatch):
    """Have this process look as if it had imported Megatron."""
    tracker = Tracker(first=torch.zeros(2), second=torch.ones(2))
    module = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", module)
    return tracker


def test_the_buffers_of_every_part_of_a_model_are_set_back():
    """Megatron's module is a list of the parts of a model, and a buffer lies deep inside a part."""
    parts = [torch.nn.Sequential(Model(0.1)) for _ in range(2)]
    for modules in (parts, torch.nn.ModuleList(parts), parts[0]):
        state = EngineState(SimpleNamespace(module=modules))
        for _ in range(2):
            for part in parts:
                part[0].forwards += 1
            state.restore()
            assert parts[0][0].forwards == 0
    assert parts[1][0].forwards == 2  # it was no part of the last engine


def test_megatrons_random_generators_are_set_back(tracker):
    state = EngineState(engine_with([]))
    for _ in range(2):
        for name in tracker.states:
            tracker.states[name] = tracker.states[name] + 5
        state.restore()
        assert {name: drawn.tolist() for name, drawn in tracker.states.items()} == {"first": [0, 0], "second": [1, 1]}


def test_the_random_generator_of_a_gpu_is_set_back(monkeypatch):
    generator = SimpleNamespace(state=torch.zeros(2))
    gpu = SimpleNamespace(
        get_rng_state=lambda: generator.state.clone(), set_rng_state=lambda state: vars(generator).update(state=state)
    )
    monkeypatch.setattr(engine_state, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(engine_state, "get_torch_device", lambda: gpu)
    state = EngineState(engine_with([]))
    generator.state += 5
    state.restore()
    assert generator.state.tolist() == [0, 0]


def test_fp8_is_not_restored():
    assert can_be_restored(SimpleNamespace())  # FSDP
    assert can_be_restored(engine_with([]))
    assert not can_be_restored(SimpleNamespace(tf_config=SimpleNamespace(fp8="hybrid")))


def test_generators_of_a_cuda_graph_are_not_restored(tracker):
    assert can_be_restored(engine_with([]))
    tracker.states["second"] = torch.Generator()
    assert not can_be_restored(engine_with([]))
