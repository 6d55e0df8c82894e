# SPDX-License-Identifier: Apache-2.0
"""Every yaml is composed, its loss config instantiated, and checked by verl's own rules."""

import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig
from recipe.bapo.checks.config import check_batches, check_ratio, sequence_parallel
from recipe.bapo.policy_loss import BAPOPolicyLossConfig
from scripts.cluster.job import is_forwarded
from verl.utils.config import omega_conf_to_dataclass

EXPERIMENTS, METHODS, SIZES = (
    sorted(path.stem for path in (ROOT / "configs" / folder).glob("*.yaml"))
    for folder in ("experiment", "method", "size")
)
PLATFORMS = sorted(path.stem for path in (ROOT / "recipe/bapo/config/platform").glob("*.yaml"))


@pytest.fixture(autouse=True)
def inputs(monkeypatch):
    """What the configs read from the environment."""
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    monkeypatch.delenv("VERL_PLATFORM")


def test_the_trainer_config_shows_every_switch_with_its_default():
    config = OmegaConf.load(ROOT / "recipe/bapo/config/bapo_trainer.yaml")
    shown = dict(config.actor_rollout_ref.actor.policy_loss)
    assert shown.pop("_target_") == f"{BAPOPolicyLossConfig.__module__}.{BAPOPolicyLossConfig.__name__}"
    defaults = BAPOPolicyLossConfig()
    assert shown == {name: getattr(defaults, name) for name in shown}
    assert set(BAPOConfig.__dataclass_fields__) <= set(shown)


def test_every_switch_of_the_trainer_config_has_a_comment():
    text = (ROOT / "recipe/bapo/config/bapo_trainer.yaml").read_text()
    block = re.search(r"^    policy_loss:\n((?:      .*\n)+)", text, re.M).group(1).splitlines()
    keys = [line.split(":")[0].strip() for line in block if not line.strip().startswith("#")]
    after_a_comment = {
        line.split(":")[0].strip() for above, line in zip(block, block[1:], strict=False) if above.strip()[0] == "#"
    }
    families = {key.rpartition("_")[0] for key in after_a_comment}  # ratio_lower_start speaks for _max and _step
    uncommented = {key for key in keys if key not in after_a_comment and key.rpartition("_")[0] not in families}
    assert uncommented == {"_target_", "loss_mode"}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rays_settings_of_a_platform_are_literal(platform):
    """verl's own entry point hands them to Ray without resolving them."""
    settings = OmegaConf.load(ROOT / f"recipe/bapo/config/platform/{platform}.yaml")
    assert "${" not in str(OmegaConf.to_container(OmegaConf.create(settings.get("ray_kwargs", {}))))


def test_the_defaults_are_grpo_without_kl():
    config = compose_in_groups()
    assert config.algorithm.adv_estimator == "grpo" and not config.actor_rollout_ref.actor.use_kl_loss
    assert config.run_dir == "runs/bapo"


def test_the_runs_folder_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("OUTPUT_DIR", "/a/folder")
    assert compose_in_groups("experiment=example").run_dir == "/a/folder"


def check(config):
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, BAPOPolicyLossConfig)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    check_batches(config)
    return actor.policy_loss


@pytest.mark.parametrize(
    "name, size",
    [(name, size) for name in EXPERIMENTS for size in SIZES if size == "gpu" or not name.startswith("paper_")],
)
def test_a_config_composes_in_every_size_and_its_actor_can_be_built(name, size):
    config = compose_in_groups(f"experiment={name}", f"size={size}")
    loss = check(config)
    assert config.trainer.device == "cuda"
    assert loss.bounds_record_dir == (None if size == "gpu" else f"{config.run_dir}/bounds")
    assert config.trainer.experiment_name.startswith(name)


