# SPDX-License-Identifier: Apache-2.0
"""Look at the machine before anything of verl or Ray is imported: its GPUs, flash-attn, and its system."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Count the GPUs that nvidia-smi lists and ``CUDA_VISIBLE_DEVICES`` allows."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    listed = len(re.findall("^GPU", said, re.M))
    if "CUDA_VISIBLE_DEVICES" in environment:  # nvidia-smi lists all GPUs, whatever this variable says
        named = [one.strip() for one in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        listed = min(listed, len([one for one in named if one and not one.startswith("-")]))
    return listed


def has_flash_attn() -> bool:
    """Whether flash-attn 2 can be imported; flash-attn-4 alone is a package ``flash_attn``, too."""
    try:
        importlib.import_module("torch")
        importlib.import_module("flash_attn_2_cuda")
    except ImportError:
        print(
            "flash-attn cannot be imported, so torch's own flash attention is used: platform=gpu_varlen.",
            file=sys.stderr,
        )
        return False
    return True


def system_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without which vLLM fails on this system."""
    # FlashInfer's sampler, which vLLM takes for top_p below 1, compiles with nvcc and ends the server without one.
    found = {"VLLM_USE_FLASHINFER_SAMPLER": environment.get("VLLM_USE_FLASHINFER_SAMPLER", "0")}
    if "microsoft" in os.uname().release.lower():  # vLLM's runner needs pinned memory, which it turns off in WSL2
        found["VLLM_WSL2_ENABLE_PIN_MEMORY"] = environment.get("VLLM_WSL2_ENABLE_PIN_MEMORY", "1")
    return found
