# SPDX-License-Identifier: Apache-2.0
"""What the worker notices of the weights that verl sends to the rollout servers."""

from types import SimpleNamespace

import pytest
import torch

from recipe.bapo.hook.sent_weights import SentWeights

BASE = {"model.embed_tokens.weight": torch.ones(2), "model.layers.0.q_proj.weight": torch.ones(3)}
ADAPTER = {
    "base_model.model.q_proj.lora_A.weight": torch.ones(1),
    "base_model.model.q_proj.lora_B.weight": torch.ones(1),
}
LORA = SimpleNamespace(lora_rank=8, lora={"merge": False}, lora_adapter_path=None)


class Engine:
    """Gives weights as verl's engine does: lazily, or as a view of a dict."""

    def __init__(self):
        self.gives, self.taken = BASE, []

    def get_per_tensor_param(self, base_sync_done=False):
        if base_sync_done:
            return self.gives.items(), "a peft config"
        return ((self.taken.append(name) or name, weight) for name, weight in self.gives.items()), None

    def get_per_tensor_param_delta_shard(self):
        return iter([(("slots",), "float32", [1])]), None


def engine_and_weights(model_config=LORA):
    engine = Engine()
    return engine, SentWeights(engine, model_config)


def send(engine, gives, **how):
    engine.gives = gives
    weights, config = engine.get_per_tensor_param(**how)
    return dict(weights), config


def told(capsys):
    return capsys.readouterr().err.count("none of its weights were among those that verl sent")


@pytest.mark.parametrize(
    "sends, missing",
    [
        ([BASE], True),  # separate_async without lora.merge
        ([{}], True),  # FSDP1 with peft 0.21, which finds no tensor of the adapter
        ([ADAPTER], False),
        ([BASE, ADAPTER], False),  # verl syncs base weights and adapter apart
        ([ADAPTER, BASE], False),
        ([], False),  # several calls between two sends
    ],
)
def test_an_adapter_that_is_never_sent_is_told_once(capsys, sends, missing):
    engine, weights = engine_and_weights()
    send(engine, BASE)  # before the first update the adapter changes nothing
    for _ in range(4):
        weights.begin_call()
        for gives in sends:
            send(engine, gives, base_sync_done=gives is not BASE)
    assert told(capsys) == missing


def test_an_adapter_that_is_no_longer_sent_is_told(capsys):
    engine, weights = engine_and_weights()
    for gives, missing in ((ADAPTER, 0), (ADAPTER, 0), (BASE, 0), (BASE, 1)):  # judged when the next call begins
        weights.begin_call()
        assert told(capsys) == missing
        send(engine, gives)


@pytest.mark.parametrize(
    "model_config, missing",
    [
        (SimpleNamespace(lora_rank=0, lora={"rank": 4}, lora_adapter_path=None), True),  # Megatron
        (SimpleNamespace(lora_rank=0, lora={}, lora_adapter_path="/an/adapter"), False),  # verl then trains all weights
        (SimpleNamespace(lora_rank=8, lora={"merge": True}, lora_adapter_path=None), False),
        (None, False),
    ],
)
def test_an_adapter_of_its_own_is_watched(capsys, model_config, missing):
    engine, weights = engine_and_weights(model_config)
    for _ in range(3):
        weights.begin_call()
        assert send(engine, BASE) == (BASE, None)
    assert told(capsys) == missing


def test_weights_pass_through_one_at_a_time_and_unchanged():
    engine, weights = engine_and_weights()
    engine.gives = BASE
    passed, config = engine.get_per_tensor_param()
    assert engine.taken == [] and config is None  # nothing is taken before it is asked for
    name, tensor = next(iter(passed))
    assert engine.taken == [name] and tensor is BASE[name]
    assert all(found is BASE[name] for name, found in send(engine, BASE)[0].items())
    assert send(engine, ADAPTER, base_sync_done=True) == (ADAPTER, "a peft config")


def test_what_verl_did_not_name_or_take_whole_is_not_judged(capsys):
    engine, weights = engine_and_weights()
    for _ in range(3):
        weights.begin_call()
        next(iter(engine.get_per_tensor_param()[0]))
    for _ in range(3):
        weights.begin_call()
        assert list(engine.get_per_tensor_param_delta_shard()[0]) == [(("slots",), "float32", [1])]
    assert told(capsys) == 0
