# SPDX-License-Identifier: Apache-2.0
"""Time the clip report of a dump that is larger than most: wall time and the largest memory of the process.

    .venv/bin/python -m scripts.benchmark.replay [--updates 25] [--tokens 2000000]

The dump is made first, in a temporary folder: 12 bytes a token.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

LENGTH = 500  # tokens of a response


def write_dump(folder, updates, tokens, seed=0):
    """``updates`` files of about ``tokens`` tokens each, with log-probs, advantages and lengths as in a run's dump."""
    generator = torch.Generator().manual_seed(seed)
    responses = max(1, tokens // LENGTH)
    for update in range(updates):
        old = -2 * torch.rand(responses * LENGTH, generator=generator)
        log_prob = old + 0.3 * torch.randn(len(old), generator=generator)
        advantages = torch.randn(responses, generator=generator).repeat_interleave(LENGTH)
        lengths = torch.full((responses,), LENGTH, dtype=torch.int32)
        tensors = {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "lengths": lengths}
        save_file(tensors, Path(folder) / f"{update:05d}.safetensors")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each update")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_dump(folder, arguments.updates, arguments.tokens)
        begin = time.perf_counter()
        page, numbers = Path(folder) / "report.html", Path(folder) / "report.json"
        command = [sys.executable, "-m", "recipe.bapo.replay", folder, "--html", page, "--json", numbers]
        subprocess.run(command, check=True)
        took = time.perf_counter() - begin
        megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        print(
            f"\n{arguments.updates * arguments.tokens:,} tokens in {arguments.updates} updates: {took:.0f} s, at most "
            f"{megabytes:,.0f} MB of memory, a page of {page.stat().st_size / 1e3:,.0f} kB"
        )


if __name__ == "__main__":
    main()
