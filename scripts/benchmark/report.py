# SPDX-License-Identifier: Apache-2.0
"""The memory and the time of the clip report on a made-up dump of 50 million tokens (600 MB, in a temporary folder).

.venv/bin/python -m scripts.benchmark.report 48          # as 48 updates; 1: as a single one
"""

import resource
import subprocess
import sys
import tempfile
import time

import torch

from recipe.bapo.records.tokens import write_dump
from recipe.bapo.report.facts import report_on

TOKENS, LENGTH, ROWS = 50_000_000, 8192, 64  # of the dump, of a response, responses of a micro-batch


def make_dump(folder: str, updates: int) -> None:
    """Write the dump."""
    generator = torch.Generator().manual_seed(0)
    responses = TOKENS // updates // LENGTH
    about = {"dp_size": 1, "global_batch_size": responses, "loss_mode": "vanilla"}
    about |= {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    for update in range(updates):
        for first in range(0, responses, ROWS):
            rows = min(ROWS, responses - first)
            old_log_prob = -torch.rand(rows, LENGTH, generator=generator)
            log_prob = old_log_prob + 0.3 * torch.randn(rows, LENGTH, generator=generator)
            advantages = torch.randn(rows, 1, generator=generator).expand(rows, LENGTH)
            write_dump(folder, old_log_prob, log_prob, advantages, torch.ones(rows, LENGTH), about, update=update)


def main():
    """Command line. The dump is made by another process, so that its memory is not counted."""
    if sys.argv[1] == "make":
        return make_dump(sys.argv[2], int(sys.argv[3]))
    updates = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "scripts.benchmark.report", "make", folder, str(updates)], check=True)
        began = time.monotonic()
        tokens = report_on(folder)["dump"]["tokens"]
    seconds, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{tokens:,} tokens, {updates} updates: {peak:.2f} GiB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
