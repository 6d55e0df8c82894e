# SPDX-License-Identifier: Apache-2.0
"""What the training process does: check, claim the machine, start Ray, and train.

``recipe.bapo.main_bapo`` calls it, as a child of ``recipe.bapo.run`` or as a command of its own, which then claims the
run's folder, too. verl's trainer runs in another process, the task runner.
"""

import os
import sys
import textwrap
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import ray
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from recipe.bapo.config import joins_a_cluster, prepare
from recipe.bapo.config.errors import explain
from recipe.bapo.config.resources import cpu_demands
from recipe.bapo.host.cleanup import remove_on_every_node
from recipe.bapo.host.files import CONFIG, METRICS, keep_earlier
from recipe.bapo.host.locks import claim_folder, claim_machine
from recipe.bapo.preflight.stages import run_stages, table
from recipe.bapo.run.messages import has_parent, send, wait_for_final_check
from recipe.bapo.run.task_runner import TaskRunner
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config


def main(config):
    """Check the composed config and train; exit with code 1 if anything fails."""
    try:
        if not config.run_dir:
            give_up("run_dir (OUTPUT_DIR) is empty: set it to a folder.")
        # Workers may have another working directory. Other keys contain run_dir, and ``prepare`` resolves them.
        config.run_dir = os.path.abspath(config.run_dir)
        if has_parent() and config.run_dir != os.path.abspath(os.environ["OUTPUT_DIR"]):
            give_up(
                f"invalid run_dir={config.run_dir} of a yaml file, because the log is in another folder, "
                f"{os.environ['OUTPUT_DIR']}: give OUTPUT_DIR, or run_dir= on the command line."
            )
        prepare(config)
        if not config.preflight:  # then verl's own checks alone, as its entry point makes them
            validate_config(config, need_reference_policy(config), need_critic(config))
    except Exception as error:
        traceback.print_exc()
        give_up(explain(error))
    if config.preflight:
        check(config)
    try:
        # Held until this process ends. A run on a cluster claims it too, so that no run with its own Ray starts here.
        claim_machine()
    except ValueError as error:
        if not joins_a_cluster(config):  # for a run on a cluster, the task runner looks at all of its nodes
            give_up(str(error))
    run_dir = Path(config.run_dir)
    try:
        # A parent has claimed it already. Otherwise the claim is held until this process ends.
        claim = None if has_parent() else claim_folder(run_dir)  # noqa: F841
    except (OSError, ValueError) as error:
        give_up(f"invalid run_dir={run_dir}: {error}")
    keep_earlier(run_dir / METRICS)
    OmegaConf.save(config, run_dir / CONFIG)
    configure_ray(config)
    send("checked", joins_a_cluster(config))
    call_verl(config)


def check(config) -> None:
    """Check the config, the files it names and the machine; end the run if it cannot be used."""
    lines = run_stages(config, list(HydraConfig.get().overrides.task))
    print(table(lines))
    for line in lines:
        if line.status == "warning":
            send("info", f"Warning: {line.detail}")
    failed = [line.detail for line in lines if line.status == "failed"]
    if failed:
        give_up(*failed[:-1], f"{failed[-1]} (preflight=false leaves these checks out.)")


def give_up(*errors: str) -> NoReturn:
    """Report the errors and exit."""
    for error in errors:
        send("error", error)
    sys.exit(1)


def configure_ray(config) -> None:
    """Set Ray to join a running cluster (``RAY_ADDRESS`` is set, or there are several nodes), or to start its own."""
    ray_init = config.ray_kwargs.ray_init
    if ray_init.get("address") not in (None, "auto", "local"):
        give_up(f"invalid ray_kwargs.ray_init.address={ray_init.address}: set RAY_ADDRESS instead.")
    with open_dict(config):
        if joins_a_cluster(config):
            ray_init.address = "auto"
            ray_init.num_cpus = ray_init.num_gpus = None  # the nodes have set them; Ray refuses them here
        else:
            ray_init.address = "local"
            if ray_init.num_cpus is None:  # with fewer than verl asks for, Ray would wait for ever; it only counts them
                ray_init.num_cpus = max(os.cpu_count() or 1, cpu_demands(config)[0])
            # By default Ray remembers the last 100,000 tasks: its server would grow by a megabyte a step for hours.
            ray_init._system_config = {"task_events_max_num_task_in_gcs": 10_000}


def call_verl(config) -> None:
    """Call verl's entry point with our task runner, and return or exit when training has ended."""
    threading.Thread(target=tell_of_ray, args=(config,), daemon=True).start()
    try:
        run_ppo(config, TaskRunner)
        send("trained")
        return
    except Exception as error:
        with suppress(OSError):  # the disk is full
            traceback.print_exc()
        send("error", reason_of(error))
        wait_for_final_check()
    except KeyboardInterrupt:
        traceback.print_exc()  # to show where training was interrupted
    remove_on_every_node()
    sys.exit(1)


def tell_of_ray(config) -> None:
    """Wait until Ray is up. Tell the parent the id of this job, and whether Ray counts fewer CPUs than verl asks for.

    Ray then waits for ever and says nothing of it. The nodes of a cluster count their own.
    """
    while not ray.is_initialized():  # verl starts it, and calls nothing of ours when it has
        time.sleep(0.2)
    send("ray", ray.get_runtime_context().get_job_id())
    (asked, text), counted = cpu_demands(config), ray.cluster_resources().get("CPU", 0)
    if asked > counted:
        send(
            "info",
            f"Warning: {text}, and it has {counted:g}, so the run would wait for ever. Let Ray count more, or ask for "
            "less: docs/troubleshooting.md, 'Ray waits for CPUs or GPUs'.",
        )


def reason_of(error: Exception) -> str:
    """Return type and message of the original exception in a line, without Ray's layers of tracebacks."""
    cause = getattr(error, "cause", None) or error
    said = str(cause).strip()
    # Ray's first line is a whole sentence, and only details follow. pydantic's goes on in the second.
    text = said if not said.partition("\n")[0].endswith(".") else said.partition("\n")[0]
    return f"{type(cause).__name__}: {textwrap.shorten(text, 300, placeholder=' ...').rstrip('.')}"
