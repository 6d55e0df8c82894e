# SPDX-License-Identifier: Apache-2.0
"""The machine, with and without GPUs, which are pretended; and the table as a whole."""

import copy
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf, open_dict
from support.configs import ROOT, compose_in_groups, composed
from support.gpus import SHAPES, pretend_gpus, write_model

from recipe.bapo.config import memory, prepare
from recipe.bapo.config.memory import count_parameters
from recipe.bapo.preflight import CheckSkipped, CheckWarning, machine, model, rules, stages
from recipe.bapo.verl_patches import attention

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"


def results_of(config):
    prepare(config)
    return {line.name: line for line in stages.run_stages(config)}


def test_the_example_passes_and_nothing_is_written(task, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 50))
    lines = results_of(composed(task, f"run_dir={tmp_path}/run"))
    assert [name for name, line in lines.items() if line.status != "ok"] == ["GPU memory"]
    assert lines["GPU memory"].status == "skipped"
    assert lines["settings"].detail.startswith("64 prompts of 8 responses, 8 updates on each batch; the ratio is")
    assert lines["data"].detail == "rows: 2,160 for training and 288 for validation"
    assert not (tmp_path / "run").exists()


def test_several_failures_are_all_shown_and_each_once(task):
    config = composed(
        task, "data.train_files=/no.parquet", "data.train_batch_size=7", "reward.reward_manager.name=nope"
    )
    failed = {name for name, line in results_of(config).items() if line.status == "failed"}
    assert failed == {"data", "verl's config", "reward"}
    lines = results_of(composed(task, "actor_rollout_ref.model.path=/no/such/model"))
    assert [name for name, line in lines.items() if line.status == "failed"] == ["model"]
    assert lines["data"] == stages.Result("data", "skipped", "it relies on model")


def test_a_check_that_breaks_does_not_hide_the_others(task, monkeypatch):
    broken = ("broken", lambda config: config.no_such_key.x, ())
    monkeypatch.setattr(stages, "STAGES", (broken, *stages.STAGES[:2]))
    lines = results_of(composed(task))
    assert lines["broken"].status == "failed" and "no_such_key" in lines["broken"].detail
    assert lines["versions"].status == "ok"


def test_what_libraries_print_is_not_in_the_table():
    code = "from recipe.bapo.preflight.__main__ import nothing_printed\nwith nothing_printed(): print('verl')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_another_verl_is_a_warning(task, monkeypatch):
    monkeypatch.setattr(machine, "verl_version", lambda: "0.9.0")
    with pytest.raises(CheckWarning, match="verl 0.9.0, .* are written for verl 0.9.1, and"):
        machine.check_versions(composed(task))


def test_a_disk_that_cannot_hold_the_checkpoints_is_a_warning(task, tmp_path, monkeypatch):
    config = composed(
        task, "trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=3", f"trainer.default_local_dir={tmp_path}"
    )
    each = 12 * count_parameters(task / "model")  # weights and two moments in float32

    def said(free, **changes):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        for key, value in changes.items():
            config.trainer[key] = value
        return machine.check_disk(config)

    # verl removes the old one when the new one is complete, and keeps all by default.
    for keep, needed in ((3, 3), (1, 2), (None, 2)):
        with pytest.raises(CheckWarning, match=f"{keep or 'all'} are kept .* no room for {needed}: set"):
            said(needed * each - 1, max_actor_ckpt_to_keep=keep)
        assert said(needed * each)
    assert said(0, save_freq=-1) == "no checkpoints are saved"
    config.trainer.save_freq, config.actor_rollout_ref.model.path = 5, "Qwen/Qwen2.5-0.5B"
    with pytest.raises(CheckSkipped, match="the size of a checkpoint is known only where"):
        said(0)


@pytest.fixture(scope="module")
def models(task, tmp_path_factory):
    """Make folders of models without weights. Returns them by the names of ``SHAPES``."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(task, folder / name, name) for name in SHAPES}


@pytest.fixture(scope="module")
def composed_once(task):
    """Compose the example with ``size=gpu`` as it is shipped, for eight GPUs."""
    files = [f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_PATH", "unset")
        return compose_in_groups("experiment=example", "size=gpu", "platform=gpu", "trainer.n_gpus_per_node=8", *files)


@pytest.fixture
def config(composed_once, models):
    """Return a function ``config(model, {key: value})``, which changes a copy of the composed config."""

    def changed(model="7B", changes=None):
        copied = copy.deepcopy(composed_once)
        OmegaConf.update(copied, "actor_rollout_ref.model.path", str(models[model]))
        for key, value in (changes or {}).items():
            OmegaConf.update(copied, key, value, force_add=True)
        OmegaConf.resolve(copied)
        return copied

    return changed


# The sizes here are FSDP's: with Megatron a run takes away the keys that it does not have.
MEGATRON = ["model_engine=megatron", f"{ACTOR}.strategy=megatron", f"~{ACTOR}.fsdp_config"]
MEGATRON += [f"~{ACTOR}.entropy_checkpointing"]


@pytest.fixture
def on_megatron(task, monkeypatch):
    """Return a function: the example's config for Megatron on eight GPUs, with overrides."""
    for name, value in {"MODEL_PATH": task / "model", "TRAIN_FILE": task, "TEST_FILE": task}.items():
        monkeypatch.setenv(name, str(value))
    groups = ["experiment=example", "size=gpu", "platform=gpu", "trainer.n_gpus_per_node=8"]
    return lambda *overrides: compose_in_groups(*groups, *MEGATRON, *overrides)


