# SPDX-License-Identifier: Apache-2.0
"""What verl asks Ray for with a config: GPUs by what they do, and CPUs."""

from verl.single_controller.ray.base import ResourcePoolManager
from verl.trainer.distillation import is_distillation_enabled

CPUS_PER_ROLLOUT_GPU = 2  # verl/workers/rollout/replica.py:205


def pools_of(config) -> list[tuple[str, int, int]]:
    """Return ``(verb, nodes, GPUs per node)`` of the GPUs that train, and of others that sample, score or teach."""
    trainer, rollout, scorer = config.trainer, config.actor_rollout_ref.rollout, config.reward.reward_model
    teacher = config.get("distillation")
    pools = [("train", trainer.nnodes, trainer.n_gpus_per_node)]
    if trainer.use_v1 and trainer.v1.trainer_mode == "separate_async":
        pools.append(("sample", rollout.nnodes, rollout.n_gpus_per_node))
    if scorer.enable_resource_pool:
        pools.append(("score", scorer.nnodes, scorer.n_gpus_per_node))
    if is_distillation_enabled(teacher):
        pools.append(("teach", teacher.nnodes, teacher.n_gpus_per_node))
    return pools


def cpu_demands(config) -> tuple[int, str]:
    """Return the number of CPUs that verl asks Ray for, and a text that says what for."""
    queue, reward = config.transfer_queue.backend, config.reward
    demands = {"the transfer queue's controller": 1} if config.trainer.use_v1 else {}
    if config.trainer.use_v1 and queue.storage_backend == "SimpleStorage":
        demands["its storage units"] = queue.SimpleStorage.num_data_storage_units
    for verb, nodes, gpus in pools_of(config):
        each = CPUS_PER_ROLLOUT_GPU if verb == "sample" else ResourcePoolManager.max_colocate_count
        demands[f"{nodes * gpus} GPU{'s' * (nodes * gpus > 1)} to {verb}"] = each * nodes * gpus
    if reward.reward_manager.name == "remote":  # each worker starts as many workers again
        demands["reward workers"] = reward.num_workers**2
    asked = sum(demands.values())
    parts = ", ".join(f"{count} for {what}" for what, count in demands.items())
    return asked, f"verl asks Ray for {asked} CPUs ({parts})"
