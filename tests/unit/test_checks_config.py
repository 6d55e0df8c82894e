# SPDX-License-Identifier: Apache-2.0
"""What people mistype is said in one line with the field, the value and the fix, before Ray starts."""

import json
import shutil

import pandas as pd
import pytest
from support.configs import ROOT, composed

import verl  # noqa: F401  loads the plugin
from recipe.bapo.checks import Concern, composing, table
from recipe.bapo.checks.__main__ import lines_of
from recipe.bapo.checks.config import check_batches, check_loss, check_ratio, check_trainer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path={files}"


@pytest.fixture(scope="module")
def files(task, tmp_path_factory):
    """Unusable inputs by name."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("no_tokenizer", "truncated", "no_weights", "template"):
        shutil.copytree(task / "model", folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "no_tokenizer" / name).unlink()
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (folder / "no_weights" / "model.safetensors").unlink()
    (folder / "template" / "chat_template.jinja").write_text("{% for x in %}")
    shutil.copytree(task / "model", folder / "other_shapes")
    config = json.loads((task / "model" / "config.json").read_text())
    (folder / "other_shapes" / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    row = {"prompt": [{"role": "user", "content": "9" * 300}], "reward_model": {"style": "rule", "ground_truth": "3"}}
    pd.DataFrame([{"data_source": "nobody/knows", **row}] * 70).to_parquet(folder / "long.parquet")
    pd.DataFrame({"data_source": [], "prompt": [], "reward_model": []}).to_parquet(folder / "empty.parquet")
    (folder / "data.txt").write_text("no parquet")
    (folder / "truncated.parquet").write_bytes(b"PAR1 and no more")
    (folder / "dump").mkdir()
    (folder / "dump" / "rank0-000000.safetensors").write_bytes(b"an earlier one")
    return folder


@pytest.fixture(scope="module")
def failures(task, files):
    """What table.run says of the example with these overrides, leaving out this machine's own lines."""

    def of(*overrides):
        config = composed(task, *(override.format(files=files) for override in overrides))
        lines = table.run(config, ROOT / "configs")
        return [line.detail for line in lines if line.status == "failed" and line.name != "other runs"]

    return of