def test_megatron_takes_the_default_scope_alone(on_megatron):
    with pytest.raises(ValueError, match="bound_scope=micro_batch with strategy=megatron"):
        stages.check_verls_config(on_megatron(f"{ACTOR}.policy_loss.bound_scope=micro_batch"))
    config = on_megatron(f"{ACTOR}.megatron.tensor_model_parallel_size=2")
    assert "bound_scope=mini_batch" in stages.check_verls_config(config) and rules.check_rules(config)


def test_the_gpus_that_are_asked_for_stand_beside_those_that_are_here(config, monkeypatch):
    pretend_gpus(monkeypatch, gpus=7)
    assert machine.check_versions(config()).endswith("GPUs: 8 to train; 7 are here")
    assert machine.check_versions(config(changes=SEPARATE)).endswith("GPUs: 8 to train and 3 to sample; 7 are here")


@pytest.mark.parametrize("field", [f"{ACTOR}.ulysses_sequence_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"])
def test_either_key_of_sequence_parallelism_is_read(config, field):
    assert rules.Settings(config(changes={field: 4})).sequence_parallel == 4


SEPARATE = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 3}
SCORERS = {
    f"reward.reward_model.{key}": value
    for key, value in {"enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 3}.items()
}


def test_a_sequence_that_no_micro_batch_holds_is_a_warning(config):
    """A part of a sequence is rounded up: 9217 tokens on 4 GPUs."""
    changes = {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 2304,
        f"{ACTOR}.ulysses_sequence_parallel_size": 4,
        "data.max_prompt_length": 1025,
    }
    with pytest.raises(CheckWarning, match="a micro-batch holds 9216 tokens"):
        rules.check_rules(config(changes=changes))


def test_a_reward_models_gpus_need_not_be_divided_by_a_served_model(config):
    assert rules.check_rules(config(changes={**SCORERS, f"{ROLLOUT}.tensor_model_parallel_size": 2}))


def test_the_size_of_a_pass_that_bypass_mode_leaves_out_is_not_judged(config):
    small, bypass = {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 7}, {"algorithm.rollout_correction.bypass_mode": True}
    assert rules.check_rules(config(changes={**small, **bypass}))
    with pytest.raises(CheckWarning, match="a micro-batch holds 7 tokens"):
        rules.check_rules(config(changes=small))


MODEL = "actor_rollout_ref.model"
FUSED = {f"{MODEL}.use_fused_kernels": True}
REFERENCE = {f"{ACTOR}.use_kl_loss": True}


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "7B",
            {**FUSED, **REFERENCE},
            "=true with a reference model .*=\\[recipe.bapo.verl_patches.fused_heads\\], or",
        ),
        ("7B", {**FUSED, **REFERENCE, f"{MODEL}.external_lib": "recipe.bapo.verl_patches.fused_heads"}, None),
        (
            "7B",
            {**FUSED, **REFERENCE, f"{MODEL}.external_lib": attention.__name__},
            "external_lib=\\[recipe.bapo.verl_patches.attention,recipe.bapo.verl_patches.fused_heads\\], or",
        ),
        ("1.5B", {**FUSED, **REFERENCE}, None),  # its embeddings are tied
        (
            "1.5B",
            {**FUSED, f"{MODEL}.override_config.final_logit_softcapping": 30.0},
            "whose config.json has final_logit_softcapping=30.0: the kernels multiply by the output layer alone",
        ),
    ],
)
def test_what_fused_kernels_cannot_do(config, name, changes, message):
    chosen = config(name, {f"{MODEL}.override_config.attn_implementation": "sdpa", **changes})
    if message is None:
        assert model.check_model(chosen)
    else:
        with pytest.raises(ValueError if "softcapping" in message else CheckWarning, match=message):
            model.check_model(chosen)


