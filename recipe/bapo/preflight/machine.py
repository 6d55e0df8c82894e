# SPDX-License-Identifier: Apache-2.0
"""Compare the machine with what the config needs: packages, devices, CPUs, other runs and disk.

The machine may be a login node, so what it lacks is a warning, except where a run would wait for ever or mix its
weights with another run's.
"""

import os
import shutil
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf
from ray._private.utils import get_num_cpus

from recipe.bapo.config import is_of_our_trainer, joins_a_cluster
from recipe.bapo.config.memory import BESIDE, GIB, count_parameters, read_needs
from recipe.bapo.config.resources import cpu_demands, pools_of
from recipe.bapo.hook.install import RUN_WITH, verl_version
from recipe.bapo.host.files import latest_checkpoint
from recipe.bapo.host.locks import check_ray_address, claim_machine
from recipe.bapo.preflight import CheckSkipped, CheckWarning
from recipe.bapo.preflight.data import training_steps
from recipe.bapo.preflight.settings import ACTOR, ROLLOUT

VERL = "0.9.1"  # for which our trainer and preflight are written
BYTES = {"model": 4, "optimizer": 8, "hf_model": 2}  # of a checkpoint, by what it saves of a parameter


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """Say which versions are installed. Warn if verl is not the supported one, or one of the others is missing."""
    engine = config.actor_rollout_ref.rollout.name
    # vLLM for CPUs is another package with the same module.
    engines = (f"{engine}-cpu", engine) if on_cpu(config) else (engine, f"{engine}-cpu")
    names = ("torch", "transformers", "ray", next(filter(_version, engines), engines[0]))
    found = {"verl": verl_version(), **{name: _version(name) for name in names}}
    text = ", ".join(f"{name} {version or 'is not installed'}" for name, version in found.items())
    if found["verl"] != VERL:
        text += f"; our trainer and preflight are written for verl {VERL}, and {RUN_WITH}"
    if found["verl"] != VERL or not all(found.values()):
        raise CheckWarning(f"{text}.")
    return text


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus_wanted(config) -> int:
    """Return the number of GPUs that the run needs on this node."""
    # A single machine must fit every pool; a cluster node need only fit one.
    return (min if joins_a_cluster(config) else sum)(gpus for _, _, gpus in pools_of(config))


