# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md says of the statistics pass follows from its figures; bounds from parts of a batch."""

import json
from pathlib import Path

import pytest
import torch

from bapo import BAPOConfig
from recipe.bapo.records.tokens import write_dump
from scripts.benchmark.sampled import agree, agreement

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_says_what_the_updates_took():
    page = (DOCS / "performance.md").read_text()
    text, readme = " ".join(page.split()), (DOCS.parent / "README.md").read_text()
    rows = json.loads((DOCS / "benchmark_update.json").read_text())
    shares = []
    for name, row in rows.items():
        shares.append(row["the pass and the search"] / row["update, marked: no pass"])
        cells = [f"{row[part]:.2f}" for part in ("update, with the pass", "update, marked: no pass")]
        cells += [f"{row['the pass and the search']:.2f}", f"{shares[-1]:.2f}"]
        cells.append(f"{row['the pass, micro-batches of 32']:.2f}")
        assert f"| {name} | {row['weights']:,} | {' | '.join(cells)} |" in page
    said = f"{min(shares):.2f} to {max(shares):.2f}"
    assert f"measured are {said} of an update" in text and f"{said} of an update on a CPU" in readme
    saved = [1 - row["the pass, micro-batches of 32"] / row["the pass alone"] for row in rows.values()]
    assert 0.1 <= round(min(saved), 2) and max(saved) < 0.25 and "save it a tenth to a quarter" in text
    at_ratio_1 = [1000 * row["the search at ratio 1"] for row in rows.values()]
    assert f"in {min(at_ratio_1):.0f} to {max(at_ratio_1):.0f} ms" in text


def test_bounds_agree_to_a_step_of_their_grids():
    config = BAPOConfig(ratio_lower_step=0.02, ratio_upper_step=0.05)
    assert agree((0.6, 1.2), (0.62, 1.25), config) and agree((0.62, 1.25), (0.6, 1.2), config)
    assert not agree((0.6, 1.2), (0.63, 1.2), config) and not agree((0.6, 1.2), (0.6, 1.26), config)


@pytest.mark.parametrize("merge", [1, 2])
def test_the_share_of_updates_in_which_a_part_finds_the_same_bounds(tmp_path, merge):
    # Eight responses of two tokens, ratio 2. Alike, any part is as good; where one of them outweighs all others, a part
    # without it finds other bounds.
    old, ratio, mask = torch.zeros(8, 2), torch.full((8, 2), 2.0), torch.ones(8, 2)
    signs = torch.tensor([1.0, -1.0]).repeat(8, 1)
    about = {"dp_size": 1, "global_batch_size": 8, "clip_ratio_c": 3.0, "bound_scope": "mini_batch"}
    weights = {"alike": torch.ones(8, 1), "one": torch.tensor([1e6] + 7 * [1.0])[:, None]}
    found = {}
    for name, weight in weights.items():
        advantages = signs * weight
        if name == "one":
            advantages[0] = torch.tensor([1e6, -0.1])
        for _ in range(4):
            write_dump(tmp_path / name, old, ratio.log(), advantages, mask, about)
        found[name] = agreement(tmp_path / name, [0.45], merge)["value", "uniform", 0.45]
    assert found["alike"] == {2: 1.0, 4: 1.0, 8: 1.0}
    assert min(found["one"].values()) < 1
