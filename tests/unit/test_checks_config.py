# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said in a few lines, with the field, the value and the fix, before Ray starts."""

import re

import pandas as pd
import pytest
from support.configs import composed

import verl  # noqa: F401  loads the plugin
from recipe.bapo.checks import Concern, table
from recipe.bapo.checks.config import check_batches, check_loss, check_ratio, check_trainer

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Unusable inputs by name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{")
    (folder / "truncated.parquet").write_bytes(b"PAR1 and no more")
    pd.DataFrame({"prompt": ["x"]}).to_parquet(folder / "columns.parquet")
    pd.DataFrame({"data_source": [], "prompt": [], "reward_model": []}).to_parquet(folder / "empty.parquet")
    (folder / "dump").mkdir()
    (folder / "dump" / "rank0-000000.safetensors").write_bytes(b"an earlier one")
    return folder


# Those that look at the config and what it reads, not at this machine.
CHECKS = [function for name, function in table.CHECKS if not function.__module__.endswith(("machine", "other_runs"))]


def check(config):
    """What the checks say, in order, up to the first that fails or warns: both raise."""
    return [function(config) for function in CHECKS]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """The device that the checks of verl's config ask for."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def test_the_example_passes_without_a_warning(task):
    said = " | ".join(check(composed(task)))
    for text in ("fsdp2", "c_low [0.6, 0.9], c_high [1.2, 3], target 0.4", "64 prompts of 8 responses, staleness 8"):
        assert text in said


@pytest.mark.parametrize(
    "override, message",
    [
        (f"{ACTOR}.policy_loss.positive_contribution_target=40", "positive_contribution_target=40 is not usable"),
        (f"{ACTOR}.policy_loss.loss_mode=vanilla", "loss_mode='vanilla' is not usable"),
        ("trainer.use_v1=false", "trainer.use_v1=False is not usable"),
        (f"{ACTOR}.strategy=veomni", f"{ACTOR}.strategy=veomni is not usable"),
        (f"{ACTOR}.strategy=ddp", f"{ACTOR}.strategy=ddp is not usable: set it to fsdp or fsdp2"),
        (f"{ACTOR}.policy_loss._target_=verl.workers.config.PolicyLossConfig", "set it to recipe.bapo.policy_loss"),
        (f"{ACTOR}.policy_loss.token_dump_dir={{files}}/dump", "/dump holds an earlier dump: remove it"),
        ("trainer.logger=[console]", "trainer.logger=['console'] is not usable: set it to a list with file"),
        ("trainer.v1.trainer_mode=async", "trainer.v1.trainer_mode=async is not usable"),
        ("data.train_batch_size=15", "ppo_mini_batch_size=8 does not divide data.train_batch_size=15"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "ppo_micro_batch_size_per_gpu=5 does not divide"),
        ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=0 is not usable"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor"),
        (f"{ACTOR}.clip_ratio_c=1.0", f"{ACTOR}.clip_ratio_c=1.0 is not usable"),
        (f"{ACTOR}.clip_ratio_c=null", f"{ACTOR}.clip_ratio_c=None is not usable"),
        (f"{ACTOR}.ppo_mini_batch_size=null", "ppo_mini_batch_size=None is not usable"),
        ("data.val_files=null", "data.val_files is not set"),
        ("actor_rollout_ref.model.path=/no/such/model", "MODEL_PATH)=/no/such/model is not a folder"),
        ("actor_rollout_ref.model.path={files}/model", "cannot be read as a Hugging Face model"),
        ("actor_rollout_ref.rollout.max_model_len=9999", "max_model_len=9999 is more than the 1024 positions of"),
        ("watchdog.max_silence_s=soon", "watchdog.max_silence_s=soon is not usable: set it to a number of seconds"),
        ("watchdog.max_sync_s=0", "watchdog.max_sync_s=0 is not usable"),
        ("watchdog.grace_s=true", "watchdog.grace_s=True is not usable"),
        ("watchdog.grace_s=null", "watchdog.grace_s=None is not usable"),
        ("data.train_files=/no/such.parquet", "data.train_files=/no/such.parquet does not exist"),
        ("data.train_files={files}/truncated.parquet", "is not a readable parquet file"),
        ("data.val_files={files}/columns.parquet", "lacks the columns ['data_source', 'reward_model']"),
        ("data.val_files={files}/empty.parquet", "has no rows"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=8", "Please remove 'actor_rollout_ref.rollout.log_prob"),
    ],
)
def test_a_mistake_is_named(override, message, files, task):
    with pytest.raises(ValueError) as error:
        check(composed(task, override.format(files=files)))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


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
        "actor_rollout_ref.rollout.n=8",
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


SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "gloo",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    f"{ACTOR}.ppo_mini_batch_size": 8,
    "data.train_batch_size": 16,
}


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("actor_rollout_ref.rollout.nnodes", 0, "nnodes=0 is not usable: set it to 1 or more"),
        ("actor_rollout_ref.rollout.n_gpus_per_node", 0, "n_gpus_per_node=0 is not usable: set it to 1 or more"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "naive", "naive cannot send weights to other devices"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "pigeon", "pigeon"),
        ("data.train_batch_size", 8, "train_batch_size=8 is not usable: set it to trainer.v1.separate_async.param"),
        ("data.train_batch_size", 32, "parameter_sync_step * ppo_mini_batch_size = 16"),
    ],
)
def test_what_devices_of_their_own_for_sampling_ask_of_a_config(task, key, value, message):
    def check(settings):
        return check_trainer(composed(task, *(f"{name}={chosen}" for name, chosen in settings.items())))

    assert check(SEPARATE) == "separate_async"
    with pytest.raises(ValueError, match=re.escape(message)):
        check({**SEPARATE, key: value})


def test_the_staleness_counts_the_epochs(task):
    sizes = ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=3")
    assert "staleness 12 (updates on each batch)" in check_batches(composed(task, *sizes))