@pytest.mark.parametrize("implementation", ["sdpa", attention.NAME])
def test_an_attention_that_drops_a_cap_is_refused(config, implementation):
    library = {f"{MODEL}.external_lib": attention.__name__}
    chosen = library | {f"{MODEL}.override_config.attn_implementation": implementation}
    assert model.check_model(config("0.5B", chosen))
    with pytest.raises(ValueError, match=rf"attn_implementation={implementation}\b.*, which (drops|it would drop)"):
        model.check_model(config("0.5B", chosen | {f"{MODEL}.override_config.attn_logit_softcapping": 50.0}))


def test_a_torch_without_varlen_can_check_a_model(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.delitem(sys.modules, attention.__name__)
    assert model.check_model(config("0.5B", {f"{MODEL}.override_config.attn_implementation": "sdpa"}))
    with pytest.raises(ModuleNotFoundError, match="varlen"):
        model.check_model(config("0.5B", {f"{MODEL}.override_config.attn_implementation": attention.NAME}))


SHORT = "33 CPUs \\(1 for the transfer queue's controller, 8 for its storage units, 24 for 8 GPUs to train"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, SHORT),
        (SEPARATE | {"trainer.n_gpus_per_node": 5}, "30 CPUs.*15 for 5 .* 6 for 3 GPUs to s"),
        ({"reward.reward_manager.name": "remote", "reward.num_workers": 2}, "37 CPUs .*, 4 for reward workers"),
        (SCORERS, "42 CPUs .*, 9 for 3 GPUs to score"),
    ],
)
def test_the_cpus_that_ray_is_asked_for_are_named(config, monkeypatch, changes, said):
    pretend_gpus(monkeypatch, cpus=16)  # our trainer has its own Ray count enough
    assert re.search(said, machine.check_cpus(config(changes=changes)))


def test_a_ray_that_counts_too_few_cpus_is_refused(config, monkeypatch):
    pretend_gpus(monkeypatch, cpus=16)
    with pytest.raises(ValueError, match=f"{SHORT}.* wait for ever with ray_kwargs.ray_init.num_cpus=32: set .*=33"):
        machine.check_cpus(config(changes={"ray_kwargs.ray_init.num_cpus": 32}))
    of_verl = config()
    with open_dict(of_verl):
        del of_verl["watchdog"]  # verl's own entry point has Ray count the machine's
    with pytest.raises(ValueError, match="on a machine with 16, as this one, it would wait for ever: set"):
        machine.check_cpus(of_verl)
    pretend_gpus(monkeypatch, cpus=33)
    assert machine.check_cpus(of_verl)
    pretend_gpus(monkeypatch, cpus=16)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)  # a login node
    with pytest.raises(CheckWarning, match="on a machine with 16, as this one"):
        machine.check_cpus(of_verl)


def test_a_cluster_counts_its_own_cpus(config, monkeypatch):
    pretend_gpus(monkeypatch, cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(CheckSkipped, match="the nodes of the Ray cluster count their own"):
        machine.check_cpus(config())


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml")))
def test_every_shipped_config_gives_a_full_table_on_its_gpus(task, models, monkeypatch, tmp_path, name):
    large, small, separate = name.endswith("32b"), name == "gsm8k", name == "separate_async"
    gpus = 1 if small else 4 if separate else 8
    pretend_gpus(monkeypatch, gpus=1 if small else 8)
    monkeypatch.setattr(memory, "usable_memory", lambda: None)  # as without nvidia-smi
    path = models["32B" if large else "0.5B" if small else "7B"]
    files = {"MODEL_PATH": path, "TRAIN_FILE": task / "train.parquet", "TEST_FILE": task / "test.parquet"}
    for variable, file in files.items():
        monkeypatch.setenv(variable, str(file))
    nodes = [f"trainer.nnodes={8 if large else 1}", f"trainer.n_gpus_per_node={gpus}"]
    nodes += ["actor_rollout_ref.rollout.n_gpus_per_node=4"] * separate
    reward = ["reward.custom_reward_function.path=pkg://recipe.bapo.example.reward"]  # scores the task's data
    groups = (f"experiment={name}", "size=gpu", "platform=gpu", f"run_dir={tmp_path}/run")
    chosen = compose_in_groups(*groups, *reward, *nodes)
    lines = results_of(chosen)
    assert list(lines) == [name for name, _, _ in stages.STAGES]
    left = {name: line.status for name, line in lines.items() if line.status != "ok"}
    # A Ray cluster counts its CPUs.
    assert left == dict.fromkeys(["GPU memory", "CPUs"] if large else ["GPU memory"], "skipped")
