# SPDX-License-Identifier: Apache-2.0
"""Preflight reports a mistake in a config in one line with the field, the value and the fix, before Ray starts."""

import json
import shutil

import pandas as pd
import pytest
from support.configs import ROOT, composed

import verl  # noqa: F401  loads the plugin
from recipe.bapo.config import compose_config
from recipe.bapo.run.preflight import CheckWarning, config_errors
from recipe.bapo.run.preflight.config import check_batches, check_intent, check_names, check_ratio, check_values
from recipe.bapo.run.preflight.preflight import run_checks, run_preflight

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path={files}"


@pytest.fixture(scope="module")
def files(task, tmp_path_factory):
    """Make a folder of unusable models and files, each named after its fault."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("no_tokenizer", "truncated"):
        shutil.copytree(task / "model", folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "no_tokenizer" / name).unlink()
    shutil.copytree(task / "model", folder / "headless")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    config = json.loads((task / "model" / "config.json").read_text())
    (folder / "headless" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    row = {"prompt": [{"role": "user", "content": "9" * 300}], "reward_model": {"style": "rule", "ground_truth": "3"}}
    pd.DataFrame([{"data_source": "nobody/knows", **row}] * 70).to_parquet(folder / "long.parquet")
    (folder / "truncated.parquet").write_bytes(b"PAR1 and no more")
    (folder / "dump").mkdir()
    (folder / "dump" / "rank0-000000.safetensors").write_bytes(b"an earlier one")
    return folder


@pytest.fixture(scope="module")
def failures(task, files):
    """Return a function: preflight's failures for the example with overrides, except those of "other runs"."""

    def failures_of(*overrides):
        config = composed(task, *(override.format(files=files) for override in overrides))
        lines = run_checks(config)
        return [line.detail for line in lines if line.status == "failed" and line.name != "other runs"]

    return failures_of


