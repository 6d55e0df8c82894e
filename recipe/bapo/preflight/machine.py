# SPDX-License-Identifier: Apache-2.0
"""Compare the machine with what the config needs: GPUs and their memory, CPUs, other runs and disk.

The machine may be a login node, so what it lacks is a warning, except where a run would wait for ever or mix its
weights with another run's.
"""

import os
import shutil
from pathlib import Path

import torch
from ray._private.utils import get_num_cpus

from recipe.bapo.config import is_of_our_trainer, joins_a_cluster
from recipe.bapo.config.memory import BESIDE, GIB, count_parameters, read_needs
from recipe.bapo.config.resources import cpu_demands, pools_of
from recipe.bapo.hook.verl_version import RUN_WITH, verl_version
from recipe.bapo.host.locks import check_ray_address, claim_machine
from recipe.bapo.preflight import CheckSkipped, CheckWarning
from recipe.bapo.preflight.settings import ACTOR, ROLLOUT

VERL = "0.9.1"  # for which our trainer and preflight are written
BYTES = {"model": 4, "optimizer": 8, "hf_model": 4}  # of a checkpoint, by what it saves of a parameter


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """Say which verl and how many GPUs are here. Warn of a verl for which this is not written."""
    asked = " and ".join(f"{nodes * gpus} to {verb}" for verb, nodes, gpus in pools_of(config))
    text = f"verl {verl_version()}, torch {torch.__version__}; GPUs: {asked}"
    text += "" if on_cpu(config) else f"; {torch.cuda.device_count()} are here"
    if verl_version() != VERL:
        raise CheckWarning(f"{text}; our trainer and preflight are written for verl {VERL}, and {RUN_WITH}.")
    return text


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


def check_cpus(config) -> str:
    """Check the number of CPUs that Ray is told to count: with fewer than verl asks it for, Ray waits for ever.

    Ray only counts CPUs and does not reserve them. Where the number is not set, our trainer has it count enough, and
    with verl's own entry point Ray counts those of the machine that trains.
    """
    if joins_a_cluster(config):
        raise CheckSkipped("the nodes of the Ray cluster count their own")
    (asked, text), given = cpu_demands(config), config.ray_kwargs.ray_init.num_cpus
    fix = f"set ray_kwargs.ray_init.num_cpus={asked}"
    if given is not None and asked > given:
        raise ValueError(f"{text}, and it would wait for ever with ray_kwargs.ray_init.num_cpus={given}: {fix}.")
    counted = get_num_cpus()
    if given is None and not is_of_our_trainer(config) and asked > counted:
        trains_here = on_cpu(config) or torch.cuda.is_available()  # otherwise this may be a login node
        kind = ValueError if trains_here else CheckWarning
        raise kind(f"{text}, and on a machine with {counted}, as this one, it would wait for ever: {fix}.")
    return text


def check_other_runs(config) -> str:
    """Check that the Ray cluster answers or, without one, that no other run is on this machine.

    The vLLM servers of another run could receive this run's weights.
    """
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_disk(config) -> str:
    """Warn if the disk cannot hold the checkpoints that are kept, or two: the run would end at one, hours later.

    verl keeps all if ``max_actor_ckpt_to_keep`` is null, and with 1 the old one until the new one is complete.
    """
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return "no checkpoints are saved"
    model, contents = config.actor_rollout_ref.model, set(config.actor_rollout_ref.actor.checkpoint.save_contents)
    if model.get("lora_rank") or (model.get("lora") or {}).get("rank"):
        contents.discard("optimizer")  # the adapter's parameters are few
    each = count_parameters(Path(model.path)) * sum(BYTES.get(name, 0) for name in contents) / GIB
    if not each:
        raise CheckSkipped("the size of a checkpoint is known only where the weights are in a folder")
    folder = Path(trainer.default_local_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / GIB
    keep = trainer.max_actor_ckpt_to_keep
    text = (
        f"a checkpoint of the actor has {each:.3g} GiB, {keep or 'all'} are kept (trainer.max_actor_ckpt_to_keep), and "
        f"{free:.3g} GiB are free in {folder}"
    )
    needed = max(2, keep or 0)
    if free < needed * each:
        raise CheckWarning(f"{text}, which is no room for {needed}: set trainer.default_local_dir to another disk.")
    return text