def check_devices(config) -> str:
    """Compare this node's GPUs with those that the config asks for on each node."""
    pools = pools_of(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    if on_cpu(config):
        return f"{asked}, {os.cpu_count()} cores here"
    there = gpus_here()
    if there < gpus_wanted(config):
        raise CheckWarning(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: the config asks for {asked}, "
            f"and torch {torch.__version__} (CUDA {torch.version.cuda}) finds {there} GPUs here (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')}). If the run is for this node, lower it, update the driver "
            "(CUDA 13 needs 580 or newer), or train on a CPU with VERL_PLATFORM=cpu."
        )
    return f"{asked}, {there} GPUs here"


def check_gpu_memory(config) -> str:
    """Check that a GPU holds the trainer's weights and AdamW's moments beside vLLM's share, and what an update needs.

    The moments appear in the first update. Without room for them, vLLM fails when it wakes up for the next step.
    """
    needs = read_needs(config)
    if needs is None:
        raise CheckSkipped(
            "compared with the model only where FSDP trains on the GPUs that sample, the weights are in a folder, and "
            "nvidia-smi is here"
        )
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    kept, vllm, update, gpu = (number / GIB for number in (needs.kept, share * needs.gpu, needs.update, needs.gpu))
    text = (
        f"a GPU has {gpu:.1f} GiB: {kept:.1f} for weights and AdamW's moments ({needs.parameters:,} parameters on "
        f"{needs.shards} GPU{'s' * (needs.shards > 1)}), {vllm:.1f} for vLLM (gpu_memory_utilization={share}), and an "
        f"update needs {update:.1f} and its activations"
    )
    if kept + vllm <= gpu and needs.can_update:
        return text
    missing = max(kept + vllm, update + BESIDE / GIB) - gpu
    fits = needs.largest_share() if needs.can_update else None
    if fits is not None:
        fix = f"Set {ROLLOUT}.gpu_memory_utilization={fits}"
    else:
        fsdp2 = f"{ACTOR}.strategy=fsdp2 and " if config.actor_rollout_ref.actor.strategy != "fsdp2" else ""
        fix = f"Take more GPUs, or set {fsdp2}{ACTOR}.fsdp_config.offload_policy=true (docs/larger_models.md, Memory)"
    raise CheckWarning(f"{text}: from the first update on {missing:.1f} GiB are missing. {fix}.")


def gpus_here() -> int:
    """Return the number of GPUs that torch finds on this node."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_cpus(config) -> str:
    """Check the number of CPUs that Ray is told to count: with fewer than verl asks it for, Ray waits for ever.

    Ray only counts CPUs and does not reserve them. Where the number is not set, the training process sets one that is
    enough, and with verl's own entry point Ray counts those of the machine.
    """
    if joins_a_cluster(config):
        raise CheckSkipped("the nodes of the Ray cluster count their own")
    demands, given = cpu_demands(config), config.ray_kwargs.ray_init.num_cpus
    asked = sum(demands.values())
    text = f"Ray is asked for {asked} CPUs ({', '.join(f'{count} for {what}' for what, count in demands.items())})"
    counted = get_num_cpus() if given is None and not is_of_our_trainer(config) else given
    is_for_this_node = on_cpu(config) or gpus_here() >= gpus_wanted(config)
    if counted is not None and asked > counted and (given is not None or is_for_this_node):
        raise ValueError(
            f"{text}, and it would wait for ever, because it counts {counted} "
            f"({'of this machine' if given is None else 'by ray_kwargs.ray_init.num_cpus'}): set ray_kwargs.ray_init."
            f"num_cpus={asked}."
        )
    return f"{text}, {os.cpu_count()} CPUs here"


def check_other_runs(config) -> str:
    """Check that the Ray cluster answers or, without one, that no other run is on this machine.

    The vLLM servers of another run could receive this run's weights.
    """
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if address is not None and is_of_our_trainer(config):
        raise ValueError(
            f"invalid ray_kwargs.ray_init.address={address}: set RAY_ADDRESS instead, "
            "or NNODES on a node of a running cluster."
        )
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_disk(config) -> str:
    """Warn if the disk cannot hold the checkpoints that will come: the run would end at one of them, hours later.

    verl keeps all if ``max_actor_ckpt_to_keep`` is null, and with 1 the old one until the new one is complete.
    """
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return "no checkpoints are saved"
    contents = config.actor_rollout_ref.actor.checkpoint.save_contents
    each = count_parameters(Path(config.actor_rollout_ref.model.path)) * sum(BYTES.get(name, 0) for name in contents)
    if not each:
        raise CheckSkipped("the size of a checkpoint is known only where the weights are in a folder")
    folder = Path(trainer.default_local_dir).absolute()
    latest = latest_checkpoint(folder) if trainer.resume_mode == "auto" else None
    steps = training_steps(config) - (int(latest.name.rpartition("_")[2]) if latest else 0)
    coming = max(0, -(-steps // trainer.save_freq))  # the last step is saved, too
    keep = trainer.max_actor_ckpt_to_keep
    most = min(coming, max(2, keep)) if keep else coming
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    kept = "all are kept" if most == coming else f"{most} are kept"
    text = f"{coming} checkpoints of {_size(each)} will come and {kept}, {_size(free)} free"
    if free < most * each:
        raise CheckWarning(
            f"{text} in {folder}: set trainer.default_local_dir to another disk, a larger trainer.save_freq="
            f"{trainer.save_freq}, or a smaller trainer.max_actor_ckpt_to_keep={keep}."
        )
    return text


def _size(count):
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
