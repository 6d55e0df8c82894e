# SPDX-License-Identifier: Apache-2.0
"""Train with BAPO: ``python -m recipe.bapo.main_bapo [--config-dir configs] [key=value ...]``.

verl's entry point with our checks before it. ``python -m recipe.bapo.launch`` with the same arguments starts it, shows
its progress and cleans up after it.
"""

import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import hydra
import ray
from omegaconf import OmegaConf, open_dict

from recipe.bapo.checks.config_errors import ERRORS, explain
from recipe.bapo.checks.preflight import run_checks, table
from recipe.bapo.launch import demands, send, wait_for_final_check
from recipe.bapo.launch.cleanup import remove_on_every_node
from recipe.bapo.launch.locks import claim_cluster, claim_machine, joins_a_cluster
from recipe.bapo.records import CONFIG, LOG, METRICS, keep_earlier
from recipe.bapo.trainer import BAPOTaskRunner
from verl.trainer.main_ppo import run_ppo
from verl.utils.config import omega_conf_to_dataclass


@hydra.main(config_path="config", config_name="bapo_trainer", version_base=None)
def main(config):
    """Check and train; end with exit code 1 if anything fails."""
    check(config)
    try:
        claim_machine()  # until this process ends; on a cluster too, so that no run with its own Ray starts beside us
    except ValueError as error:  # another run was started at the same moment
        if not joins_a_cluster(config):  # Ray numbers a cluster's jobs apart
            give_up(str(error))
    loss = config.actor_rollout_ref.actor.policy_loss
    for name in ("bounds_record_dir", "token_dump_dir"):
        if loss[name]:
            loss[name] = os.path.abspath(loss[name])  # workers may run elsewhere
    run_dir = Path(config.run_dir)
    keep_earlier(run_dir / METRICS)
    OmegaConf.save(config, run_dir / CONFIG)
    choose_cluster(config)
    bounds_can_move = not omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).fixed
    send("checked", (str(run_dir / CONFIG), joins_a_cluster(config), bounds_can_move))
    send("info", f"Starting Ray, the trainer and the vLLM servers: a minute or two. Log: {run_dir / LOG}")
    train(config)


def check(config) -> None:
    """Resolve and check the config; end the run if it cannot be used."""
    try:
        if isinstance(config.run_dir, str) and config.run_dir and "${" not in config.run_dir:  # else a check says so
            config.run_dir = os.path.abspath(config.run_dir)  # before it is resolved: workers may run elsewhere
        lines = run_checks(config)
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


class RecordingTaskRunner(BAPOTaskRunner):
    """The Ray task that trains: its metrics go to the run's folder, and it is alone on its cluster."""

    def run(self, config):
        """Train. ``config`` is the composed config."""
        os.environ["VERL_FILE_LOGGER_PATH"] = f"{config.run_dir}/{METRICS}"
        claim = claim_cluster() if config.ray_kwargs.ray_init.get("address") != "local" else None
        try:
            super().run(config)
        finally:
            del claim  # which releases the cluster
            remove_on_every_node()  # while the workers are there who hold what is removed


def train(config) -> None:
    """verl's entry point with our task runner."""

    def start(**options):  # verl calls it once Ray is up
        send("ray", ray.get_runtime_context().get_job_id())
        demands.follow(Path(config.run_dir) / METRICS, lambda *found: send("demands", found))
        return ray.remote(RecordingTaskRunner).options(**options).remote()

    # What verl calls of a Ray class.
    runner = SimpleNamespace(remote=start, options=lambda **options: SimpleNamespace(remote=partial(start, **options)))
    try:
        run_ppo(config, runner)
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


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would else print in lines of its own
    try:
        main()
    except ERRORS as error:
        give_up(explain(error))
