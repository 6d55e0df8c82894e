# SPDX-License-Identifier: Apache-2.0
"""Validation figures with their spread: avg@n per data source, from every response's accuracy."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path


def summarise(data_sources: list[str], uids: list[str], accuracies: list[float]) -> dict[str, dict]:
    """avg@n and the spread between its n passes over the problems, by data source.

    Args:
        data_sources, uids, accuracies: of each response; responses to one problem share its ``uid``. A response without
            an accuracy (None) is left out.

    Returns:
        For each source ``problems``, ``n`` (the fewest responses to a problem), ``mean`` (over problems, of the mean
        over responses), ``std`` (between passes: the k-th responses to all problems make pass k), ``lowest`` and
        ``highest`` pass.
    """
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, uid, accuracy in zip(data_sources, uids, accuracies, strict=True):
        if accuracy is not None:
            by_source[str(source)][str(uid)].append(float(accuracy))
    found = {}
    for source, problems in sorted(by_source.items()):
        passes = [statistics.fmean(responses) for responses in zip(*problems.values(), strict=False)]
        found[source] = {
            "problems": len(problems),
            "n": len(passes),
            "mean": statistics.fmean(map(statistics.fmean, problems.values())),
            "std": statistics.stdev(passes) if len(passes) > 1 else None,
            "lowest": min(passes),
            "highest": max(passes),
        }
    return found


def write(folder: Path, step: int, summary: dict[str, dict]) -> None:
    """Write ``step_<step>.json`` in the run's folder ``validation/``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{step}.json").write_text(json.dumps({"step": step, "sources": summary}, indent=1) + "\n")


def table(path: Path) -> str:
    """For people, of one ``step_<step>.json``."""
    record = json.loads(path.read_text())
    lines = [f"{'data source':<28}{'problems':>9}{'n':>4}{'avg@n':>9}{'std':>9}{'lowest':>9}{'highest':>9}"]
    for source, found in record["sources"].items():
        std = "-" if found["std"] is None else f"{found['std']:.4f}"
        cells = f"{found['mean']:>9.4f}{std:>9}{found['lowest']:>9.4f}{found['highest']:>9.4f}"
        lines.append(f"{source:<28}{found['problems']:>9}{found['n']:>4}{cells}")
    lines.append("std, lowest, highest: between the n passes over the problems, one response each.")
    lines.append(f"JSON: {path}")
    return "\n".join(lines)
