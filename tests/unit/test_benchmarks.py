# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md says of the statistics pass follows from its figures."""

import json
from pathlib import Path

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
