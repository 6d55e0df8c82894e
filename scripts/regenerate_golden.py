# SPDX-License-Identifier: Apache-2.0
"""Recompute the expected values of tests/golden from a checkout of the authors' repository.

    git clone https://github.com/WooooDyy/BAPO /tmp/theirs && git -C /tmp/theirs checkout 7287044
    VERL_PLATFORM=cpu .venv/bin/python scripts/regenerate_golden.py /tmp/theirs

This stores the new values and prints how far the old ones were off. Their ``recipe/bapo/policy_loss.py`` runs
unchanged, on the stored inputs, with the helpers of the installed verl.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

COMMIT = "7287044"
STORED = Path(__file__).parents[1] / "tests" / "golden" / "authors_small.json"
ARRAYS = STORED.with_suffix(".npz")


def compute(policy_loss, case, arrays):
    """Compute their loss with its metrics on a case's inputs, and its gradient with respect to the log-probs."""
    inputs = (arrays[f"{case['case']}_{name}"] for name in ("old", "lp", "adv", "mask"))
    old, log_prob, advantages, mask = map(torch.tensor, inputs)
    ranges = {f"ratio_{name}": value for name, value in case.items() if name.startswith(("lower_", "upper_"))}
    switches = SimpleNamespace(**ranges, adv_ratio_target=case["pos_neg_target"], eps=1e-8)
    config = SimpleNamespace(policy_loss=switches, get={"clip_ratio_c": case["clip_ratio_c"]}.get)
    loss, *metrics = policy_loss(old, log_prob.requires_grad_(), advantages, mask, config=config)
    loss.backward()
    found = dict(zip(("loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"), (loss, *metrics), strict=True))
    (bounds,) = switches._bapo_metrics_buffer
    return bounds | {name: value.item() for name, value in found.items()}, log_prob.grad.numpy()


def main(checkout):
    """Recompute the stored figures with the authors' code in ``checkout``, and say how far they were off."""
    head = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True)
    if not head.startswith(COMMIT):
        sys.exit(f"Error: {checkout} is at {head[:7]}: check out {COMMIT}.")
    theirs = runpy.run_path(f"{checkout}/recipe/bapo/policy_loss.py")["compute_policy_loss_bapo"]
    cases, arrays = json.loads(STORED.read_text()), dict(np.load(ARRAYS))
    off = []
    for case in cases:
        found, gradient = compute(theirs, case, arrays)
        old = [float(case[name]) for name in found]  # "inf" if no token is negative
        off.append(np.abs(np.nan_to_num(list(found.values())) - np.nan_to_num(old)).max())
        off.append(np.abs(gradient - arrays[f"{case['case']}_grad"]).max())
        case.update({name: value if np.isfinite(value) else str(value) for name, value in found.items()})
        arrays[f"{case['case']}_grad"] = gradient
    STORED.write_text(json.dumps(cases, indent=0) + "\n")
    np.savez_compressed(ARRAYS, **arrays)
    print(f"{len(cases)} cases; the stored figures were off by at most {max(off):.2g}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