def documented_methods():
    """The table of methods in the documents: the switches of each by its name."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    header = (
        "| `method=` | target | `c_low` | `c_high` | `contribution` | `token_weight` | `search_order` | `bound_scope` |"
    )
    rows = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    found = {}
    for row in rows:
        name, target, lower, upper, *others = (cell.strip().strip("`") for cell in row.strip("|").split("|"))
        found[name] = {"positive_contribution_target": float(target)}
        for side, cell in (("lower", lower), ("upper", upper)):
            start, *rest = re.findall(r"[\d.]+", cell)
            maximum, step = rest if rest else (start, None)
            found[name] |= {f"ratio_{side}_start": float(start), f"ratio_{side}_max": float(maximum)}
            if step is not None:
                found[name][f"ratio_{side}_step"] = float(step)
        found[name] |= dict(zip(("contribution", "token_weight", "search_order", "bound_scope"), others, strict=True))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_what_the_table_says_under_every_size(method, size):
    loss = check(compose_in_groups("experiment=example", f"size={size}", f"method={method}"))
    documented = documented_methods()[method]
    found = {name: getattr(loss, name) for name in documented}
    found["positive_contribution_target"] = round(found["positive_contribution_target"], 4)
    assert found == documented


def test_methods_set_switches_of_the_search_alone_and_all_of_them():
    assert documented_methods().keys() == set(METHODS)
    switches = {*BAPOConfig.__dataclass_fields__, "loss_mode"}
    for method in METHODS:
        text = (ROOT / f"configs/method/{method}.yaml").read_text()
        assert text.startswith("# @package actor_rollout_ref.actor.policy_loss\n")
        shown = set(OmegaConf.create(text))
        assert shown == switches if method == "bapo" else shown <= {*switches, "defaults"}


def test_the_cpu_example_has_a_method_of_its_own_and_a_gpu_gets_the_default():
    on_cpu, on_gpu = (check(compose_in_groups("experiment=example", f"size={size}")) for size in ("cpu_example", "gpu"))
    assert replace(on_cpu, bounds_record_dir=None) == loss_of("cpu_example")
    assert on_gpu == loss_of("bapo") == loss_of("paper") == BAPOPolicyLossConfig()


def test_another_method_on_the_command_line_wins_over_the_experiments():
    paper, grpo = (compose_in_groups("experiment=paper_7b", "size=gpu", f"method={name}") for name in ("paper", "grpo"))
    assert check(grpo).ratio_upper_max == 1.2
    assert grpo.actor_rollout_ref.actor.clip_ratio_c > 1e6  # the experiment's, whatever the method
    grpo.actor_rollout_ref.actor.policy_loss = paper.actor_rollout_ref.actor.policy_loss
    assert grpo == paper  # they differ in nothing but the bounds and the target


@pytest.mark.parametrize("platform", ["cpu", "gpu_without_flash_attn"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_a_machine_needs_wins_over_the_experiment(name, platform):
    size = "cpu" if platform == "cpu" and not name.startswith("paper_") else "gpu"
    config = compose_in_groups(f"experiment={name}", f"size={size}", f"platform={platform}")
    check(config)
    assert config.trainer.device == ("cpu" if platform == "cpu" else "cuda")
    if name == "separate_async":
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == ("gloo" if platform == "cpu" else "nccl")
    if platform == "gpu_without_flash_attn":
        longest = config.data.max_prompt_length + config.data.max_response_length
        assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == longest
        assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == longest
        assert config.actor_rollout_ref.actor.entropy_from_logits_with_chunking
        model = config.actor_rollout_ref.model  # no logits, and no padding to the longest sequence of a micro-batch
        assert model.use_fused_kernels and model.use_remove_padding
        assert model.override_config.attn_implementation == "sdpa"


def test_the_papers_settings():
    paper, octothinker = (
        compose_in_groups("experiment=example", "size=gpu", f"method={m}") for m in ("paper", "paper_octothinker")
    )
    for config, target, lower, upper in ((paper, 0.4, 0.6, 3.0), (octothinker, 0.45, 0.8, 2.0)):
        loss = check(config)
        assert loss.positive_contribution_target == target
        assert (loss.ratio_lower_start, loss.ratio_lower_max) == (lower, 0.9)
        assert (loss.ratio_upper_start, loss.ratio_upper_max) == (1.2, upper)


def loss_of(name):
    return check(compose_in_groups("experiment=example", "size=gpu", f"method={name}"))


def test_eq_8_to_the_letter_is_a_value_of_the_target():
    literal, paper = loss_of("eq8_literal"), loss_of("paper")
    rho0 = paper.positive_contribution_target
    assert literal.positive_contribution_target == pytest.approx(rho0 / (1 + 2 * rho0), abs=5e-5)
    assert replace(literal, positive_contribution_target=rho0) == paper


def test_the_authors_code_with_the_values_of_its_yaml_and_of_its_script():
    yaml, script = loss_of("authors_code"), loss_of("authors_script")
    assert script.positive_contribution_target == pytest.approx(0.5 / (1 + 0.5))  # their target is P/N
    assert (script.ratio_lower_start, script.ratio_lower_max, script.ratio_lower_step) == (0.8, 0.95, 0.05)
    assert (script.ratio_upper_start, script.ratio_upper_max, script.ratio_upper_step) == (1.2, 2.0, 0.1)
    of_the_yaml = {"positive_contribution_target": 0.5, "ratio_lower_start": 0.6, "ratio_lower_max": 0.8}
    assert replace(script, **of_the_yaml, ratio_upper_step=0.05) == yaml  # nothing else differs
    assert (yaml.token_weight, yaml.search_order, yaml.bound_scope) == ("uniform", "lower_first", "micro_batch")


@pytest.mark.parametrize(
    "name, model_length, staleness",
    [
        ("paper_7b", 8192, 8),
        ("paper_llama_3b", 8192, 8),
        ("paper_32b", 65536, 4),
        ("paper_r1_32b", 65536, 4),
        ("paper_7b_64k", 65536, 4),
        ("paper_32k", 32768, 4),
    ],
)
def test_the_papers_scale(name, model_length, staleness):
    config = compose_in_groups(f"experiment={name}", "size=gpu")
    loss = check(config)
    assert loss.positive_contribution_target == (0.45 if name == "paper_llama_3b" else 0.4)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr == 2e-6 and rollout.temperature == 0.6 and actor.clip_ratio_c > 1e6
    assert config.data.max_response_length == model_length and rollout.val_kwargs.n == 16
    assert config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs == staleness
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor.ppo_max_token_len_per_gpu * sequence_parallel(config)[1] >= longest
    assert sequence_parallel(config)[0].endswith("fsdp_config.ulysses_sequence_parallel_size")  # not the deprecated key
    assert not actor.fsdp_config.param_offload and not actor.fsdp_config.optimizer_offload
    if name == "paper_32b":  # verl's own 8,192 would read a resumed response in nine steps
        assert rollout.max_num_batched_tokens > 8192
    script = (actor.optim.weight_decay, actor.optim.lr_warmup_steps_ratio, config.trainer.total_training_steps)
    assert (script == (0.1, 0.1, 1000)) == (model_length == 8192)  # what these two take from the authors' script
    assert (rollout.max_model_len or longest) >= longest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("staleness", [1, 2, 4, 8, 32])
def test_staleness_is_updates_per_rollout_batch(staleness, size):
    config = compose_in_groups("experiment=replay", f"size={size}")
    config.staleness = staleness
    check(config)
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs == staleness
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
    assert config.trainer.v1.trainer_mode == mode and "the policy that sampled" in check_ratio(config)
    assert config.actor_rollout_ref.actor.calculate_entropy
    if size == "gpu":  # without its logits in float32
        actor = config.actor_rollout_ref.actor
        assert actor.entropy_from_logits_with_chunking and actor.entropy_checkpointing
    if mode == "separate_async":  # what verl asserts
        steps = config.trainer.v1.separate_async.parameter_sync_step
        assert steps > 1
        assert config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert config.actor_rollout_ref.rollout.nnodes > 0 and config.actor_rollout_ref.rollout.n_gpus_per_node > 0
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive"


def test_a_switch_is_overridden_without_a_plus():
    override = "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4"
    config = compose_in_groups(f"experiment={EXPERIMENTS[0]}", override)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).positive_contribution_target == 0.4


def test_a_submitted_job_gets_every_variable_that_a_config_reads():
    text = "".join(path.read_text() for folder in ("configs", "recipe") for path in (ROOT / folder).rglob("*.yaml"))
    read = set(re.findall(r"\$\{oc\.env:(\w+)", text))
    assert read and all(map(is_forwarded, read))
    assert not is_forwarded("HF_TOKEN") and not is_forwarded("WANDB_API_KEY")
