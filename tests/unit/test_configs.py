"""Every yaml is composed, its loss config instantiated, and checked by verl's own rules."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import verl  # noqa: F401  loads the plugin
from bapo import BAPOConfig
from recipe.bapo.checks.config import check_batches, check_ratio
from recipe.bapo.policy_loss import BAPOPolicyLossConfig
from scripts.cluster.job import FORWARDED
from verl.utils.config import omega_conf_to_dataclass

ROOT = Path(__file__).parents[2]
CONFIGS, METHODS, SIZES = (
    sorted(path.stem for path in (ROOT / "configs" / folder).glob("*.yaml")) for folder in ("", "method", "size")
)


@pytest.fixture(autouse=True)
def inputs(monkeypatch):
    """What the configs read from the environment."""
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")


def compose_in(folder, name, overrides=()):
    with initialize_config_dir(str(ROOT / folder), version_base=None):
        return compose(name, list(overrides))


def test_bapo_trainer_repeats_no_default():
    config = compose_in("recipe/bapo/config", "bapo_trainer")
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert loss == BAPOPolicyLossConfig()
    assert {name: loss[name] for name in BAPOConfig.__dataclass_fields__} == vars(BAPOConfig())
    assert config.algorithm.adv_estimator == "grpo" and not config.actor_rollout_ref.actor.use_kl_loss
    text = (ROOT / "recipe/bapo/config/bapo_trainer.yaml").read_text()
    keys = [
        line.split(":")[0].strip() for line in text.splitlines() if ":" in line and not line.strip().startswith("#")
    ]
    assert not set(keys) & set(BAPOConfig.__dataclass_fields__)


def check(config):
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, BAPOPolicyLossConfig)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    check_batches(config)
    return actor.policy_loss


@pytest.mark.parametrize(
    "name, size", [(name, size) for name in CONFIGS for size in SIZES if size == "gpu" or not name.startswith("paper_")]
)
def test_a_config_composes_in_every_size_and_its_actor_can_be_built(name, size):
    config = compose_in("configs", name, [f"size={size}"])
    loss = check(config)
    assert loss.bounds_record_dir == (None if size == "gpu" else f"{config.run_dir}/bounds")
    assert config.trainer.experiment_name.startswith(name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_composes(method):
    loss = check(compose_in("configs", "example", [f"method={method}"]))
    if method in FIXED:
        assert (loss.ratio_lower_start, loss.ratio_upper_start) == FIXED[method]
        assert (loss.ratio_lower_max, loss.ratio_upper_max) == FIXED[method]


FIXED = {"grpo": (0.8, 1.2), "clip_higher": (0.8, 1.28), "widest": (0.9, 3.0)}


def test_the_papers_settings():
    paper, octothinker = (compose_in("configs", "example", [f"method={m}"]) for m in ("paper", "paper_octothinker"))
    for config, target, lower, upper in ((paper, 0.4, 0.6, 3.0), (octothinker, 0.45, 0.8, 2.0)):
        loss = check(config)
        assert loss.positive_contribution_target == target
        assert (loss.ratio_lower_start, loss.ratio_lower_max) == (lower, 0.9)
        assert (loss.ratio_upper_start, loss.ratio_upper_max) == (1.2, upper)
        assert config.actor_rollout_ref.actor.clip_ratio_c > 1e6


@pytest.mark.parametrize(
    "name, model_length, staleness", [("paper_7b", 8192, 8), ("paper_llama_3b", 8192, 8), ("paper_32b", 65536, 4)]
)
def test_the_papers_scale(name, model_length, staleness):
    config = compose_in("configs", name)
    loss = check(config)
    assert loss.positive_contribution_target == (0.45 if name == "paper_llama_3b" else 0.4)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr == 2e-6 and rollout.temperature == 0.6 and actor.clip_ratio_c > 1e6
    assert config.data.max_response_length == model_length and rollout.val_kwargs.n == 16
    assert config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs == staleness
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size >= longest
    assert (rollout.max_model_len or longest) >= longest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("staleness", [1, 2, 4, 8, 32])
def test_staleness_is_updates_per_rollout_batch(staleness, size):
    config = compose_in("configs", "replay", [f"staleness={staleness}", f"size={size}"])
    check(config)
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs == staleness
    assert actor.use_dynamic_bsz


def test_a_staleness_that_does_not_divide_is_named():
    config = compose_in("configs", "replay", ["staleness=7"])
    with pytest.raises(Exception, match="7, do not divide data.train_batch_size"):
        OmegaConf.resolve(config)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name, mode", [("partial_rollout", "colocate_async"), ("separate_async", "separate_async")])
def test_asynchronous_configs_measure_against_the_policy_that_sampled(name, mode, size):
    config = compose_in("configs", name, [f"size={size}"])
    check(config)
    assert config.trainer.v1.trainer_mode == mode and "the policy that sampled" in check_ratio(config)
    assert config.actor_rollout_ref.actor.calculate_entropy
    if mode == "separate_async":  # what verl asserts
        steps = config.trainer.v1.separate_async.parameter_sync_step
        assert steps > 1
        assert config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert config.actor_rollout_ref.rollout.nnodes > 0 and config.actor_rollout_ref.rollout.n_gpus_per_node > 0
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive"


def test_a_switch_is_overridden_without_a_plus():
    override = "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4"
    config = compose_in("configs", CONFIGS[0], [override])
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).positive_contribution_target == 0.4


def test_a_submitted_job_gets_every_variable_that_a_config_reads():
    text = "".join(path.read_text() for folder in ("configs", "recipe") for path in (ROOT / folder).rglob("*.yaml"))
    read = set(re.findall(r"\$\{oc\.env:(\w+)", text))
    assert read and read <= set(FORWARDED)
