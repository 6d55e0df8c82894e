# SPDX-License-Identifier: Apache-2.0
"""Look at the weights of a checkpoint: python weights.py [--ranks] global_step_N/actor.

Prints each weight with a NaN or an infinity, in FSDP's shards and in Hugging Face's files. With ``--ranks`` it prints
how many tensors differ between the files of rank 0 and rank 1. That says something with ``fsdp_size=1`` alone, because
otherwise they are different shards. It unpickles the shards, so give it only checkpoints that you trust.
"""

import argparse
from pathlib import Path

import torch
from safetensors import safe_open


def tensors(folder):
    """Yield file, name and tensor of each weight below a folder. Of a checkpoint of FSDP it is the file's shard."""
    for path in sorted(Path(folder).rglob("model_world_size_*.pt")):
        for name, tensor in torch.load(path, map_location="cpu", weights_only=False).items():
            yield path.name, name, tensor.to_local() if hasattr(tensor, "to_local") else tensor
    for path in sorted(Path(folder).rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield path.name, name, file.get_tensor(name)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("--ranks", action="store_true")
arguments = parser.parse_args()
if not [path for kind in ("model_world_size_*.pt", "*.safetensors") for path in arguments.folder.rglob(kind)]:
    parser.error(f"{arguments.folder} holds neither model_world_size_*.pt nor *.safetensors.")
if arguments.ranks:
    ranks = [{}, {}]
    for file, name, tensor in tensors(arguments.folder):
        for rank in (0, 1):
            if file.endswith(f"_rank_{rank}.pt"):
                ranks[rank][name] = tensor
    if ranks[0].keys() != ranks[1].keys():
        parser.error(f"{arguments.folder} does not hold the same tensors of rank 0 and of rank 1.")
    differ = [name for name in ranks[0] if not torch.equal(ranks[0][name], ranks[1][name])]
    print(len(differ), "of", len(ranks[0]), "tensors differ between rank 0 and 1")
else:
    for file, name, tensor in tensors(arguments.folder):
        if not tensor.isfinite().all():
            print(file, name)
