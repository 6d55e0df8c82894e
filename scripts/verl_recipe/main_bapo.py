# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO: ``python -m recipe.bapo.main_bapo key=value ...``. verl's entry point with BAPO's trainers."""

import hydra
import ray

from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from .trainer import BAPOTaskRunner


@hydra.main(config_path="config", config_name="bapo_trainer", version_base=None)
def main(config):
    """Check the config as verl does, and train."""
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, ray.remote(BAPOTaskRunner))


if __name__ == "__main__":
    main()
