# SPDX-License-Identifier: Apache-2.0
"""The preflight of a machine with GPUs, without any: each mistake that verl or CUDA would meet minutes later."""

import copy
import json
import re
import sys
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups
from support.gpus import SHAPES, pretend_gpus, write_model, write_nvidia_smi

from recipe.bapo.checks import Concern, __main__, machine, size, table
from recipe.bapo.checks import config as checks
from recipe.bapo.launch import locks

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"


@pytest.fixture(scope="module")
def models(task, tmp_path_factory):
    """Folders of models by size."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(task, folder / name, name) for name in SHAPES}


@pytest.fixture(scope="module")
def composed_once(task):
    """``size=gpu`` as it is shipped, for eight GPUs."""
    files = [f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_PATH", "unset")
        return compose_in_groups("experiment=example", "size=gpu", "platform=gpu", "trainer.n_gpus_per_node=8", *files)


@pytest.fixture
def config(composed_once, models):
    """A function that changes a copy of it: ``config(model, {key: value})``."""

    def changed(model="7B", changes=None):
        copied = copy.deepcopy(composed_once)
        OmegaConf.update(copied, "actor_rollout_ref.model.path", str(models[model]))
        for key, value in (changes or {}).items():
            OmegaConf.update(copied, key, value, force_add=True)
        OmegaConf.resolve(copied)
        return copied

    return changed


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "veomni"])
def test_other_engines_are_refused_by_either_key_and_nothing_else_is_said(config, engine):
    for field in ("model_engine", f"{ACTOR}.strategy"):
        (line,) = table.run(config(changes={field: engine}))
        assert line.status == "failed" and f"{field}={engine} is not usable" in line.detail
        assert ("pipelines" in line.detail) == (engine != "veomni")  # it has none


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "veomni"])
def test_another_engine_composes_and_is_refused(engine, monkeypatch, task):
    for name, value in {"MODEL_PATH": task / "model", "TRAIN_FILE": task, "TEST_FILE": task}.items():
        monkeypatch.setenv(name, str(value))
    overrides = ["experiment=example", "size=gpu", "platform=gpu", f"model_engine={engine}"]
    (line,) = __main__.lines_of(overrides, ROOT / "configs")
    assert line.status == "failed" and f"={engine} is not usable" in line.detail


def test_a_gpu_that_torch_cannot_use_fails_with_driver_and_cuda(config, monkeypatch, tmp_path, capsys):
    pretend_gpus(monkeypatch, tmp_path, driver="570.10")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="8 x NVIDIA H100 with driver 570.10 here, and torch .* built for CUDA 13.0"):
        machine.check_devices(config())
    monkeypatch.setattr(__main__, "compose_config", lambda *arguments: config())
    monkeypatch.setattr(sys, "argv", ["checks"])
    assert __main__.main() == 1
    assert "driver 570.10" in capsys.readouterr().out


def test_no_gpu_is_a_warning_only_where_the_run_joins_a_cluster(config, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [])
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="no GPU here, and the run needs 8"):
        machine.check_devices(config())
    with pytest.raises(Concern, match="the cluster needs 8 a node to train on 2 nodes"):
        machine.check_devices(config(changes={"trainer.nnodes": 2}))


@pytest.mark.parametrize(
    "visible, names", [(None, "01234567"), ("2,5", "25"), ("GPU-3a", "3"), ("", ""), ("-1", ""), ("1,9,2", "1")]
)
def test_the_devices_that_cuda_leaves_are_counted(monkeypatch, tmp_path, visible, names):
    write_nvidia_smi(tmp_path)
    text = (tmp_path / "nvidia-smi").read_text()
    for n in range(8):
        text = text.replace(f"GPU-{n}a, NVIDIA H100", f"GPU-{n}abcd, {n}")
    (tmp_path / "nvidia-smi").write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.name for gpu in machine.gpus()) == names


def test_a_config_that_cannot_be_composed_is_the_only_line(monkeypatch, task, capsys):
    for name, value in {"MODEL_PATH": task / "model", "TRAIN_FILE": task, "TEST_FILE": task}.items():
        monkeypatch.setenv(name, str(value))
    base = ["experiment=replay", "size=gpu", "platform=gpu"]
    circle = ("trainer.project_name=${trainer.experiment_name}", "trainer.experiment_name=${trainer.project_name}")
    for overrides, said in (
        (["staleness=7"], "staleness"),
        (["trainer.no_such_key=1"], "no_such_key"),
        (circle, "Recursive interpolation"),
        (["trainer.project_name='${foo'"], "trainer.project_name"),
    ):
        monkeypatch.setattr(sys, "argv", ["checks", "--json", "--config-dir", str(ROOT / "configs"), *base, *overrides])
        assert __main__.main() == 1
        (line,) = json.loads(capsys.readouterr().out)
        assert line["name"] == "config" and line["status"] == "failed" and said in line["detail"]
        assert "\n" not in line["detail"]


def test_too_few_visible_gpus_are_named(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="this node has 2 GPUs .CUDA_VISIBLE_DEVICES=2,5., and the config asks for 8"):
        machine.check_devices(config())


def test_one_gpu_too_few_is_named_those_that_sample_among_them(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path)
    for changes, wanted in (({}, 8), ({"trainer.n_gpus_per_node": 4, **SEPARATE}, 7)):
        monkeypatch.setattr(machine.torch.cuda, "device_count", lambda wanted=wanted: wanted)
        assert machine.check_devices(config(changes=changes)).startswith(f"{wanted} x NVIDIA H100")
        monkeypatch.setattr(machine.torch.cuda, "device_count", lambda wanted=wanted: wanted - 1)
        with pytest.raises(ValueError, match=f"this node has {wanted - 1} GPUs"):
            machine.check_devices(config(changes=changes))


def test_in_a_cluster_each_pool_has_nodes_of_its_own(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path)
    apart = {**SEPARATE, f"{ROLLOUT}.n_gpus_per_node": 8}
    with pytest.raises(ValueError, match="n_gpus_per_node .GPUS_PER_NODE.=8 and .*n_gpus_per_node .ROLLOUT.*=8 is not"):
        machine.check_devices(config(changes=apart))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    text = machine.check_devices(config(changes=apart))
    assert text.endswith("8 a node to train on 1 node and 8 a node to sample on 1 node")
    with pytest.raises(ValueError, match="^actor_rollout_ref.rollout.n_gpus_per_node .ROLLOUT_GPUS_PER_NODE.=9 is not"):
        machine.check_devices(config(changes={**apart, f"{ROLLOUT}.n_gpus_per_node": 9}))


def test_a_containers_64_megabytes_of_shared_memory_fail_on_gpus(config, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("", (), {"free": 64 << 20}))
    with pytest.raises(ValueError, match="/dev/shm has 0.06 GiB free, and NCCL and vLLM need it: docker run --shm-si"):
        machine.check_shared_memory(config())


def test_a_flash_attn_that_cannot_be_imported_counts_as_none(config, monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported .undefined symbol.*platform=gpu_without_flash_attn"):
        machine.check_flash_attn(config())


def test_a_c_compiler_and_pythons_headers_are_looked_for(config, monkeypatch, tmp_path):
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match="Python.h does not exist.* install this Python's headers .python3"):
        machine.check_compiler(config())
    (tmp_path / "Python.h").touch()
    assert machine.check_compiler(config()) == f"{compiler}, {tmp_path}/Python.h"
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(ValueError, match="no C compiler here .CC=no-such-cc.*install gcc, or set CC"):
        machine.check_compiler(config())
    monkeypatch.delenv("CC")
    compiler.unlink()
    with pytest.raises(ValueError, match="no C compiler here .gcc or clang."):
        machine.check_compiler(config())
    assert machine.check_compiler(config(changes={"trainer.device": "cpu"})) == "not used on a CPU"


@pytest.mark.parametrize("field", [f"{ACTOR}.ulysses_sequence_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"])
def test_sequence_parallelism_without_flash_attention_is_refused_by_name(config, field):
    sdpa = {"actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=4 is not usable with .*sdpa"):
        checks.check_loss(config(changes={field: 4, **sdpa}))


def test_what_the_worker_refuses_is_refused_before_the_run(config):
    offload = {"actor_rollout_ref.model.enable_activation_offload": True}
    with pytest.raises(ValueError, match="enable_activation_offload=true is not usable with bound_scope=mini_batch"):
        checks.check_loss(config(changes=offload))


def test_without_flash_attn_the_platform_for_it_is_named(config, monkeypatch):
    monkeypatch.setattr(machine, "why_no_flash_attn", lambda: "not installed")
    with pytest.raises(ValueError, match="flash_attention_2 needs it: set platform=gpu_without_flash_attn"):
        machine.check_flash_attn(config())
    sdpa = {"actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}
    text = machine.check_flash_attn(config(changes=sdpa))
    assert text == "not installed; attention is sdpa"  # CUDA's autocast has log_softmax in float32
    padded = {**sdpa, "actor_rollout_ref.model.use_remove_padding": False}
    with pytest.raises(Concern, match="every micro-batch is padded to its longest sequence"):
        machine.check_flash_attn(config(changes=padded))


@pytest.mark.parametrize("field", [f"{ACTOR}.ulysses_sequence_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"])
def test_data_parallel_ranks_by_either_key_of_sequence_parallelism(config, field):
    assert checks.ranks_of(config(changes={field: 4})) == 2
    one = {field: 4, "data.train_batch_size": 2, f"{ACTOR}.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 2}
    assert "data-parallel ranks: 2" in checks.check_batches(config(changes=one))


SEPARATE = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 3}


@pytest.mark.parametrize(
    "check, changes, message",
    [
        (checks.check_parallel, {f"{ROLLOUT}.tensor_model_parallel_size": 3}, "set it to a divisor of the model's 28"),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.tensor_model_parallel_size": 7},
            "set it to a divisor of the 8 GPUs",
        ),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.tensor_model_parallel_size": 2, **SEPARATE},
            "tensor_model_parallel_size=2 is not usable: set it to a divisor of the 3 GPUs that sample",
        ),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.tensor_model_parallel_size": 4, "trainer.n_gpus_per_node": 6, "trainer.nnodes": 2},
            "set it to a divisor or a multiple of the 6 GPUs of a node",
        ),
        (
            checks.check_parallel,
            {f"{FSDP}.ulysses_sequence_parallel_size": 8},
            f"{FSDP}.ulysses_sequence_parallel_size=8 is not usable: set it to a divisor of the model's 28 attention",
        ),
        (checks.check_parallel, {f"{ACTOR}.ulysses_sequence_parallel_size": 3}, "set it to a divisor of the 8 GPUs"),
        (
            checks.check_parallel,
            {f"{FSDP}.ulysses_sequence_parallel_size": 7, "trainer.n_gpus_per_node": 7},
            "4 key",
        ),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.tensor_model_parallel_size": 7, "trainer.n_gpus_per_node": 7},
            "tensor_model_parallel_size=7 is not usable: set it to a divisor or a multiple of the model's 4 key",
        ),
        (
            checks.check_parallel,
            {f"{ACTOR}.ulysses_sequence_parallel_size": 4, "actor_rollout_ref.model.use_remove_padding": False},
            "use_remove_padding=False is not usable: set it to true: verl's sequence parallelism",
        ),
        (
            checks.check_batches,
            {f"{ROLLOUT}.log_prob_use_dynamic_bsz": False},
            "log_prob_use_dynamic_bsz=False is",
        ),
        (
            checks.check_batches,
            {f"{ACTOR}.ppo_max_token_len_per_gpu": 9215},
            "ppo_max_token_len_per_gpu=9215 is not usable: set it to 9216 or more",
        ),
        (
            checks.check_batches,
            {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 2303, f"{FSDP}.ulysses_sequence_parallel_size": 4},
            "log_prob_max_token_len_per_gpu=2303 is not usable: set it to 2304 or more",
        ),
        (
            checks.check_batches,  # a part of a sequence is rounded up: 9217 tokens on 4 GPUs
            {
                f"{ACTOR}.ppo_max_token_len_per_gpu": 2304,
                f"{ACTOR}.ulysses_sequence_parallel_size": 4,
                "data.max_prompt_length": 1025,
            },
            "ppo_max_token_len_per_gpu=2304 is not usable: set it to 2305 or more",
        ),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.data_parallel_size": 4, f"{ROLLOUT}.tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4 is not usable: set it to a divisor of the 8 GPUs",
        ),
        (
            checks.check_parallel,
            {f"{ROLLOUT}.pipeline_model_parallel_size": 4, f"{ROLLOUT}.tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4 is not usable: set it to a divisor of the 8 GPUs",
        ),
    ],
)
def test_what_verl_would_assert_in_a_worker(config, check, changes, message):
    with pytest.raises(ValueError) as error:
        check(config(changes=changes))
    assert message in str(error.value)


def test_a_token_limit_may_be_just_enough(config):
    changes = {f"{ACTOR}.ppo_max_token_len_per_gpu": 2304, f"{FSDP}.ulysses_sequence_parallel_size": 4}
    checks.check_batches(config(changes={**changes, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 2304}))


def test_the_gpus_of_a_model_may_be_a_multiple_of_its_key_and_value_heads(config):
    many = {"trainer.n_gpus_per_node": 14, f"{FSDP}.ulysses_sequence_parallel_size": 14}
    with pytest.raises(ValueError, match="4 key and value heads"):
        checks.check_parallel(config(changes=many))
    for size_ in (2, 4, 28):  # 28 attention heads, 4 key and value heads
        changes = {"trainer.n_gpus_per_node": 28, f"{FSDP}.ulysses_sequence_parallel_size": size_}
        changes[f"{ROLLOUT}.tensor_model_parallel_size"] = size_
        assert checks.check_parallel(config(changes=changes)) == (
            f"a sequence on {size_}, a served model on {size_} of 28 GPUs"
        )


OFFLOAD = {f"{FSDP}.param_offload": True, f"{FSDP}.optimizer_offload": True}
POLICY = {f"{FSDP}.offload_policy": True}


def on(gpus, nodes=1, **changes):
    return {"trainer.n_gpus_per_node": gpus, "trainer.nnodes": nodes, **changes}


@pytest.mark.parametrize(
    "model, changes, gibibytes, outcome, phase, left",
    [  # by hand: 12 bytes a weight stay for the rollout beside vLLM's 0.7, 16 are there in an update (docs/running.md)
        ("7B", on(2), 79.6, "failed", "rollout", 79.6 - 12 * 7.6156 / 1.0737 / 2 - 0.7 * 79.6),
        ("7B", on(4), 79.6, "warning", "rollout", 79.6 - 12 * 7.6156 / 1.0737 / 4 - 0.7 * 79.6),
        ("7B", on(8), 79.6, "ok", "rollout", 79.6 - 12 * 7.6156 / 1.0737 / 8 - 0.7 * 79.6),
        ("32B", on(8), 79.6, "failed", "rollout", 79.6 - 12 * 32.764 / 1.0737 / 8 - 0.7 * 79.6),
        ("32B", on(8, **OFFLOAD), 79.6, "failed", "update", None),
        ("32B", on(8, **POLICY), 79.6, "ok", "rollout", 79.6 - 0.7 * 79.6),
        ("32B", on(8, 8), 79.6, "ok", "rollout", 79.6 - 12 * 32.764 / 1.0737 / 64 - 0.7 * 79.6),
        ("1.5B", on(1), 23.6, "failed", "rollout", 23.6 - 12 * 1.5437 / 1.0737 - 0.7 * 23.6),
    ],
)
def test_known_cases_fit_or_not_and_by_how_much(
    config, monkeypatch, tmp_path, model, changes, gibibytes, outcome, phase, left
):
    pretend_gpus(monkeypatch, tmp_path, gibibytes=gibibytes)
    chosen = config(model, {**changes, f"{ROLLOUT}.tensor_model_parallel_size": 2 if model == "32B" else 1})
    parts = size.phases_of_a_gpu(chosen, size.model_of(chosen), gibibytes)
    if left is not None:
        assert gibibytes - sum(parts[phase].values()) == pytest.approx(left, abs=0.1)
    if outcome == "ok":
        text = size.check_memory(chosen)
        assert left > 0.05 * gibibytes and "at least" in text
        return
    with pytest.raises(Concern if outcome == "warning" else ValueError, match=f"{phase}") as error:
        size.check_memory(chosen)
    if left is not None:
        said = f"{left:.1f} left beside {phase}" if outcome == "warning" else f"{-left:.1f} too few for {phase}"
        assert said in str(error.value)


def test_offloading_empties_a_gpu_for_the_rollout_and_not_for_an_update(config):
    model = size.Model(1 << 33, 1, 0, 0, 0, False)  # 8 GiB of weights if a byte each, on 8 GPUs
    for changes, rollout, update in (
        ({}, 12, 16),
        ({f"{FSDP}.optimizer_offload": True}, 4, 16),
        (OFFLOAD, 0, 16),
        (POLICY, 0, 0),
        ({f"{FSDP}.model_dtype": "bf16"}, 6, 8),
        ({"actor_rollout_ref.model.lora_rank": 8}, 4, 4),
        ({f"{FSDP}.fsdp_size": 4}, 24, 32),
        ({**POLICY, f"{ACTOR}.strategy": "fsdp"}, 12, 16),  # it knows no such policy
    ):
        phases = size.phases_of_a_gpu(config(changes=changes), model, 0.0)
        assert sum(phases["rollout"].values()) == rollout, changes
        assert sum(phases["update"].values()) == update, changes


def test_servers_that_keep_their_memory_are_there_in_every_phase(config):
    model = size.Model(0, 0, 0, 0, 0, False)
    for keep, elsewhere in ((True, 0), (False, 70)):
        phases = size.phases_of_a_gpu(config(changes={f"{ROLLOUT}.free_cache_engine": keep}), model, 100.0)
        assert [round(phases[name]["vLLM"]) for name in ("rollout", "log-probs", "update")] == [70, *2 * [elsewhere]]


def test_no_log_probs_are_computed_anew_in_bypass_mode(config):
    model = size.Model(0, 0, 0, 0, 0, False)
    for bypass, phases in ((False, {"rollout", "log-probs", "update"}), (True, {"rollout", "update"})):
        changes = {"algorithm.rollout_correction.bypass_mode": bypass}
        assert size.phases_of_a_gpu(config(changes=changes), model, 0.0).keys() == phases


def test_what_gradient_checkpointing_keeps(config):
    model = size.Model(0, 0, 4, 1024, 0, False)  # two bytes a token, layer and hidden unit
    chosen = config(changes={f"{ACTOR}.ppo_max_token_len_per_gpu": 1 << 16})
    assert size.phases_of_a_gpu(chosen, model, 0.0)["update"]["activations"] == 0.5


def test_the_backward_of_a_layer_counts_where_it_is_more_than_the_logits(config):
    for vocabulary, larger in ((1 << 10, "the backward of a layer"), (1 << 20, "logits")):
        model = size.Model(0, 0, 4, 1024, vocabulary, False, feed_forward=1 << 14)
        update = size.phases_of_a_gpu(config(), model, 0.0)["update"]
        assert larger in update and len({"logits", "the backward of a layer"} & update.keys()) == 1
    assert size.layer_of(size.Model(0, 0, 0, 1024, 1 << 18, False, 1 << 14), 1 << 15) == 9 + 1


def test_tokens_of_a_micro_batch(config):
    lengths = {"data.max_prompt_length": 100, "data.max_response_length": 500}
    dynamic = {f"{ACTOR}.ppo_max_token_len_per_gpu": 7000, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 9000}
    rows = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 6}
    every = {**lengths, **dynamic, **rows}
    assert size.tokens_of_a_gpu(config(changes=every)) == (7000, 9000)
    every[f"{ACTOR}.use_dynamic_bsz"] = False
    assert size.tokens_of_a_gpu(config(changes=every)) == (2400, 3600)
    every[f"{FSDP}.ulysses_sequence_parallel_size"] = 2
    assert size.tokens_of_a_gpu(config(changes=every)) == (1200, 1800)


CHUNKS = {f"{ACTOR}.entropy_from_logits_with_chunking": True, f"{ACTOR}.entropy_checkpointing": True}
CHUNKS[f"{ACTOR}.entropy_from_logits_chunk_size"] = 64


@pytest.mark.parametrize(
    "changes, update, log_probs",
    [
        ({}, 1, 5),  # the gradient takes the place of the logits
        ({f"{ROLLOUT}.temperature": 0.6}, 2, 6),
        ({f"{ACTOR}.calculate_entropy": True}, 5, 5),
        ({f"{ACTOR}.calculate_entropy": True, **CHUNKS}, 2, 1.75),  # 64 of 512 tokens: three float32 planes of them
        ({f"{ACTOR}.calculate_entropy": True, **CHUNKS, f"{ROLLOUT}.temperature": 0.6}, 2.75, 2.75),
        ({f"{ACTOR}.entropy_coeff": 0.1, **CHUNKS}, 8, 1.75),
        ({"actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}, 4, 5),
        ({"actor_rollout_ref.model.use_fused_kernels": True}, 0, 0),
    ],
)
def test_planes_of_logits(config, changes, update, log_probs):
    plain = {f"{ACTOR}.entropy_checkpointing": False, f"{ACTOR}.entropy_from_logits_with_chunking": False}
    model = size.Model(0, 0, 0, 0, 1 << 20, False)
    chosen = config(changes={**plain, **changes})
    found = [size.logits_of(chosen, model, 512, update=kind) for kind in (True, False)]  # a GiB a plane
    assert found == [update, log_probs]


def test_memory_that_others_hold_is_not_there(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path, used=30.0)
    with pytest.raises(ValueError, match="79.6 GiB, of which other processes hold 30.0: 16.8 too few for rollout"):
        size.check_memory(config())


def test_the_memory_of_a_node_for_offloading_and_loading(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path, host=300)
    changes = {**POLICY, f"{ROLLOUT}.tensor_model_parallel_size": 2}
    with pytest.raises(ValueError, match="offloading takes 488 GiB of a node's memory, and 300 are free"):
        size.check_memory(config("32B", changes))
    pretend_gpus(monkeypatch, tmp_path, gibibytes=140, host=300)
    with pytest.raises(ValueError, match="offloading takes 366 GiB of a node's memory, and 300 are free"):
        size.check_memory(config("32B", OFFLOAD))
    pretend_gpus(monkeypatch, tmp_path, host=20)
    with pytest.raises(ValueError, match="loading the model takes 28 GiB of a node's memory, and 20 are free"):
        size.check_memory(config())


def test_a_containers_limit_of_memory_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(size, "CGROUP_LIMITS", (tmp_path / "limit", tmp_path / "none"))
    monkeypatch.setattr(size.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * machine.GIB))
    for text, free in (("max\n", 20), (f"{8 * machine.GIB}\n", 8), (f"{32 * machine.GIB}\n", 20)):
        (tmp_path / "limit").write_text(text)
        assert size.free_memory() == free


def test_the_table_of_known_cases_in_the_documents_is_what_preflight_says(config, monkeypatch, tmp_path):
    lines = (ROOT / "docs/running.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if " GB | " in line]
    assert len(rows) == 9
    for model, gpus, *gibibytes, outcome in rows:
        name, _, how = model.partition(", ")
        count, gpu = (int(word) for word in gpus.removesuffix(" GB").split(" x "))
        total = {80: 79.6, 24: 23.6}[gpu]
        pretend_gpus(monkeypatch, tmp_path, gibibytes=total)
        changes = on(
            min(count, 8), max(1, count // 8), **{"": {}, "offloaded": OFFLOAD, "`offload_policy`": POLICY}[how]
        )
        chosen = config(name, {**changes, f"{ROLLOUT}.tensor_model_parallel_size": 2 if name == "32B" else 1})
        phases = size.phases_of_a_gpu(chosen, size.model_of(chosen), total)
        assert [f"{sum(phases[phase].values()):.1f}" for phase in ("rollout", "log-probs", "update")] == gibibytes, (
            model
        )
        try:
            said = "fits", re.search(r"at least ([\d.]+) left", size.check_memory(chosen))[1]
        except Concern as error:
            said = "tight", re.search(r"([\d.]+) left beside", str(error))[1]
        except ValueError as error:
            said = "fails", " ".join(re.search(r"([\d.]+) too few for ([\w-]+)", str(error)).groups())
        words = outcome.replace(" too few for the", "").replace(" left", "").split(", ")
        assert list(said) == words, model


def test_the_served_weights_must_fit_vllms_share(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="gpu_memory_utilization=0.7 leaves vLLM 55.7 GiB of a GPU, and the ser.* 61"):
        size.check_memory(config("32B", POLICY))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml")))
def test_every_shipped_config_gives_a_full_table_on_eight_gpus(task, models, monkeypatch, tmp_path, name):
    pretend_gpus(monkeypatch, tmp_path)
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)  # whatever else runs on this machine
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")
    monkeypatch.setattr(checks.CheckpointEngineRegistry, "get", lambda backend: backend)  # nccl's needs CUDA
    large, separate = name.endswith("32b"), name == "separate_async"
    monkeypatch.setenv("ROLLOUT_GPUS_PER_NODE", "4")
    for variable, file in (("MODEL_PATH", models["32B" if large else "7B"]), ("TRAIN_FILE", task / "train.parquet")):
        monkeypatch.setenv(variable, str(file))
    monkeypatch.setenv("TEST_FILE", f"{task}/test.parquet")
    nodes = [f"trainer.nnodes={8 if large else 1}", f"trainer.n_gpus_per_node={4 if separate else 8}"]
    reward = ["reward.custom_reward_function.path=pkg://recipe.bapo.example.reward"]  # of the task's data
    groups = (f"experiment={name}", "size=gpu", "platform=gpu", f"run_dir={tmp_path}/run")
    chosen = compose_in_groups(*groups, *reward, *nodes)
    OmegaConf.resolve(chosen)
    lines = {line.name: line for line in table.run(chosen)}
    assert list(lines) == [check for check, _ in (*table.FIRST, *table.CHECKS, *table.CHECKS_OF_THE_MODEL, *table.LAST)]
    unusual = {line for line in lines if lines[line].status != "ok"}
    # Half of the GPUs of the node train: 7 billion weights just fit. The paper has no dual clip.
    bypassed = chosen.algorithm.rollout_correction.bypass_mode and name.startswith("paper_")
    expected = {"memory"} if separate else {"ratio"} if bypassed else set()
    assert unusual == expected, [lines[line] for line in unusual]
    assert lines["memory"].status != "failed" and "rollout" in lines["memory"].detail


def test_the_gsm8k_script_fits_one_gpu_of_24_gb(config, monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, tmp_path, gpus=1, gibibytes=23.6, host=60)
    script = (ROOT / "recipe/bapo/run_gsm8k_gpu.sh").read_text().rpartition("run_bapo_example.sh")[2]
    settings = dict(word.split("=") for word in script.split() if word.count("=") == 1)
    changes = {key: yaml.safe_load(value) for key, value in settings.items()}
    assert len(changes) > 5 and "at least" in size.check_memory(config("0.5B", {**on(1), **changes}))
    assert "staleness" in checks.check_batches(config("0.5B", {**on(1), **changes}))
