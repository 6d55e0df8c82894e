# SPDX-License-Identifier: Apache-2.0
"""Preflight reports a mistake in a config in one line with the field, the value and the fix, before Ray starts."""

import io
import json
import os
import shutil

import pandas as pd
import pytest
from support.configs import ROOT, composed

import verl  # noqa: F401  loads the plugin
from recipe.bapo.config import compose_config
from recipe.bapo.run.preflight import CheckWarning, keys, stages
from recipe.bapo.run.preflight.rules import check_rules
from recipe.bapo.run.preflight.stages import check_verls_config, run_preflight, run_stages

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path={files}"
BYPASS = f"algorithm.rollout_correction.bypass_mode=true {ACTOR}.calculate_entropy=true"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=8 "
    f"{ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"
)


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
    return folder


@pytest.fixture(scope="module")
def failures(task, files):
    """Return a function: preflight's failures for the example with overrides."""

    def failures_of(*overrides):
        config = composed(task, *(one.format(files=files) for override in overrides for one in override.split(" ")))
        lines = run_stages(config)
        return [line.detail for line in lines if line.status == "failed"]

    return failures_of


@pytest.mark.parametrize(
    "override, message",
    [
        # Types and unknown keys.
        (f"{ACTOR}.ppo_epochs='2'", f"{ACTOR}.ppo_epochs='2' is not usable: input should be a valid integer"),
        (f"+{ACTOR}.policy_loss.clip_lw=1", "policy_loss.clip_lw: remove it"),
        ("+watchdog.max_silence=3", "no key watchdog.max_silence: use watchdog.max_silence_s"),
        ("data.val_files=null", "data.val_files=None is not usable"),
        # Rules.
        (f"{ACTOR}.ppo_epochs=0", f"{ACTOR}.ppo_epochs=0 is not usable: set it to a whole number of 1 or more"),
        ("data.train_batch_size=null", "data.train_batch_size=None is not usable"),
        (f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.lr=0 trains nothing"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0 trains nothing"),
        (f"{ACTOR}.clip_ratio_c=1.0", "actor.clip_ratio_c=1.0 is not usable: it is the dual clip's"),
        ("trainer.save_freq=often", "trainer.save_freq='often' is not usable: input should be a valid number"),
        (f"{ACTOR}.optim.clip_grad=0", f"{ACTOR}.optim.clip_grad=0 makes every gradient 0"),
        ("watchdog.max_sync_s=.nan", "each limit is a number of seconds above 0"),
        ("data.train_batch_size=60", "ppo_mini_batch_size=8 does not divide data.train_batch_size=60"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "ppo_micro_batch_size_per_gpu=5 does not divide"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=7", "_size_per_gpu=7 does not divide a rank's 512 responses"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae needs a critic, which verl loads with flash"),
        ("ray_kwargs.ray_init.num_cpus=4", "Ray is asked for 5 CPUs (1 for the transfer queue's controller, 1 for its"),
        # What verl gets wrong in silence, and options that would have no effect.
        (f"{ROLLOUT}.top_p=0.7 {BYPASS}", f"{ROLLOUT}.top_p=0.7, top_k=-1 is not usable with bypass_mode=true"),
        (f"{ROLLOUT}.top_k=20 {BYPASS}", f"{ROLLOUT}.top_p=1, top_k=20 is not usable with bypass_mode=true"),
        (
            f"{SEPARATE} algorithm.rollout_correction.bypass_mode=false",
            "separate_async without algorithm.rollout_correction.bypass_mode is not usable with strategy=fsdp2 on",
        ),
        (
            f"algorithm.rollout_correction.rollout_is=token {ROLLOUT}.calculate_log_probs=false",
            "rollout_correction.rollout_is=token has no effect without",
        ),
        ("trainer.val_only=true trainer.val_before_train=false", "trainer.val_only=true has no effect with"),
        ("trainer.critic_warmup=1000", "trainer.critic_warmup=1000 without a critic keeps the actor from training"),
        # What verl, vLLM, transformers and wandb refuse themselves.
        (
            f"{ACTOR}.strategy=ddp",
            f"{ACTOR}.strategy=ddp is not usable with loss_mode=bapo: set it to fsdp, fsdp2 or megatron",
        ),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator=GRPO is not usable: Unknown advantage estimator"),
        ("algorithm.adv_estimator=remax", "argument: 'reward_baselines'; use grpo, or another"),
        ("algorithm.adv_estimator=gdpo", "algorithm.adv_estimator=gdpo is not usable"),
        ("trainer.logger=[console,nope]", "trainer.logger=nope is not usable: verl logs to wandb, mlflow"),
        ("trainer.logger=wandb", "trainer.logger=wandb is not usable: UsageError: No API key configured"),
        ("trainer.v1.trainer_mode=async", "trainer.v1.trainer_mode=async is not usable: Unknown trainer"),
        (f"{ACTOR}.policy_loss.positive_contribution_target=40", "positive_contribution_target=40 is not usable"),
        (f"{ACTOR}.loss_agg_mode=token_mean", f"{ACTOR} is not usable: "),
        (f"{ROLLOUT}.log_prob_micro_batch_size=8", "Please remove 'actor_rollout_ref.rollout.log_prob"),
        # Files.
        ("trainer.rollout_data_dir=/proc/nope", "trainer.rollout_data_dir=/proc/nope is not usable: FileNotFoundErr"),
        # Reward and data.
        ("data.train_max_samples=10", "has 10 usable rows, and a batch is data.train_batch_size=64"),
        ("reward.custom_reward_function.path=/no/such.py", "custom_reward_function=/no/such.py, name="),
        ("reward.reward_manager.name=nope", "reward.reward_manager=nope is not usable"),
        ("data.train_files={files}/truncated.parquet", "truncated.parquet is not usable: "),
        ("data.train_files={files}/long.parquet", "has 70 prompts of more tokens than data.max_prompt_length=128"),
        # The model.
        ("data.max_response_length=2000", "data.max_response_length=2128 and at most the 1024 positions"),
        (f"{ROLLOUT}.max_model_len=10", "max_model_len=10 is not usable: it has to be at least data.max_prompt"),
        (f"{MODEL}/no_tokenizer", "its tokenizer has 1 tokens and the end token '<|endoftext|>': give the model's"),
        (f"{MODEL}/truncated", "truncated is not usable: SafetensorError: Error while deserializing header"),
        (f"{MODEL}/headless", "1 of the 27 tensors are missing (lm_head.weight is one)"),
    ],
)
def test_a_mistake_is_named_once(override, message, failures, monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", os.devnull)  # wandb finds no key
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # and asks for none, where pytest -s leaves it a terminal
    (said,) = failures(override)
    assert message in said and "\n" not in said


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([f"{ACTOR}.clip_ratio_high=0.28"], "clip_ratio_high of actor_rollout_ref.actor have no effect"),
        (
            [f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"],
            "rollout.n=1 with algorithm.adv_estimator=grpo leaves no other response",
        ),
        (
            [f"{ACTOR}.policy_loss.ratio_lower_start=0.2", f"{ACTOR}.policy_loss.ratio_lower_max=0.28"],
            "ratio_lower_max=0.28 is a bound on the ratio, and a ratio of 1 means no change. If you meant an epsilon",
        ),
        (["trainer.v1.trainer_mode=colocate_async"], "rollout_correction.bypass_mode=false in an asynchronous mode"),
    ],
)
def test_what_was_hardly_meant_is_a_warning(task, overrides, said):
    with pytest.raises(CheckWarning) as warning:
        check_rules(composed(task, *overrides))
    assert said in str(warning.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["{long}", "data.filter_overlong_prompts=true"],
            "has no usable row: give some (data.train_max_samples), or raise data.max_prompt_length=",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true", f"{ROLLOUT}.calculate_log_probs=false"],
            "bypass_mode=true needs the log-probs of the rollout engine: set",
        ),
        (["trainer.save_freq=1", "trainer.default_local_dir=/proc/nope"], "default_local_dir=/proc/nope is not usable"),
        (["trainer.save_freq=1", f"{ACTOR}.checkpoint.save_contents=[modle]"], "save_contents=['modle'] is not usable"),
        (
            ["data.train_batch_size=60", f"{ACTOR}.optim.lr=0"],
            "set it to a number above 0.",
        ),
    ],
)
def test_a_mistake_by_two_values(overrides, message, failures):
    (said,) = failures(*(override.replace("{long}", "data.train_files={files}/long.parquet") for override in overrides))
    assert message in said


