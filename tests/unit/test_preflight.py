# SPDX-License-Identifier: Apache-2.0
"""Preflight reports a mistake in a config in one line with the field, the value and the fix, before Ray starts.

It refuses what verl refuses and what would go wrong without a word. Of everything else it warns.
"""

import json
import shutil
from contextlib import nullcontext

import pandas as pd
import pytest
from omegaconf import OmegaConf
from support.configs import ROOT, composed, few_rows

import verl  # noqa: F401  loads the plugin
from recipe.bapo import main_bapo
from recipe.bapo.config import compose_config, prepare
from recipe.bapo.preflight import keys, stages
from recipe.bapo.preflight.stages import check_verls_config, run_preflight, run_stages
from recipe.bapo.run import train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path={files}"
BYPASS = f"algorithm.rollout_correction.bypass_mode=true {ACTOR}.calculate_entropy=true"
VANILLA = f"{ACTOR}.policy_loss.loss_mode=vanilla {ACTOR}.policy_loss._target_=recipe.bapo.policy_loss.MonitorConfig"
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
def said(task, files):
    """Return a function: what preflight says of the example with overrides, as lists ``failed`` and ``warning``."""

    def lines_of(*overrides):
        overrides = [one.format(files=files) for override in overrides for one in override.split(" ")]
        config = composed(task, *few_rows(task), *overrides)
        prepare(config)
        lines = run_stages(config, overrides)
        return [[line.detail for line in lines if line.status == status] for status in ("failed", "warning")]

    return lines_of


