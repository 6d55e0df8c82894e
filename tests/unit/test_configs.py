# SPDX-License-Identifier: Apache-2.0
"""Compose every yaml, instantiate its loss config, and check it with verl's own rules."""

import os
import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups, composed

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig
from recipe.bapo.hook.verdict import judge
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from recipe.bapo.preflight.rules import check_rules
from recipe.bapo.preflight.stages import check_verls_config
from recipe.bapo.verl_patches import attention
from scripts.cluster.job import is_forwarded
from verl.utils.config import omega_conf_to_dataclass

EXPERIMENTS, METHODS, SIZES = (
    sorted(path.stem for path in (ROOT / "configs" / folder).glob("*.yaml"))
    for folder in ("experiment", "method", "size")
)
PLATFORMS = sorted(path.stem for path in (ROOT / "recipe/bapo/config/platform").glob("*.yaml"))
PLATFORMS.remove("cpu_all_cores")  # for our trainer alone


@pytest.fixture(autouse=True)
def inputs(monkeypatch):
    """Set the environment variables that the configs read."""
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    monkeypatch.delenv("VERL_PLATFORM")


def test_the_trainer_config_shows_every_option_with_its_default():
    config = OmegaConf.load(ROOT / "recipe/bapo/config/bapo_trainer.yaml")
    shown = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss)
    assert shown.pop("_target_") == f"{BAPOPolicyLossConfig.__module__}.{BAPOPolicyLossConfig.__name__}"
    defaults = BAPOPolicyLossConfig()
    assert shown.pop("record_dir") == "${bapo.absolute:${run_dir}}" and defaults.record_dir is None
    assert shown == {name: getattr(defaults, name) for name in shown}
    assert set(BAPOConfig.__dataclass_fields__) <= set(shown)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rays_settings_of_a_platform_are_literal(platform):
    """verl's own entry point passes them to Ray without resolving them."""
    settings = OmegaConf.load(ROOT / f"recipe/bapo/config/platform/{platform}.yaml")
    assert "${" not in str(OmegaConf.to_container(OmegaConf.create(settings.get("ray_kwargs", {}))))


def check(config):
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, (BAPOPolicyLossConfig, MonitorConfig))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1  # the platform's, which is not composed here
    check_rules(config)
    return actor.policy_loss


@pytest.mark.parametrize(
    "name, size",
    [(name, size) for name in EXPERIMENTS for size in SIZES if size == "gpu" or name == "example"],
)
def test_a_config_composes_in_every_size_and_its_actor_can_be_built(name, size):
    config = compose_in_groups(f"experiment={name}", f"size={size}")
    loss = check(config)
    assert config.trainer.device == "cuda"
    assert loss.record_dir == os.path.abspath(config.run_dir)
    assert config.trainer.experiment_name.startswith(name)


METHODS_PAGE = (ROOT / "docs/configuration.md").read_text()
OPTIONS = list(BAPOConfig.__dataclass_fields__)


@pytest.mark.parametrize("size", ["gpu", "cpu_example"])  # cpu_example selects a method itself
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_what_the_table_says_under_every_size(method, size):
    loss = check(compose_in_groups("experiment=example", f"size={size}", f"method={method}"))
    name = f"`{method}` (monitored)" if loss.loss_mode != "bapo" else f"`{method}`"
    cells = [name, str(round(loss.positive_contribution_target, 4))]
    for side in ("lower", "upper"):
        first, last, step = (getattr(loss, f"ratio_{side}_{part}") for part in ("start", "max", "step"))
        cells.append(f"{first} to {last} by {step}" if last > first else f"{first} fixed")
    others = [option for option in OPTIONS if not option.startswith(("positive_", "ratio_"))]
    cells += [f"`{getattr(loss, option)}`" for option in others]
    assert f"| {' | '.join(cells)} |\n" in METHODS_PAGE


def test_methods_of_bapos_loss_set_options_of_the_search_alone_and_all_of_them():
    documented = re.findall(r"^\| `(\w+)`(?: \(monitored\))? \| [\d.]+ \|", METHODS_PAGE, re.M)
    assert sorted(documented) == METHODS
    options = {*OPTIONS, "loss_mode"}
    for method in set(METHODS) - {"dapo", "gspo", "cispo", "bapo_paper"}:  # which set keys of verl's losses too
        shown = set(OmegaConf.load(ROOT / f"configs/method/{method}.yaml"))
        assert shown == options if method == "bapo" else shown <= {*options, "_target_", "defaults"}


def test_the_papers_method_is_bapo_without_a_dual_clip():
    ours, paper = (
        compose_in_groups("experiment=example", "size=gpu", f"method={name}") for name in ("bapo", "bapo_paper")
    )
    check(paper)
    assert (ours.actor_rollout_ref.actor.clip_ratio_c, paper.actor_rollout_ref.actor.clip_ratio_c) == (3.0, 1e9)
    ours.actor_rollout_ref.actor.clip_ratio_c = 1e9
    assert ours == paper


