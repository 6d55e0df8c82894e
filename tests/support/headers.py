# SPDX-License-Identifier: Apache-2.0
"""Write weights without data, to check a model that does not exist yet: preflight only reads names and shapes."""

import json
import struct
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LARGEST = 4 << 30  # bytes of a file: safetensors maps each into memory


def write_headers(folder: Path) -> None:
    """Write ``model-N.safetensors`` and their index for the model of ``folder/config.json``: headers without data.

    The files are sparse and have a length of one byte per weight. A run that loads them would train with zeros.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    files: list[dict] = [{}]
    held = 0
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:  # it is stored under another name
            continue
        if held + tensor.numel() > LARGEST:
            files.append({})
            held = 0
        place = [held, held := held + tensor.numel()]
        files[-1][name] = {"dtype": "F8_E4M3", "shape": list(tensor.shape), "data_offsets": place}
    for number, header in enumerate(files):
        text = json.dumps(header).encode()
        with open(folder / f"model-{number}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
    names = {name: f"model-{number}.safetensors" for number, header in enumerate(files) for name in header}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