@pytest.mark.parametrize(
    "override, message",
    [
        (f"{ACTOR}.ppo_epochs=0", f"{ACTOR}.ppo_epochs=0 is not usable: set it to a whole number of 1 or more"),
        (f"{ACTOR}.ppo_epochs='2'", f"{ACTOR}.ppo_epochs='2' is not usable: set it to a whole number"),
        (f"{ACTOR}.ppo_epochs=true", f"{ACTOR}.ppo_epochs=True is not usable: set it to a whole number"),
        (f"{ACTOR}.optim.lr=fast", f"{ACTOR}.optim.lr='fast' is not usable: set it to a number"),
        (f"{ACTOR}.optim.lr=-1", f"{ACTOR}.optim.lr=-1 is not usable: set it to a number above 0"),
        (f"{ACTOR}.clip_ratio_c=1.0", f"{ACTOR}.clip_ratio_c=1.0 is not usable: set it to a number above 1"),
        (f"{ACTOR}.strategy=ddp", f"{ACTOR}.strategy=ddp is not usable: set it to fsdp or fsdp2"),
        (f"{ACTOR}.policy_loss.positive_contribution_target=40", "positive_contribution_target=40 is not usable"),
        (f"{ACTOR}.policy_loss._target_=verl.workers.config.PolicyLossConfig", "set it to recipe.bapo.policy_loss"),
        (f"+{ACTOR}.policy_loss.clip_lw=1", "policy_loss.clip_lw: use actor_rollout_ref.actor.policy_loss.clip_cov_lb"),
        (f"{ACTOR}.policy_loss.token_dump_dir={{files}}/dump", "/dump holds an earlier dump: remove it"),
        (f"{ACTOR}.policy_loss.token_dump_dir={{files}}/data.txt", "/data.txt cannot be written: Not a directory"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "ppo_micro_batch_size_per_gpu=5 does not divide"),
        ("algorithm.rollout_correction.bypass_mode='yes'", "bypass_mode='yes' is not usable: set it to true or false"),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator=GRPO is not usable: set it to grpo, or one of"),
        ("algorithm.adv_estimator=gae", "gae is not usable: set it to grpo: gae needs a critic"),
        (f"{ROLLOUT}.name=vllmm", f"{ROLLOUT}.name=vllmm is not usable: Unknown rollout mode: vllmm"),
        (f"{ROLLOUT}.gpu_memory_utilization=5", "gpu_memory_utilization=5 is not usable: set it to a share above 0"),
        (f"{ROLLOUT}.max_model_len=10", "max_model_len=10 is less than data.max_prompt_length=128 + data.max_resp"),
        (f"{ROLLOUT}.max_model_len=9999", "max_model_len=9999 is more than the 1024 positions of"),
        (f"{ROLLOUT}.log_prob_micro_batch_size=8", "Please remove 'actor_rollout_ref.rollout.log_prob"),
        (
            "actor_rollout_ref.model.external_lib=nope.mod",
            "external_lib=nope.mod is not usable: No module named 'nope'",
        ),
        ("reward.custom_reward_function.path=/no/such.py", "custom_reward_function.path=/no/such.py and name="),
        ("reward.custom_reward_function.name=nope", "name=nope is not usable: Object not found"),
        ("custom_reward_function.path=/no/such.py", "verl's V1 trainer does not read it; set reward.custom"),
        ("reward.reward_manager.name=nope", "reward.reward_manager.name=nope is not usable"),
        ("trainer.use_v1=false", "trainer.use_v1=False is not usable"),
        ("trainer.logger=[console]", "trainer.logger=['console'] is not usable: set it to a list with file"),
        ("trainer.logger=[file,nonsense]", "nonsense is not there; use some of wandb"),
        ("trainer.v1.trainer_mode=async", "trainer.v1.trainer_mode=async is not usable: Unknown trainer"),
        ("trainer.total_training_steps=ten", "trainer.total_training_steps=ten is not usable: set it to a whole num"),
        ("trainer.total_epochs=0", "trainer.total_epochs=0 is not usable"),
        ("+trainer.sampler.poll_interval=1", "no key trainer.sampler: use trainer.v1.sampler"),
        ("run_dir=null", "run_dir (OUTPUT_DIR)=None is not usable: name a folder"),
        ("run_dir=/proc/nope", "run_dir (OUTPUT_DIR)=/proc/nope cannot be written"),
        ("+watchdog.max_silence=3", "no key watchdog.max_silence: use watchdog.max_silence_s"),
        ("watchdog.max_silence_s=soon", "watchdog.max_silence_s=soon is not usable: set it to a number of seconds"),
        ("watchdog.grace_s=null", "watchdog.grace_s=None is not usable"),
        ("data.shuffle=nope", "data.shuffle='nope' is not usable: set it to true or false"),
        ("data.truncation=middlle", "data.truncation=middlle is not usable: set it to error or left"),
        ("data.train_batch_size=15", "ppo_mini_batch_size=8 does not divide data.train_batch_size=15"),
        ("data.train_batch_size=2168", "has 2160 usable rows, and a batch is data.train_batch_size=2168"),
        ("data.val_files=null", "data.val_files is not set"),
        ("data.val_files={files}", "is a folder: give a parquet file"),
        ("data.val_files={files}/data.txt", "verl reads files named .parquet, .json or .jsonl"),
        ("data.val_files={files}/empty.parquet", "has no rows"),
        ("data.train_files={files}/truncated.parquet", "is not a readable parquet file"),
        ("data.train_files={files}/long.parquet", "row 0: the prompt has 30"),
        (f"{MODEL}/no_tokenizer", "its tokenizer has 1 tokens: give the model's tokenizer files"),
        (f"{MODEL}/truncated", "truncated: model.safetensors is not a whole safetensors file"),
        (f"{MODEL}/no_weights", "no_weights has no weights"),
        (f"{MODEL}/other_shapes", "and config.json asks for (64, 7): give weights and config.json of the same model"),
        (f"{MODEL}/template", "its tokenizer or chat template cannot be used: Expected an expression"),
        (f"{MODEL}/nothing", "nothing is not a folder"),
    ],
)
def test_a_mistake_is_named_once(override, message, failures):
    (said,) = failures(override)
    assert message in said and "\n" not in said


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.filter_overlong_prompts=true"], "has 0 usable rows, and a batch is data.train_batch_size=64"),
        (
            ["data.truncation=left", "reward.custom_reward_function.path=null"],
            "verl has no scorer for data_source=nobody/knows",
        ),
    ],
)
def test_rows_that_cannot_be_used_or_scored(overrides, message, failures):
    (said,) = failures("data.train_files={files}/long.parquet", *overrides)
    assert message in said


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "      ratio_lower_max: 0.9",
            "        ratio_lower_max: 0.9",
            "column 24: mapping values are not allowed here",
        ),
        (
            "      ratio_lower_max: 0.9",
            "\tratio_lower_max: 0.9",
            "column 1: found character '\\t' that cannot start any",
        ),
        ("ratio_lower_max: 0.9", "ratio_lower_max:0.9", "column 7: a key needs a colon and a space before its value"),
        ("run_dir:", "watchdog: {}\nrun_dir:", "column 1: found duplicate key watchdog"),
        ("    policy_loss:", "    ratio_lower_mx: 1\n    policy_loss:", "column 5)"),
        ("shuffle: false", "shuffle: nope", "shuffle='nope' is not usable: set it to true or false ("),
    ],
)
def test_a_slip_in_the_yaml_is_named_by_file_line_and_column(old, new, message, task, tmp_path, monkeypatch):
    folder = tmp_path / "config"
    shutil.copytree(composing.OURS, folder)
    path = folder / "bapo_trainer.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    compose = "recipe.bapo.config.initialize_config_module"
    monkeypatch.setattr(compose, lambda name, version_base: composing_dir(folder))
    monkeypatch.setattr(composing, "OURS", folder)
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    (line,) = lines_of(["experiment=example", "size=cpu"], str(ROOT / "configs"))
    assert line.status == "failed" and message in line.detail and "bapo_trainer.yaml, line " in line.detail


