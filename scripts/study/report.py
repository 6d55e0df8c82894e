# SPDX-License-Identifier: Apache-2.0
"""Pictures and the generated part of docs/results.md from docs/results/second_study.parquet."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from scripts.study import analysis, figures
from scripts.study.agreement import agreement
from scripts.study.plan import RATES, RESULTS, ROOT, TABLE, cells

PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- made by scripts/study/report.py: begin -->", "<!-- made by scripts/study/report.py: end -->"
CLIPS = {"norm_clip": float, "dual_clip": float}
MAIN = ["grpo", "widest", "bapo@0.4", "topr"]


def paper_figures(frame: pd.DataFrame, folder: Path) -> list[tuple[str, str]]:
    """Equivalents of the paper's Figures 2, 7, 8, 9, 11 and 12; returns their names and captions.

    Map B without dual clip at the middle learning rate, 16 epochs; Figure 12 from partial rollout.
    """
    rate, rates = RATES["B", "adamw"][1], RATES["C", "adamw"]
    b = analysis.of_map(frame, "B", "chain")
    b = b[(b["dual_clip"] == 0) & (b["learning_rate"] == rate)]
    stale = b[b["staleness"] == b["staleness"].max()]
    c = analysis.of_map(frame, "partial", "chain")
    c = c[(c["learning_rate"] == rates[0]) & (c["staleness"] == c["staleness"].max())]
    reward = {"reward_series": "reward", "entropy_series": "entropy (nats)"}
    bounds = ["figure7_low", "grpo", "figure7_high"]
    rho = {"rho_series": "rho at the bounds (Eq. 8)", **reward}
    if b.empty or c.empty:
        return []
    at = f"Map B, AdamW {rate:g}, norm clip 1, no dual clip"
    figures.draw_breaking(b, folder / "figure2.png")
    figures.curves(stale, bounds, reward, "Fixed bounds (the paper's Figure 7)", folder / "figure7.png")
    figures.draw_bounds(stale, folder / "figure8.png")
    figures.curves(stale, ["grpo", "widest", "bapo@0.4"], rho, "rho (the paper's Figure 9)", folder / "figure9.png")
    figures.draw_by_staleness(b, MAIN, folder / "figure11.png")
    title = "Partial rollout (the paper's Figure 12)"
    figures.curves(c, ["grpo", "widest", "bapo@0.4"], reward, title, folder / "figure12.png")
    band = "Median over seeds, band between quartiles."
    grpo = b[b["method"] == "grpo"].groupby("staleness")[["final_reward", "entropy"]].mean()
    breaking = "; ".join(
        f"{n} epoch{'s' * (n > 1)}: reward {row.final_reward:.2f}, {row.entropy:.2f} nats" for n, row in grpo.iterrows()
    )
    fixed = stale.groupby("method")[["final_reward", "entropy"]].mean()
    fixed_ends = "; ".join(
        f"{analysis.LABELS[name]}: reward {fixed.final_reward[name]:.2f}, {fixed.entropy[name]:.2f} nats"
        for name in bounds
        if name in fixed.index
    )
    ends = stale[stale["method"] == "bapo@0.4"][["at_once", "on_the_way", "out_of_reach"]].mean()
    stops = ", ".join(f"{value:.2f} {name.replace('_', ' ')}" for name, value in ends.items())
    words = analysis.means_in_words
    return [
        ("figure2", f"{at}: GRPO by epochs. {band} Mean at the end: {breaking}."),
        ("figure7", f"{at}, 16 epochs: fixed bounds. {band} Mean at the end: {fixed_ends}."),
        (
            "figure8",
            f"{at}, 16 epochs: mean bounds, and where their searches ended. {band} BAPO 0.4: {stops}.",
        ),
        (
            "figure9",
            f"{at}, 16 epochs: rho over training, between runs. {band} Mean: {words(stale, 'rho_value', '{:.3f}')}.",
        ),
        (
            "figure11",
            f"{at}: methods by epochs. Means over seeds. Final reward with 16: "
            f"{words(stale, 'final_reward', '{:.3f}')}.",
        ),
        (
            "figure12",
            f"Partial rollout over {int(c['staleness'].max())} updates, AdamW {rates[0]:g}. {band} Mean reward: "
            f"{words(c, 'mean_reward', '{:.3f}')}.",
        ),
    ]


def without_unfinished(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The table without the methods that lack cells in a panel, and a sentence that says so; "" where none does."""
    panel_of = [*analysis.PANEL, "method"]
    planned = pd.DataFrame([vars(cell) for cell in cells()]).fillna({"norm_clip": 0, "dual_clip": 0}).astype(CLIPS)
    size = planned.groupby(panel_of).size().rename("planned").reset_index()
    there = frame.groupby(panel_of)["cell"].nunique().rename("there").reset_index()
    frame = frame.merge(size, on=panel_of, how="left").merge(there, on=panel_of)
    whole = frame[frame["planned"].isna() | (frame["there"] >= frame["planned"])]
    if whole["cell"].nunique() >= len(planned):
        return frame, ""
    count = f"{frame['cell'].nunique():,} of {len(planned):,}"
    return whole, f"{count} cells are there; methods that lack cells in a panel are left out."


def generated(frame: pd.DataFrame, pictures: list[tuple[str, str]], unfinished: str = "") -> str:
    """The generated part of docs/results.md."""
    lines = [BEGIN, "", *([unfinished, ""] if unfinished else []), analysis.control_line(frame), ""]
    lines += ["### Primary tests", "", *analysis.primary_table(frame)]
    lines += ["### Runs that failed", "", *analysis.failing_table(frame)]
    for (map, task), name in analysis.MAP_NAMES.items():
        rows = analysis.of_map(frame, map, task)
        cells_there = rows.groupby("method")["cell"].transform("nunique")
        rows = rows[cells_there == cells_there.max()]  # means over the same cells
        if len(rows):
            lines += [f"### Map {name}: means", "", *analysis.means_table(rows)]
    lines += agreement(frame)
    lines += ["### Pictures", "", "A panel in which less than a run in twenty fails has no map of failures.", ""]
    for name, caption in pictures:
        lines += [f"![{caption.split('. ')[0]}](results/{name}.png)", "", caption, ""]
    return "\n".join([*lines, END])


def report(table: Path = TABLE, page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Write the pictures to ``folder`` and the generated part into ``page``."""
    if not table.exists():
        print(f"{table} is not there: nothing to report.")
        return
    frame, unfinished = without_unfinished(analysis.read_table(table))
    figures.draw_summary(frame, folder / "summary.png")
    pictures = [*figures.draw_maps(frame, folder), *paper_figures(frame, folder)]
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + generated(frame, pictures, unfinished) + rest.split(END, 1)[1])
    print(f"Written: {page} and {len(pictures)} pictures in {folder}")
