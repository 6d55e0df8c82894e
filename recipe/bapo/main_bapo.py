# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO: ``python -m recipe.bapo.main_bapo [--config-dir configs] [key=value ...]``.

verl's entry point with our checks before it. ``python -m recipe.bapo.launch`` with the same arguments starts it, shows
its progress and cleans up after it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import hydra
import ray
from omegaconf import OmegaConf, open_dict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logging.disable(logging.INFO)  # verl announces its platform on import
from recipe.bapo import config as _resolvers  # noqa: E402, F401
from recipe.bapo import cpu as _platform  # noqa: E402, F401  where the package is not installed
from recipe.bapo.checks.__main__ import run as run_checks  # noqa: E402
from recipe.bapo.checks.__main__ import table  # noqa: E402
from recipe.bapo.checks.composing import ERRORS, explain  # noqa: E402
from recipe.bapo.launch.cleanup import remove_on_every_node  # noqa: E402
from recipe.bapo.launch.locks import WAYS_OUT, claim_cluster, claim_machine, joins_a_cluster  # noqa: E402
from recipe.bapo.launch.messages import send, wait_for_final_check  # noqa: E402
from recipe.bapo.records import CONFIG, LOG, METRICS, keep_earlier  # noqa: E402
from recipe.bapo.trainer import BAPOTaskRunner  # noqa: E402
from verl.trainer.main_ppo import run_ppo  # noqa: E402

logging.disable(logging.NOTSET)


@hydra.main(config_path="config", config_name="bapo_trainer", version_base=None)
def main(config):
    """Check and train; end with exit code 1 if anything fails."""
    check(config)
    claim = claim_machine()  # held until this process ends
    if claim is None and not joins_a_cluster(config):
        give_up(f"another run was started on this machine at the same moment: {WAYS_OUT}")
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, run_dir / CONFIG)
    choose_cluster(config)
    send("checked", (str(run_dir / CONFIG), joins_a_cluster(config)))
    send("info", f"Starting Ray, the trainer and the vLLM servers: a minute or two. Log: {run_dir / LOG}")
    train(config)


def check(config) -> None:
    """Resolve and check the config; end the run if it cannot be used."""
    try:
        if isinstance(config.run_dir, str) and "${" not in config.run_dir:  # else a check says so
            config.run_dir = os.path.abspath(config.run_dir)  # before it is resolved: workers may run elsewhere
        lines = run_checks(config, groups_of(sys.argv))
    except Exception as error:
        traceback.print_exc()
        give_up(explain(error))
    print(table(lines))
    for line in lines:
        if line.status == "warning":
            send("info", f"Warning: {line.detail}")
    failed = [line.detail for line in lines if line.status == "failed"]
    if failed:
        give_up(*failed)


def give_up(*errors: str) -> NoReturn:
    """Send what is wrong, and end."""
    for error in errors:
        send("error", error)
    sys.exit(1)


def choose_cluster(config) -> None:
    """Have Ray join the cluster that is up (``RAY_ADDRESS``, or several nodes), or start one of its own."""
    ray_init = config.ray_kwargs.ray_init
    with open_dict(config):
        if joins_a_cluster(config):
            ray_init.address = "auto"
            ray_init.num_cpus = ray_init.num_gpus = None  # of the cluster's nodes; Ray refuses them here
        else:
            ray_init.address = "local"
            # Ray remembers the last 100,000 tasks otherwise: at a megabyte a step its server would grow for hours.
            ray_init._system_config = {"task_events_max_num_task_in_gcs": 10_000}


class SupervisedTaskRunner(BAPOTaskRunner):
    """The Ray task that trains: its metrics go to the run's folder, and it is alone on its cluster."""

    def run(self, config):
        """Train. ``config`` is the composed config."""
        os.environ["VERL_FILE_LOGGER_PATH"] = str(keep_earlier(Path(config.run_dir) / METRICS))
        claim = claim_cluster() if config.ray_kwargs.ray_init.get("address") != "local" else None
        try:
            super().run(config)
        finally:
            del claim  # which releases the cluster
            remove_on_every_node()  # while the workers are there who hold what is removed


class TaskRunnerOnThisNode:
    """Stands for the task runner's Ray class in ``run_ppo``: starts it on the node that submits the job.

    The metrics file, which the console follows, is then on this machine.
    """

    def __init__(self, **options):
        self._options = options

    def options(self, **options):
        """As of a Ray actor class."""
        return TaskRunnerOnThisNode(**options)

    def remote(self):
        """Start the task runner; Ray is up by now."""
        context = ray.get_runtime_context()
        send("ray", context.get_job_id())
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
        return ray.remote(SupervisedTaskRunner).options(scheduling_strategy=here, **self._options).remote()


def train(config) -> None:
    """verl's entry point with our task runner."""
    try:
        run_ppo(config, TaskRunnerOnThisNode())
        send("trained")
        return
    except Exception as error:
        with suppress(OSError):  # the disk is full
            traceback.print_exc()
        send("error", reason_of(error))
        wait_for_final_check()
    except KeyboardInterrupt:
        traceback.print_exc()  # the stack says where training was interrupted
    remove_on_every_node()
    sys.exit(1)


def reason_of(error: Exception) -> str:
    """What went wrong first, without Ray's layers of tracebacks."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0].rstrip('.') if str(cause).strip() else ''}"


def groups_of(arguments: list[str]) -> str | None:
    """The folder given with ``--config-dir``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_known_args(arguments)[0].config_dir


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would else print in lines of its own
    try:
        main()
    except ERRORS as error:
        give_up(explain(error))