@pytest.mark.parametrize(
    "row",
    [
        # Text for true or false, and numbers.
        (
            "trainer.val_only='false'",
            "trainer.val_only='false': verl takes any text for true",
            "trainer.val_only=false",
        ),
        (
            f"{ACTOR}.ppo_epochs=0",
            f"{ACTOR}.ppo_epochs=0: set it to a whole number of 1 or more",
            f"{ACTOR}.ppo_epochs=1",
        ),
        (f"{ACTOR}.ppo_epochs='2'", f"{ACTOR}.ppo_epochs='2': set it to a whole number of 1 or more"),
        ("data.train_batch_size=null", "data.train_batch_size=None"),
        # What verl gets wrong in silence, and options that would have no effect.
        (
            f"{ACTOR}.optim.clip_grad=0",
            f"{ACTOR}.optim.clip_grad=0: 0 makes every gradient 0, and a neg",
            f"{ACTOR}.optim.clip_grad=1.0",
        ),
        (f"{ACTOR}.optim.clip_grad=-1", f"{ACTOR}.optim.clip_grad=-1"),
        (f"{ROLLOUT}.top_p=0.7 {BYPASS}", f"{ROLLOUT}.top_p=0.7, top_k=-1 with bypass_mode=true", f"{ROLLOUT}.top_p=1"),
        (
            f"{ROLLOUT}.top_k=20 {BYPASS}",
            f"{ROLLOUT}.top_p=1, top_k=20 with bypass_mode=true",
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        (
            f"{SEPARATE} algorithm.rollout_correction.bypass_mode=false",
            "separate_async without algorithm.rollout_correction.bypass_mode with strategy=fsdp2 on",
            "algorithm.rollout_correction.bypass_mode=true",
        ),
        (
            f"algorithm.rollout_correction.rollout_is=token {ROLLOUT}.calculate_log_probs=false",
            "rollout_is and rollout_rs of algorithm.rollout_correction have no effect without",
            "algorithm.rollout_correction.rollout_is=null",
            f"{ROLLOUT}.calculate_log_probs=true",
        ),
        (
            f"algorithm.rollout_correction.rollout_rs=token_k1 {ROLLOUT}.calculate_log_probs=false",
            "rollout_is and rollout_rs of algorithm.rollout_correction have no effect without",
        ),
        (f"algorithm.rollout_correction.rollout_rs=token_k1 {BYPASS}", "rollout_rs and loss_type of algorithm.rollout"),
        (
            f"algorithm.rollout_correction.loss_type=reinforce {BYPASS}",
            "have no effect with bypass_mode=true",
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        (
            "trainer.val_only=true trainer.val_before_train=false",
            "trainer.val_only=true has no effect with",
            "trainer.val_before_train=true",
        ),
        (
            f"trainer.nnodes=2 trainer.n_gpus_per_node=1 {ACTOR}.strategy=fsdp {ACTOR}.fsdp_config.fsdp_size=1",
            "fsdp_config.fsdp_size=1 on 2 GPUs with strategy=fsdp",
            f"{ACTOR}.fsdp_config.fsdp_size=-1",
        ),
        (
            "trainer.critic_warmup=1000",
            "trainer.critic_warmup=1000 without a critic keeps the actor from training",
            "trainer.critic_warmup=0",
        ),
        ("trainer.use_v1=false", "trainer.use_v1=false has no effect in recipe.bapo.main_bapo", "trainer.use_v1=true"),
        ("watchdog.max_sync_s=nan", "each limit is a number of seconds above 0"),
        ("watchdog.min_arrived=1.5", "watchdog.min_arrived=1.5: it is a share between 0 and 1"),
        # What would wait for ever, or lose data.
        (
            "ray_kwargs.ray_init.num_cpus=4",
            "Ray is asked for 5 CPUs (1 for the transfer queue's controller, 1 for its",
            "ray_kwargs.ray_init.num_cpus=5",
        ),
        (
            f"trainer.save_freq=1 {ACTOR}.checkpoint.save_contents=[modle]",
            "save_contents=['modle']",
            f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
        ),
        ("trainer.rollout_data_dir=/proc/nope", "trainer.rollout_data_dir=/proc/nope: FileNotFoundErr"),
        ("trainer.save_freq=1 trainer.default_local_dir=/proc/nope", "default_local_dir=/proc/nope"),
        ("run_dir=/proc/nope", "run_dir (OUTPUT_DIR)=/proc/nope: FileNotFoundError"),
        # What verl and BAPO's loss refuse themselves.
        (f"{ACTOR}.clip_ratio_c=1.0", "actor.clip_ratio_c=1.0: it is the dual clip's", f"{ACTOR}.clip_ratio_c=3.0"),
        (
            f"{ACTOR}.strategy=ddp",
            f"{ACTOR}.strategy=ddp with loss_mode=bapo: set it to fsdp, fsdp2 or megatron",
            f"{ACTOR}.strategy=fsdp",
        ),
        ("trainer.v1.trainer_mode=async", "trainer.v1.trainer_mode=async: Unknown trainer"),
        (f"{ACTOR}.policy_loss.positive_contribution_target=40", "positive_contribution_target=40"),
        (f"+{ACTOR}.policy_loss.clip_lw=1", "unexpected keyword argument 'clip_lw'"),
        (f"{ACTOR}.loss_agg_mode=token_mean", f"{ACTOR}: "),
        (
            f"{ACTOR}.optim.lr_scheduler_type=linear",
            'AssertionError: assert self.lr_scheduler_type in ["constant", "co',
        ),
        (f"{ROLLOUT}.log_prob_micro_batch_size=8", "Please remove 'actor_rollout_ref.rollout.log_prob"),
        # Reward and data.
        ("reward.custom_reward_function.path=/no/such.py", "custom_reward_function=/no/such.py, name="),
        ("reward.reward_manager.name=nope", "reward.reward_manager=nope"),
        ("data.val_files=null", "data.val_files=None"),
        ("data.train_files={files}/truncated.parquet", "truncated.parquet: "),
        (
            "data.train_files={files}/long.parquet",
            "has 70 prompts of more tokens than data.max_prompt_length=128",
            f"data.max_prompt_length=700 {ROLLOUT}.max_model_len=null",
            "data.filter_overlong_prompts=true",
        ),
        # The model.
        (
            f"{ROLLOUT}.max_model_len=10",
            "with actor_rollout_ref.rollout.max_model_len=10 and",
            f"{ROLLOUT}.max_model_len=160",
        ),
        (f"{MODEL}/no_tokenizer", "its tokenizer has 1 tokens and the end token '<|endoftext|>': give the model's"),
        (f"{MODEL}/headless", "1 of the 27 tensors are missing (lm_head.weight is one)"),
    ],
    ids=lambda row: row[0],
)
def test_what_goes_wrong_is_refused_once_and_passes_with_each_fix_that_is_named(row, said):
    override, message, *fixes = row
    (refused,), _ = said(override)
    assert message in refused and "\n" not in refused
    for fix in fixes:
        assert not said(override, fix)[0], fix


@pytest.mark.parametrize(
    "row",
    [
        # What was hardly meant.
        (
            f"{ACTOR}.clip_ratio_high=0.28",
            "clip_ratio_high of actor_rollout_ref.actor have no effect",
            VANILLA,
        ),
        (
            f"{ACTOR}.grad_clip=0.5",
            f"{ACTOR}.grad_clip=0.5 has no effect: verl 0.9.1 reads {ACTOR}.optim.clip_grad",
            f"{ACTOR}.optim.clip_grad=0.5",
        ),
        (
            f"{ROLLOUT}.n=1 {ACTOR}.ppo_micro_batch_size_per_gpu=8",
            "rollout.n=1 with algorithm.adv_estimator=grpo leaves no other response",
        ),
        (
            f"{ACTOR}.policy_loss.ratio_lower_start=0.2 {ACTOR}.policy_loss.ratio_lower_max=0.28",
            "ratio_lower_max=0.28 is a bound on the ratio, and a ratio of 1 means no change. If you meant an epsilon",
            f"{ACTOR}.policy_loss.ratio_lower_max=0.72",
        ),
        (
            "trainer.v1.trainer_mode=colocate_async",
            "rollout_correction.bypass_mode=false in an asynchronous mode",
            BYPASS,
        ),
        (
            f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
            "fsdp_config.model_dtype=bfloat16 keeps the weights in 16 bits, where most of a small step",
            f"{ACTOR}.fsdp_config.model_dtype=fp32",
        ),
        (f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.lr=0 trains nothing", f"{ACTOR}.optim.lr=1e-6"),
        (f"{ACTOR}.optim.lr=nan", f"{ACTOR}.optim.lr=nan trains nothing"),
        (f"{VANILLA} {ACTOR}.clip_ratio_high=1.28", "for a bound of 1.28 set 0.28", f"{ACTOR}.clip_ratio_high=0.28"),
        (f"{VANILLA} {ACTOR}.clip_ratio_low=-0.2", "[-0.2, 0.2] are not all between 0 and 1"),
        (
            "++actor_rollout_ref.model.override_config.rms_norm_eps=0.1",
            "override_config changes rms_norm_eps of the trainer's model alone",
            f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rms_norm_eps=0.1",
        ),
        # What verl reports, but late or in other words.
        (
            f"{VANILLA} {ACTOR}.clip_ratio_c=null",
            f"{ACTOR}.clip_ratio_c=null ends the first update",
            f"{ACTOR}.clip_ratio_c=3.0",
        ),
        (
            "algorithm.adv_estimator=gae",
            "algorithm.adv_estimator=gae needs a critic, which verl loads with flash",
            "algorithm.adv_estimator=grpo",
        ),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator=GRPO: Unknown advantage estimator"),
        (
            "algorithm.adv_estimator=remax",
            "argument: 'reward_baselines'; use grpo, or another",
            "algorithm.adv_estimator=grpo",
        ),
        ("algorithm.adv_estimator=gdpo", "algorithm.adv_estimator=gdpo"),
        (
            f"algorithm.rollout_correction.bypass_mode=true {ROLLOUT}.calculate_log_probs=false",
            "bypass_mode=true needs the log-probs of the rollout engine: set",
            f"{ROLLOUT}.calculate_log_probs=true",
        ),
        (f"{MODEL}/truncated", "truncated: SafetensorError: Error while deserializing header"),
        (
            "data.train_max_samples=10",
            "has 10 usable rows, fewer than data.train_batch_size=64: lower it, give more",
            "data.train_max_samples=64",
        ),
        (
            "data.train_files={files}/long.parquet data.filter_overlong_prompts=true",
            "has no usable row: give more (data.train_max_samples), or raise data.max_prompt_length=128",
        ),
    ],
    ids=lambda row: row[0],
)
def test_of_what_may_be_meant_or_fails_later_it_warns_until_it_is_fixed(row, said):
    override, message, *fixes = row
    failed, warned = said(override)
    (line,) = [line for line in warned if message in line]
    assert not failed and "\n" not in line
    for fix in fixes:
        refused, left = said(override, fix)
        assert not refused and len(left) < len(warned), fix


def test_several_warnings_and_failures_of_the_rules_are_in_one_line(said):
    (refused,), _ = said(f"trainer.critic_warmup=9 {ACTOR}.optim.clip_grad=0")
    assert "makes every gradient 0" in refused and "trainer.critic_warmup=9 without a critic" in refused


def test_a_slip_in_a_yaml_file_is_named_by_file_and_line(task, tmp_path, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open(tmp_path / "configs" / "size" / "cpu.yaml", "a") as file:
        file.write("rollout:\n  n:8\n  m: 3\n")
    where = {"groups": tmp_path / "configs", "name": "bapo_trainer"}
    (line,) = run_preflight(["experiment=example", "size=cpu"], **where)
    assert line.status == "failed" and "mapping values are not allowed here" in line.detail
    assert "/configs/size/cpu.yaml" in line.detail and "line " in line.detail and "\n" not in line.detail


@pytest.mark.parametrize(
    "override, said",
    [
        ("trainer.totl_epochs=3", "Could not override 'trainer.totl_epochs'. To append to your config use +trainer.to"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "use +data.apply_chat_template_kwargs.enable_thi"),
        ("run_dir=${oops}", "Interpolation key 'oops' not found"),
        ("run_dir=a(b", "run_dir=a(b: no viable alternative at input 'a(b'"),
    ],
)
def test_hydras_answer_is_shown(override, said):
    (line,) = run_preflight([override], name="bapo_trainer")
    assert line.status == "failed" and said in line.detail and "\n" not in line.detail


def test_a_folder_of_groups_that_is_not_there_is_named():
    (line,) = run_preflight(["experiment=example"], name="bapo_trainer", groups="/nope")
    assert line.detail == "invalid --config-dir=/nope: there is no such folder."


def test_an_unknown_key_in_a_yaml_file_is_a_warning(task, tmp_path, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    groups = shutil.copytree(ROOT / "configs", tmp_path / "a (copy), of mine" / "configs")  # a folder of any name
    (groups / "size" / "broken.yaml").write_text("a: {")  # a broken file that is not selected changes nothing
    size = groups / "size" / "cpu.yaml"
    text = size.read_text().replace("train_batch_size: 64", "train_batch_sise: 64")
    size.write_text(
        f"{text}algorithm: {{kl_ctrl: {{kl_coeff: 0.1}}}}\n"
    )  # verl does not build what _target_ names there
    overrides = ["experiment=example", "size=cpu", "+data.image_keys=[x]", "+algorithm.my.beta=1"]
    config = compose_config(overrides, groups)
    prepare(config)
    assert keys.unknown_keys(config, overrides) == ["data.train_batch_sise", "algorithm.kl_ctrl.kl_coeff"]
    monkeypatch.setattr(stages, "STAGES", ())
    (line,) = run_stages(config, overrides)
    assert line.status == "warning" and "has data.train_batch_sise, algorithm.kl_ctrl.kl_coeff. If you" in line.detail


def test_verls_trainer_says_what_devices_of_their_own_for_sampling_ask_of_a_config(task):
    separate = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"]
    sizes = [f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=16"]
    steps = "trainer.v1.separate_async.parameter_sync_step="
    assert check_verls_config(composed(task, *separate, *sizes, f"{steps}2"))
    with pytest.raises(
        ValueError, match="train_batch_size must equal parameter_sync_step . ppo_mini_batch_size in sep"
    ):
        check_verls_config(composed(task, *separate, *sizes, f"{steps}4"))


OWN_ESTIMATOR = """
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("mine")
def compute(token_level_rewards, response_mask, config=None, **kwargs):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask * config.my_beta
    return advantages, advantages
"""


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "actor_rollout_ref.model.external_lib=own_estimator",
            "algorithm.adv_estimator=mine",
            "+algorithm.my_beta=.25",
        ],
        ["+data.image_keys=[images]"],
        ["algorithm.rollout_correction.rollout_is_threshold='0.5_5.0'"],
        ["algorithm.rollout_correction=null"],
        [f"{ACTOR}.optim.clip_grad=inf"],
        [f"+{ROLLOUT}.engine_kwargs.vllm.seed=1"],
    ],
)
def test_what_verl_accepts_passes(overrides, said, tmp_path, monkeypatch):
    (tmp_path / "own_estimator.py").write_text(OWN_ESTIMATOR)
    monkeypatch.syspath_prepend(tmp_path)
    failed, warned = said(*overrides)
    assert not failed and not warned


def test_verls_name_for_cuda_is_a_platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    assert compose_config([]).trainer.device == "cuda"


def test_it_can_be_left_out_of_a_run(task, tmp_path, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(train, "claim_machine", lambda: None)  # it is held until the process ends
    monkeypatch.setattr(train, "call_verl", trained.append)
    monkeypatch.setattr(train.HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"task": []}}))
    for wanted in (True, False):
        run_dir = tmp_path / str(wanted)
        config = composed(task, "trainer.critic_warmup=1000", f"preflight={wanted}", f"run_dir={run_dir}")
        with pytest.raises(SystemExit) if wanted else nullcontext():
            main_bapo.main.__wrapped__(config)
    (config,) = trained
    assert config.run_dir == str(tmp_path / "False") and list(config.trainer.logger) == ["file"]
    config = composed(task, f"{ACTOR}.ppo_mini_batch_size=128", "preflight=false")
    with pytest.raises(SystemExit):
        main_bapo.main.__wrapped__(config)  # verl's own entry point asks the same function
    assert capsys.readouterr().err.endswith(
        "\nError: train_batch_size (64) must be >= actor.ppo_mini_batch_size (128)\n"
    )


@pytest.mark.parametrize(
    "given, used", [("console", ["console", "file"]), (["file"], ["file"]), (None, ["file"]), ("file", ["file"])]
)
def test_the_file_logger_is_added_to_what_the_user_named(task, given, used):
    config = composed(task)
    config.trainer.logger = given
    prepare(config)
    assert list(config.trainer.logger) == used
