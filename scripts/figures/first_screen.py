# SPDX-License-Identifier: Apache-2.0
"""Draw the README's picture: clipping with moving bounds, and what the bounds did in a run of the example's model.

.venv/bin/python -m scripts.figures.first_screen          # docs/figures/bapo.png, from docs/results/
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from bapo import BAPOConfig  # noqa: E402
from scripts.study.example import ROOT, UPDATES, example_settings  # noqa: E402

FIXED = 0.8, 1.2  # PPO's usual range
UPPER, LOWER = "#0072B2", "#D55E00"  # Okabe-Ito; the styles tell them apart in greyscale
LIMITS = (0.1, 3.4), (-2.0, 3.3)  # of the ratio and the surrogate


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's objective for one token, ``min(r*A, clip(r, low, high)*A)``."""
    return min(ratio * advantage, min(max(ratio, low), high) * advantage)


def recorded_run() -> list[dict[str, float]]:
    """The updates of the run."""
    return [json.loads(line) for line in UPDATES.read_text().splitlines()]


def draw_surrogate(axis) -> None:
    """The surrogate against the ratio for A = 1 and A = -1, and the ranges in which its bounds move."""
    config = BAPOConfig()
    ratios = [LIMITS[0][0] + 0.01 * k for k in range(331)]
    sides = (
        (1, UPPER, config.ratio_upper_start, config.ratio_upper_max),
        (-1, LOWER, config.ratio_lower_start, config.ratio_lower_max),
    )
    for sign, colour, start, end in sides:
        axis.fill_between([start, end], 0, LIMITS[1][sign > 0], color=colour, alpha=0.13, linewidth=0)
        bounds = [(FIXED[0], start), (FIXED[0], end)] if sign > 0 else [(start, FIXED[1]), (end, FIXED[1])]
        curves = [[surrogate(ratio, sign, *pair) for ratio in ratios] for pair in bounds]
        axis.fill_between(ratios, *curves, color=colour, alpha=0.32, linewidth=0)
        for curve in curves:
            axis.plot(ratios, curve, color=colour, linewidth=1.2)
        axis.plot(ratios, [surrogate(ratio, sign, *FIXED) for ratio in ratios], color="black", linewidth=2.8)
    axis.axhline(0, color="0.5", linewidth=0.8)
    for x, y, text, colour in (
        (2.1, 2.98, "$c_{high}$ moves in [1.2, 3.0]", UPPER),
        (1.75, -0.42, "$c_{low}$ moves in [0.6, 0.9]", LOWER),
        (2.6, 0.93, "PPO: fixed at [0.8, 1.2]", "black"),
        (0.42, 0.85, "$A = 1$", "black"),
        (1.98, -1.45, "$A = -1$", "black"),
    ):
        axis.text(x, y, text, color=colour, fontsize=16, ha="center", va="center")
    axis.set(xlim=LIMITS[0], ylim=LIMITS[1])
    axis.set_xlabel("importance ratio $r$ of a token", fontsize=15)
    axis.set_ylabel(r"$\min(r A,\ \mathrm{clip}(r, c_{low}, c_{high})\,A)$", fontsize=15)
    axis.set_title("PPO's objective for one token", fontsize=16)


def draw_run(axes) -> None:
    """``c_high``, ``c_low`` and rho in one run, update by update."""
    config, settings = example_settings()
    rows = recorded_run()
    updates = range(1, len(rows) + 1)
    per_batch = settings.mini_batches * settings.epochs
    panels = (
        ("clip_high", UPPER, "$c_{high}$", (1.1, 3.1), [1.2, 2, 3]),
        ("clip_low", LOWER, "$c_{low}$", (0.58, 0.92), [0.6, 0.75, 0.9]),
    )
    for axis, (key, colour, label, limits, ticks) in zip(axes, panels, strict=False):
        axis.step(updates, [row[key] for row in rows], where="mid", color=colour, linewidth=2)
        axis.set(ylim=limits, yticks=ticks)
        axis.set_ylabel(label, fontsize=17, rotation=0, ha="right", va="center")
    start, end = ([row[key] for row in rows] for key in ("positive_contribution_start", "positive_contribution"))
    axes[-1].vlines(updates, start, end, color="black", linewidth=1.2)
    axes[-1].scatter(updates, start, s=22, facecolors="white", edgecolors="black", label="before", zorder=3)
    axes[-1].scatter(updates, end, s=16, color="black", label="after the search", zorder=4)
    target = config.positive_contribution_target
    axes[-1].axhline(target, color="black", linestyle="--", linewidth=1.6, label=rf"target $\rho_0$ = {target:g}")
    axes[-1].set_ylim(0.17, 0.5)
    axes[-1].set_ylabel(r"$\rho$", fontsize=17, rotation=0, ha="right", va="center")
    axes[-1].legend(fontsize=12, ncols=3, loc="lower right", handletextpad=0.3, columnspacing=1)
    axes[-1].set_xlabel("optimizer update", fontsize=15)
    for axis in axes:
        axis.set(xlim=(0, len(rows) + 1), xticks=range(0, len(rows) + 1, per_batch))
        axis.grid(axis="x", alpha=0.6)
    axes[0].set_title(f"A run: {per_batch} updates on each rollout batch", fontsize=16)


def draw(out: Path) -> None:
    """Write the picture."""
    figure = plt.figure(figsize=(8.5, 10.5), constrained_layout=True)  # readable on a narrow screen
    upper, lower = figure.subfigures(2, 1)
    draw_surrogate(upper.subplots())
    axes = lower.subplots(3, 1, sharex=True)
    draw_run(axes)
    for axis in figure.axes:
        axis.tick_params(labelsize=13)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "bapo.png")
    out = parser.parse_args().out
    draw(out)
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