def composing_dir(folder):
    from hydra import initialize_config_dir

    return initialize_config_dir(str(folder), version_base=None)


def test_an_override_of_a_key_that_is_not_there_names_the_nearest():
    (line,) = lines_of(["trainer.totl_epochs=3"], None)
    assert line.detail == (
        "trainer.totl_epochs=3 is not usable: the config has no key trainer.totl_epochs: use trainer.total_epochs."
    )


def test_an_asynchronous_mode_without_bypass_is_warned_about(task):
    with pytest.raises(Concern, match="algorithm.rollout_correction.bypass_mode=false in an asynchronous mode"):
        check_ratio(composed(task, "trainer.v1.trainer_mode=colocate_async"))


@pytest.mark.parametrize("ranks, micro, refused", [(1, 64, False), (1, 32, True), (2, 64, True)])
def test_the_padded_width_may_divide_where_one_micro_batch_on_one_rank_is_all(task, ranks, micro, refused):
    config = composed(
        task,
        f"trainer.n_gpus_per_node={ranks}",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ROLLOUT}.n=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}",
    )
    if not refused:
        check_loss(config)
        return
    with pytest.raises(ValueError, match="loss_scale_factor"):
        check_loss(config)


def test_a_warning_where_nothing_bounds_negative_tokens_against_the_sampler(task):
    bypass, off = "algorithm.rollout_correction.bypass_mode=true", f"{ACTOR}.clip_ratio_c=1e9"
    with pytest.raises(
        Concern, match=r"clip_ratio_c=1e\+09 is no dual clip, and the ratio is against the policy that samp"
    ):
        check_ratio(composed(task, bypass, off))
    assert check_ratio(composed(task, bypass)) == "against the policy that sampled"
    assert check_ratio(composed(task, off)) == "against the policy before the updates of each step"


def test_a_warning_where_bypass_mode_leaves_a_correction_without_effect(task):
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    for key, value in (("rollout_is", "token"), ("rollout_rs", "token_k1")):
        with pytest.raises(Concern, match=f"rollout_correction.{key}={value} has no effect with bypass_mode=true"):
            check_ratio(composed(task, bypass, f"algorithm.rollout_correction.{key}={value}"))
    check_ratio(composed(task, "algorithm.rollout_correction.rollout_is=token"))


def test_verls_trainer_says_what_devices_of_their_own_for_sampling_ask_of_a_config(task):
    separate = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"]
    sizes = [f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=16"]
    steps = "trainer.v1.separate_async.parameter_sync_step="
    assert check_trainer(composed(task, *separate, *sizes, f"{steps}2")) == "separate_async"
    with pytest.raises(
        ValueError, match="train_batch_size must equal parameter_sync_step . ppo_mini_batch_size in sep"
    ):
        check_trainer(composed(task, *separate, *sizes, f"{steps}4"))


def test_the_staleness_counts_the_epochs(task):
    sizes = ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=3")
    assert "staleness 12 (updates on each batch)" in check_batches(composed(task, *sizes))