def test_a_slip_in_a_yaml_file_is_named_by_file_and_line(task, tmp_path, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open(tmp_path / "configs" / "size" / "cpu.yaml", "a") as file:
        file.write("rollout:\n  n:8\n  m: 3\n")
    (line,) = run_preflight(["experiment=example", "size=cpu"], str(tmp_path / "configs"))
    assert line.status == "failed" and "mapping values are not allowed here" in line.detail
    assert "/configs/size/cpu.yaml" in line.detail and "line " in line.detail and "\n" not in line.detail


@pytest.mark.parametrize(
    "override, missing, meant",
    [
        ("trainer.totl_epochs=3", "trainer.totl_epochs", "trainer.total_epochs"),
        ("actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_an_unknown_key_on_the_command_line_gets_the_nearest(override, missing, meant):
    (line,) = run_preflight([override], None)
    assert line.detail == f"{missing} is not usable: the config has no key {missing}: use {meant}."


@pytest.mark.parametrize(
    "override, said",
    [
        ("data.apply_chat_template_kwargs.enable_thinking=false", "use +data.apply_chat_template_kwargs.enable_thi"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "use +actor_rollout_ref.rollout.engine_kwargs.vllm"),
        ("run_dir=${oops}", "run_dir cannot be resolved: Interpolation key 'oops' not found"),
        ("run_dir=a(b", "run_dir=a(b: no viable alternative at input 'a(b'"),
    ],
)
def test_elsewhere_hydras_answer_is_shown(override, said):
    (line,) = run_preflight([override], None)
    assert said in line.detail and "\n" not in line.detail


def test_against_which_policy_the_ratio_is(task):
    assert check_rules(composed(task)).endswith("against the policy before the updates of each step")
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    assert check_rules(composed(task, bypass)).endswith("against the policy that sampled")


def test_verls_trainer_says_what_devices_of_their_own_for_sampling_ask_of_a_config(task):
    separate = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"]
    sizes = [f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=16"]
    steps = "trainer.v1.separate_async.parameter_sync_step="
    assert check_verls_config(composed(task, *separate, *sizes, f"{steps}2"))
    with pytest.raises(
        ValueError, match="train_batch_size must equal parameter_sync_step . ppo_mini_batch_size in sep"
    ):
        check_verls_config(composed(task, *separate, *sizes, f"{steps}4"))


def test_the_updates_on_a_batch_count_the_epochs(task):
    sizes = ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=3")
    assert "12 updates on each batch" in check_rules(composed(task, *sizes, f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"))


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
    assert keys.unusable_keys(config) == []
    assert check_verls_config(config) and check_rules(config)


def test_the_groups_may_lie_in_a_folder_of_any_name(tmp_path, task, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    groups = shutil.copytree(ROOT / "configs", tmp_path / "a (copy), of mine" / "configs")
    (groups / "size" / "broken.yaml").write_text("a: {")  # a broken file that is not selected changes nothing
    config = compose_config(["experiment=example", "size=cpu", "+nope=1"], groups)
    assert keys.unusable_keys(config)[0].startswith("nope=1 is not usable: the config has no key nope")


@pytest.mark.parametrize(
    "given, used", [("console", ["console", "file"]), (["file"], ["file"]), (None, ["file"]), ("file", ["file"])]
)
def test_the_file_logger_is_added_to_what_the_user_named(task, given, used, monkeypatch):
    monkeypatch.setattr(stages, "STAGES", (("loggers", stages.check_loggers, ()),))
    config = composed(task)
    config.trainer.logger = given
    (line,) = run_stages(config)
    assert line.status == "ok" and list(config.trainer.logger) == used
