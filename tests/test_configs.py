"""Every yaml is composed, its loss config instantiated, and checked by verl's own rules."""

from pathlib import Path

import pytest
import verl  # noqa: F401  loads the plugin
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from bapo import BAPOConfig
from recipe.bapo.policy_loss import BAPOPolicyLossConfig

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_composes_and_its_actor_can_be_built(name):
    config = compose_in("configs", name)
    OmegaConf.resolve(config)
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss, BAPOPolicyLossConfig)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    updates = config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert updates == int(updates)


def test_a_switch_is_overridden_without_a_plus():
    override = "actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.4"
    config = compose_in("configs", CONFIGS[0], [override])
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).positive_contribution_target == 0.4