@pytest.mark.parametrize(
    "override, message",
    [
        # Types and unknown keys.
        (f"{ACTOR}.ppo_epochs='2'", f"{ACTOR}.ppo_epochs='2' is not usable: set it to a whole number"),
        (f"+{ACTOR}.policy_loss.clip_lw=1", "policy_loss.clip_lw: remove it"),
        ("+watchdog.max_silence=3", "no key watchdog.max_silence: use watchdog.max_silence_s"),
        # Values that verl would accept, or reject only later.
        (
            f"{ACTOR}.strategy=ddp",
            f"{ACTOR}.strategy=ddp is not usable with loss_mode=bapo: set it to fsdp, fsdp2 or megatron",
        ),
        (f"{ACTOR}.policy_loss._target_=verl.workers.config.PolicyLossConfig", "set it to recipe.bapo.policy_loss"),
        (f"{ACTOR}.ppo_epochs=0", f"{ACTOR}.ppo_epochs=0 is not usable: set it to a whole number of 1 or more"),
        ("trainer.resume_mode=resume", "resume_mode='resume' is not usable: set it to disable, auto or resume_path"),
        (f"{ACTOR}.clip_ratio_c=1.0", f"{ACTOR}.clip_ratio_c=1.0 is not usable: set it to a number above 1"),
        (f"{ROLLOUT}.gpu_memory_utilization=5", "gpu_memory_utilization=5 is not usable: set it to a share above 0"),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator='GRPO' is not usable: set it to grpo, or one of"),
        ("trainer.use_v1=false", "trainer.use_v1=False is not usable"),
        ("distillation.enabled=true", "distillation.enabled=True is not usable: set it to false: with distillation"),
        ("+trainer.remote_backend=arctic", "trainer.remote_backend='arctic' is not usable: set it to null: a remote"),
        ("trainer.logger=[console]", "trainer.logger=['console'] is not usable: set it to a list of file"),
        ("watchdog.max_silence_s=soon", "='soon' is not usable: set it to a number of seconds above 0"),
        (f"{ACTOR}.optim.clip_grad=0", f"{ACTOR}.optim.clip_grad=0 is not usable: set it to a number above 0"),
        (
            f"{ROLLOUT}.response_length=9",
            "response_length=9 is not usable: set it to 30, the value of data.max",
        ),
        ("ray_kwargs.ray_init.num_cpus=4", "Ray is asked for 5 CPUs (1 for the transfer queue's controller, 1 for its"),
        # What verl refuses itself.
        ("algorithm.adv_estimator=gae", "gae' is not usable: set it to grpo: gae needs a critic"),
        ("trainer.v1.trainer_mode=async", "trainer.v1.trainer_mode=async is not usable: Unknown trainer"),
        (f"{ACTOR}.policy_loss.positive_contribution_target=40", "positive_contribution_target=40 is not usable"),
        (f"{ACTOR}.loss_agg_mode=token_mean", "loss_agg_mode=token_mean is not usable (verl's default is token-mean)"),
        (f"{ROLLOUT}.log_prob_micro_batch_size=8", "Please remove 'actor_rollout_ref.rollout.log_prob"),
        # Batches.
        ("data.train_max_samples=10", "has 10 usable rows, and a batch is data.train_batch_size=64"),
        ("data.train_batch_size=15", "ppo_mini_batch_size=8 does not divide data.train_batch_size=15"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "ppo_micro_batch_size_per_gpu=5 does not divide"),
        # Folders.
        ("run_dir=null", "run_dir=None is not usable: set it to a folder (OUTPUT_DIR)"),
        ("run_dir=/proc/nope", "run_dir (OUTPUT_DIR)=/proc/nope is not usable: [Errno 2]"),
        # Reward and data.
        ("reward.custom_reward_function.path=/no/such.py", "custom_reward_function.path=/no/such.py and name="),
        ("reward.reward_manager.name=nope", "reward.reward_manager.name=nope is not usable"),
        ("data.val_files=null", "data.val_files=None is not usable"),
        ("data.train_files={files}/truncated.parquet", "truncated.parquet is not usable: Parquet magic bytes not"),
        ("data.train_files={files}/long.parquet", "has 70 prompts of more tokens than data.max_prompt_length=128"),
        # The model.
        (
            "data.max_response_length=2000",
            "data.max_response_length=2128 and at most the 1024 positions",
        ),
        (
            f"{ROLLOUT}.max_model_len=10",
            "max_model_len=10 is not usable: it has to be at least data.max_prompt",
        ),
        (f"{MODEL}/no_tokenizer", "its tokenizer has 1 tokens and the end token '<|endoftext|>': give the model's"),
        (f"{MODEL}/truncated", "truncated is not usable: Error while deserializing header"),
        (f"{MODEL}/headless", "1 of the 27 tensors are missing (lm_head.weight is one)"),
    ],
)
def test_a_mistake_is_named_once(override, message, failures):
    (said,) = failures(override)
    assert message in said and "\n" not in said


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([], None),
        (
            [f"{ACTOR}.clip_ratio_high=0.28"],
            "clip_ratio_high=0.28 has no effect: loss_mode=bapo reads ratio_lower_* and",
        ),
        (
            [f"{ACTOR}.grad_clip=0.5"],
            "actor.grad_clip=0.5 has no effect: verl's engines read actor_rollout_ref.actor.optim",
        ),
        (
            ["trainer.resume_from_path=/a/global_step_5"],
            "global_step_5 has no effect: it is read with trainer.resume_mode",
        ),
        ([f"{ROLLOUT}.n=1"], "rollout.n=1 with algorithm.adv_estimator=grpo leaves no other response"),
        (
            [f"{ACTOR}.policy_loss.ratio_lower_start=0.2", f"{ACTOR}.policy_loss.ratio_lower_max=0.28"],
            "ratio_lower_max=0.28 is a bound on the ratio, and a ratio of 1 means no change. If you meant an epsilon",
        ),
    ],
)
def test_what_was_hardly_meant_is_a_warning(task, overrides, said):
    config = composed(task, *overrides)
    if said is None:
        assert check_intent(config) == "every key that is set is read"
    else:
        with pytest.raises(CheckWarning) as warning:
            check_intent(config)
        assert said in str(warning.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["{long}", "data.filter_overlong_prompts=true"],
            "has no usable row: give some (data.train_max_samples), or raise data.max_prompt_length=",
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"],
            "actor.use_kl_loss=true and algorithm.use_kl_in_reward=true are not usable on a CPU",
        ),
        (
            [
                "trainer.n_gpus_per_node=32",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
            ],
            "on a CPU Ray has ray_kwargs.ray_init.num_gpus=16 slots: lower it",
        ),
        (["trainer.save_freq=1", "trainer.default_local_dir=/proc/nope"], "default_local_dir=/proc/nope is not usable"),
    ],
)
def test_a_mistake_by_two_values(overrides, message, failures):
    (said,) = failures(*(override.replace("{long}", "data.train_files={files}/long.parquet") for override in overrides))
    assert message in said


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("ratio_lower_max: 0.9", "ratio_lower_max:0.9", "column 7: a key needs a colon and a space before its value"),
        ("run_dir:", "watchdog: {}\nrun_dir:", "column 1: found duplicate key watchdog"),
        ("shuffle: false", "shuffle: nope", "shuffle='nope' is not usable: set it to true or false ("),
    ],
)
def test_a_slip_in_the_yaml_is_named_by_file_line_and_column(old, new, message, task, tmp_path, monkeypatch):
    from hydra import initialize_config_dir

    folder = tmp_path / "config"
    shutil.copytree(config_errors.OURS.parent, folder)
    path = folder / "bapo_trainer.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    compose = "recipe.bapo.config.initialize_config_module"
    monkeypatch.setattr(compose, lambda name, version_base: initialize_config_dir(str(folder), version_base=None))
    monkeypatch.setattr(config_errors, "OURS", path)
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    (line,) = run_preflight(["experiment=example", "size=cpu"], str(ROOT / "configs"))
    assert line.status == "failed" and message in line.detail and "bapo_trainer.yaml, line " in line.detail


