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

from recipe.bapo.records.tokens import write_dump

LENGTH = 500  # tokens of a response


def write_updates(folder, updates, tokens, seed=0):
    """A dump of ``updates`` updates of about ``tokens`` tokens each, every one written as a run's loss writes it."""
    generator = torch.Generator().manual_seed(seed)
    shape = max(1, tokens // LENGTH), LENGTH
    about = {"dp_size": 1, "global_batch_size": shape[0], "clip_ratio_c": 3.0, "bound_scope": "mini_batch"}
    for _ in range(updates):
        old = -2 * torch.rand(shape, generator=generator)
        log_prob = old + 0.3 * torch.randn(shape, generator=generator)
        advantages = torch.randn(shape[0], 1, generator=generator).expand(shape)
        write_dump(folder, old, log_prob, advantages, torch.ones(shape), about)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each update")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_updates(folder, arguments.updates, arguments.tokens)
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