def test_the_cpu_example_has_a_method_of_its_own_and_a_gpu_gets_the_default():
    on_cpu, on_gpu = (check(compose_in_groups("experiment=example", f"size={size}")) for size in ("cpu_example", "gpu"))
    assert on_cpu == loss_of("cpu_example")
    assert replace(on_gpu, record_dir=None) == BAPOPolicyLossConfig() and on_gpu == loss_of("bapo")


def test_another_method_on_the_command_line_wins_over_the_experiments():
    paper, grpo = (compose_in_groups("experiment=paper_7b", "size=gpu", f"method={name}") for name in ("bapo", "grpo"))
    assert check(grpo).loss_mode == "vanilla"
    assert grpo.actor_rollout_ref.actor.clip_ratio_c > 1e6  # from the experiment, whatever the method
    grpo.actor_rollout_ref.actor.policy_loss = paper.actor_rollout_ref.actor.policy_loss
    assert grpo == paper  # they differ only in the loss


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "evaluate"])
def test_an_evaluation_samples_as_its_experiment_does(name):
    of_experiment, config = (compose_in_groups(f"experiment={one}", "size=gpu") for one in (name, f"[{name},evaluate]"))
    check(config)
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    expected = {**of_experiment.actor_rollout_ref.rollout.val_kwargs, "n": 16, "do_sample": True}
    assert sampling == expected
    for key in ("max_prompt_length", "max_response_length"):
        assert config.data[key] == of_experiment.data[key]
    assert config.trainer.val_only and config.trainer.val_before_train and config.trainer.v1.trainer_mode == "sync"
    assert config.trainer.experiment_name == "evaluate"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_runs_seed_is_one_variable(name):
    config = compose_in_groups(f"experiment={name}", "size=gpu")
    config.seed = 7
    OmegaConf.resolve(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.seed, actor.data_loader_seed, rollout.seed) == (7, 7, 7)


@pytest.mark.parametrize(
    "name, size, every, responses", [("table_8_gpus", "gpu", 10, 16), ("table_1_gpu", "gpu_few", 20, 4)]
)
def test_a_run_of_a_table_is_what_its_header_says(name, size, every, responses):
    config = compose_in_groups(f"experiment={name}", f"size={size}")
    check(config)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    assert config.data.train_batch_size * actor.ppo_epochs // actor.ppo_mini_batch_size == 8
    assert (trainer.total_training_steps, trainer.test_freq, rollout.val_kwargs.n) == (60, every, responses)
    assert trainer.validation_data_dir == f"{config.run_dir}/validation"
    assert rollout.val_kwargs.temperature == rollout.temperature and rollout.val_kwargs.top_p == rollout.top_p


def test_the_methods_of_the_documented_table_have_one_dual_clip():
    """docs/table.md compares BAPO with the fixed bounds that equalled it, all with verl's dual clip."""
    command = (ROOT / "docs/table.md").read_text().partition("```bash\n")[2].partition("```")[0]
    methods = re.search("for method in (.*?); do", command)[1].split()
    overrides = re.findall(r"actor_rollout_ref\.actor\.\S+", command)
    assert {"grpo", "high_only", "bapo"} <= set(methods)
    for method in methods:
        config = compose_in_groups("experiment=table_8_gpus", "size=gpu", f"method={method}", *overrides)
        assert config.actor_rollout_ref.actor.clip_ratio_c == 3.0


@pytest.mark.parametrize("name", ["gsm8k", "paper_7b"])
def test_packed_sequences_without_flash_attn_keep_the_experiments_micro_batches(name):
    chosen, limits = {}, {}
    for platform in ("gpu", "gpu_varlen", "gpu_without_flash_attn"):
        config = chosen[platform] = compose_in_groups(f"experiment={name}", "size=gpu", f"platform={platform}")
        check(config)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        limits[platform] = actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu
    assert limits["gpu_varlen"] == limits["gpu"] != limits["gpu_without_flash_attn"]
    if name == "gsm8k":
        assert limits["gpu_varlen"] == (6144, 12288) and limits["gpu_without_flash_attn"] == (1536, 1536)
    model = chosen["gpu_varlen"].actor_rollout_ref.model
    assert model.override_config.attn_implementation == attention.NAME
    # Without it fused kernels fail with untied embeddings, in monitored runs too.
    fixes = "recipe.bapo.verl_patches.fused_heads"
    assert list(model.external_lib) == [attention.__name__, fixes]
    assert chosen["gpu_without_flash_attn"].actor_rollout_ref.model.external_lib == fixes
    assert model.use_remove_padding and model.use_fused_kernels


