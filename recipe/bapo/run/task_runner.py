# SPDX-License-Identifier: Apache-2.0
"""What the task runner does, the process in which verl's trainer runs: an actor of Ray, on one of its nodes."""

import os

import ray

from recipe.bapo.host.cleanup import remove_on_every_node
from recipe.bapo.host.files import METRICS
from recipe.bapo.host.locks import claim_cluster
from recipe.bapo.run import bapo_run


@ray.remote
class TaskRunner:
    """Trains as verl's task runner does. It logs metrics to the run's folder, and claims the cluster for itself."""

    def run(self, config) -> None:
        """Train. ``config`` is the composed config."""
        os.environ["VERL_FILE_LOGGER_PATH"] = f"{config.run_dir}/{METRICS}"
        os.environ.setdefault("TENSORBOARD_DIR", f"{config.run_dir}/tensorboard")
        claim = claim_cluster() if config.ray_kwargs.ray_init.get("address") != "local" else None
        try:
            bapo_run.run_trainer(config)
        finally:
            del claim  # this releases the cluster
            remove_on_every_node()  # before the workers end: their processes show which shared memory is theirs