@pytest.mark.parametrize(
    "override, missing, meant",
    [
        ("trainer.totl_epochs=3", "trainer.totl_epochs", "trainer.total_epochs"),
        ("rollout.max_num_seqs=64", "rollout", "actor_rollout_ref.rollout.max_num_seqs"),
    ],
)
def test_an_override_of_a_key_that_is_not_there_names_the_one_that_was_meant(override, missing, meant):
    (line,) = run_preflight([override], None)
    assert line.detail == f"{override} is not usable: the config has no key {missing}: use {meant}."


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([], "against the policy before the updates of each step"),
        (["algorithm.rollout_correction.bypass_mode=true"], "against the policy that sampled"),
        (["trainer.v1.trainer_mode=colocate_async"], "rollout_correction.bypass_mode=false in an asynchronous mode"),
    ],
)
def test_against_which_policy_the_ratio_is(task, overrides, said):
    try:
        found = check_ratio(composed(task, *overrides))
    except CheckWarning as warning:
        assert said in str(warning) and not said.startswith("against")
    else:
        assert found == said


def test_verls_trainer_says_what_devices_of_their_own_for_sampling_ask_of_a_config(task):
    separate = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"]
    sizes = [f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=16"]
    steps = "trainer.v1.separate_async.parameter_sync_step="
    assert check_names(composed(task, *separate, *sizes, f"{steps}2")) == "grpo, vllm, separate_async"
    with pytest.raises(
        ValueError, match="train_batch_size must equal parameter_sync_step . ppo_mini_batch_size in sep"
    ):
        check_names(composed(task, *separate, *sizes, f"{steps}4"))


def test_the_staleness_counts_the_epochs(task):
    sizes = ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=3")
    assert "staleness 12 (updates on each batch)" in check_batches(composed(task, *sizes))


@pytest.mark.parametrize(
    "override",
    [
        "+reward.custom_reward_function.reward_kwargs.penalty=1",
        "algorithm.rollout_correction.rollout_is_threshold='0.5_5.0'",
        "algorithm.rollout_correction=null",
    ],
)
def test_what_verl_reads_without_listing_it_passes(override, task):
    config = composed(task, override)
    assert config_errors.problems(config) == []
    assert check_values(config) and check_batches(config) and check_ratio(config)


def test_the_groups_may_lie_in_a_folder_of_any_name(tmp_path, task, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    groups = shutil.copytree(ROOT / "configs", tmp_path / "a (copy), of mine" / "configs")
    (groups / "size" / "broken.yaml").write_text("a: {")  # a broken file that is not selected changes nothing
    config = compose_config(["experiment=example", "size=cpu", "+nope=1"], groups)
    assert config_errors.problems(config)[0].startswith("nope=1 is not usable: the config has no key nope")
