# SPDX-License-Identifier: Apache-2.0
"""Pretend that this machine has GPUs, and make folders of models of known sizes without their weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

from support.headers import write_headers

from recipe.bapo.preflight import machine

SHAPES = {  # published: hidden, layers, feed-forward, heads, key and value heads, vocabulary, tied embeddings
    "0.5B": (896, 24, 4864, 14, 2, 151936, True),
    "1.5B": (1536, 28, 8960, 12, 2, 151936, True),
    "3B": (2048, 36, 11008, 16, 2, 151936, True),
    "7B": (3584, 28, 18944, 28, 4, 152064, False),
    "32B": (5120, 64, 27648, 40, 8, 152064, False),
}

DRIVER_FILES = (
    Path("dev/nvidia0"),
    Path("dev/dxg"),
    Path("proc/driver/nvidia/version"),
)  # these show that there is a driver
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*index,compute_cap*) {rows} ;;
*memory.total,memory.reserved*) {memory} ;;
*) {names} ;;
esac
"""


def write_nvidia_smi(folder, gpus=8, gibibytes=79.6):
    """Write an ``nvidia-smi`` that lists ``gpus`` H100s to a folder for ``PATH``; of each 500 MiB are reserved."""
    rows = "; ".join(f"echo '{number}, 9.0, NVIDIA H100'" for number in range(gpus))
    names = "; ".join(f"echo 'GPU {number}: NVIDIA H100 (UUID: GPU-{number}a)'" for number in range(gpus))
    memory = "; ".join([f"echo '{round(1024 * gibibytes) + 500}, 500'"] * gpus)
    (folder / "nvidia-smi").write_text(NVIDIA_SMI.format(rows=rows, names=names, memory=memory))
    (folder / "nvidia-smi").chmod(0o755)


def write_driver_file(root, name):
    """Write one of ``DRIVER_FILES`` below ``root``, which replaces ``/``. Returns ``root``."""
    (root / name).parent.mkdir(parents=True)
    (root / name).touch()
    return root


def pretend_gpus(monkeypatch, gpus=8, cpus=64):
    """Make torch and the system answer as on a machine with these GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(machine, "get_num_cpus", lambda: cpus)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 50))


def write_model(task, folder, name):
    """Write a Qwen2 of the shape ``name`` without weights: config, tokenizer, weight headers. Returns ``folder``."""
    hidden, layers, feed_forward, heads, groups, vocabulary, tied = SHAPES[name]
    if not folder.exists():
        shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((task / "model" / "config.json").read_text())
    config |= {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": feed_forward}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary}
    config |= {"tie_word_embeddings": tied, "max_position_embeddings": 131072}
    config = {key: value for key, value in config.items() if key not in ("head_dim", "layer_types")}
    (folder / "config.json").write_text(json.dumps(config))
    write_headers(folder)
    return folder