@pytest.mark.parametrize("platform", ["cpu", "gpu_without_flash_attn"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_a_machine_needs_wins_over_the_experiment(name, platform):
    size = "cpu" if platform == "cpu" and not name.startswith(("paper_", "table_")) else "gpu"
    # Without flash-attn preflight refuses sequence parallelism.
    alone = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1"
    config = compose_in_groups(f"experiment={name}", f"size={size}", f"platform={platform}", alone)
    if size == "cpu" or platform != "cpu":  # the papers' are for GPUs
        check(config)
    actor, rollout, model = (config.actor_rollout_ref[part] for part in ("actor", "rollout", "model"))
    assert config.trainer.device == ("cpu" if platform == "cpu" else "cuda")
    if name == "separate_async":
        assert rollout.checkpoint_engine.backend == ("gloo" if platform == "cpu" else "nccl")
    if platform == "gpu_without_flash_attn":
        longest = config.data.max_prompt_length + config.data.max_response_length
        assert actor.ppo_max_token_len_per_gpu == rollout.log_prob_max_token_len_per_gpu == longest
        # Logits are not materialised, and sequences are not padded to the longest of a micro-batch.
        assert actor.entropy_from_logits_with_chunking and model.use_fused_kernels and model.use_remove_padding
        assert model.override_config.attn_implementation == "sdpa"
        # Ray gives the runtime environment to the workers of every node.
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.TORCH_CUDNN_SDPA_DEPRIORITIZED == "1"


def loss_of(name):
    return check(compose_in_groups("experiment=example", "size=gpu", f"method={name}"))


def test_published_settings_of_another_definition_are_values_of_the_target():
    paper, literal, script = (loss_of(name) for name in ("bapo", "eq8_literal", "authors_script"))
    rho0 = paper.positive_contribution_target
    assert literal.positive_contribution_target == pytest.approx(rho0 / (1 + 2 * rho0), abs=5e-5)
    assert replace(literal, positive_contribution_target=rho0) == paper
    assert script.positive_contribution_target == pytest.approx(0.5 / (1 + 0.5))  # the authors' target is P/N


@pytest.mark.parametrize("size", SIZES)
def test_staleness_is_updates_per_rollout_batch(size):
    config = compose_in_groups("experiment=replay", f"size={size}")
    config.staleness = 32
    check(config)
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs == 32
    assert actor.use_dynamic_bsz


def test_a_staleness_that_does_not_divide_is_named():
    config = compose_in_groups("experiment=replay", "size=gpu")
    config.staleness = 7
    with pytest.raises(Exception, match="7, do not divide data.train_batch_size"):
        OmegaConf.resolve(config)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name, mode", [("partial_rollout", "colocate_async"), ("separate_async", "separate_async")])
def test_asynchronous_configs_measure_against_the_policy_that_sampled(name, mode, size):
    config = compose_in_groups(f"experiment={name}", f"size={size}")
    check(config)
    assert config.trainer.v1.trainer_mode == mode and "the policy that sampled" in check_rules(config)
    actor = config.actor_rollout_ref.actor
    assert actor.calculate_entropy
    if "gpu" in size:  # needs less memory without float32 logits
        assert actor.entropy_from_logits_with_chunking and actor.entropy_checkpointing
    if mode == "separate_async":  # verl asserts this
        steps = config.trainer.v1.separate_async.parameter_sync_step
        assert steps > 1 and config.data.train_batch_size == steps * actor.ppo_mini_batch_size


@pytest.mark.parametrize(
    "applied, checked",
    [(False, "c_low [0.6, 0.9], c_high [1.2, 2], target 0.4 (gradient, "), (True, "loss_mode=vanilla is")],
)
def test_preflight_takes_the_lines_that_a_user_is_given_to_paste(task, applied, checked):
    update = dict(met_at_start=0, met_by_moving=1, saturated=0, positive_tokens=1, negative_tokens=1, response_tokens=2)
    update |= dict(clipfrac_positive=0.1, clipfrac_negative=0.1)
    config = BAPOConfig(contribution="gradient", ratio_upper_max=2.0)
    lines = judge(20 * [update], config, {"applied": applied}, "this run").switch
    assert checked in check_verls_config(composed(task, *lines))


def test_a_submitted_job_gets_every_variable_that_a_config_reads():
    text = "".join(path.read_text() for folder in ("configs", "recipe") for path in (ROOT / folder).rglob("*.yaml"))
    read = set(re.findall(r"\$\{oc\.env:(\w+)", text))
    assert read and all(map(is_forwarded, read))
    assert not is_forwarded("HF_TOKEN") and not is_forwarded("WANDB_API_KEY")
