# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of the search: what it does to one real update.

.venv/bin/python -m scripts.figures.search          # docs/figures/bapo.png

The numbers are those of update 92 of seed 1 on the retry task (docs/results/small_networks.md), with weights that
arrive 32 updates late. ``searched_update`` in this file at commit da96f3b computes them by training that run. The
update was chosen because moving the upper bound a third of its range meets the target, so that both rows show
something.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from bapo import BAPOConfig  # noqa: E402

PICTURE = Path(__file__).parents[2] / "docs" / "figures" / "bapo.png"
UPDATE = {"before": 0.3214, "after": 0.4016, "low": 0.6, "high": 1.8}  # rho before and after its search, the bounds
POSITIVE, NEGATIVE = "#0072B2", "#E69F00"  # Okabe-Ito: blue and orange


def draw_row(axes, title: str, rho: float, target: float, low: float, high: float) -> None:
    """Draw one row: rho as a bar with a line at the target, and the bounds as circles on an axis of the ratio."""
    bar, ratio = axes
    bar.barh(0, rho, color=POSITIVE, height=0.6)
    bar.barh(0, 1 - rho, left=rho, color=NEGATIVE, height=0.6)
    bar.text(rho / 2, 0, f"A > 0: {rho:.0%}", ha="center", va="center", color="white", fontsize=15)
    bar.text((1 + rho) / 2, 0, "A < 0", ha="center", va="center", color="black", fontsize=15)
    bar.plot([target, target], [-0.5, 0.5], color="black", linewidth=3)
    bar.text(target, 0.6, f"target {target:.0%}", ha="center", va="bottom", fontsize=13)
    for share in (0, 1):
        bar.text(share, -0.4, f"{share:.0%}", ha="center", va="top", fontsize=12)
    bar.set(xlim=(-0.3, 1.3), ylim=(-0.7, 0.9))  # another width than the axis of the ratio, which it does not share
    bar.set_title(title, fontsize=16, loc="left")
    bar.axis("off")
    ratio.axhline(0, color="0.6", linewidth=2)
    ratio.plot([low, high], [0, 0], color="black", linewidth=6, solid_capstyle="butt")
    for bound, name in ((low, "low"), (high, "high")):
        ratio.plot(bound, 0, "o", color="white", markeredgecolor="black", markeredgewidth=2.5, markersize=14)
        ratio.text(bound, 0.5, f"$c_{{{name}}}$ = {bound:g}", ha="center", va="bottom", fontsize=14)
    ratio.set(xlim=(0.3, 3.2), ylim=(-0.6, 1.3), yticks=[], xticks=[0.5, 1, 1.5, 2, 2.5, 3])
    ratio.tick_params(labelsize=12)
    for side in ("left", "right", "top"):
        ratio.spines[side].set_visible(False)


def draw(out: Path, update: dict[str, float]) -> None:
    """Draw the picture of an update like ``UPDATE``."""
    config = BAPOConfig()
    figure, axes = plt.subplots(4, 1, figsize=(8.5, 7), constrained_layout=True, height_ratios=[1.3, 1, 1.3, 1])
    start, target = (config.ratio_lower_start, config.ratio_upper_start), config.positive_contribution_target
    draw_row(axes[:2], "Before the search: weighted shares of one update's loss", update["before"], target, *start)
    high, low = round(update["high"], 2), round(update["low"], 2)
    draw_row(axes[2:], "After: the same tokens, with the upper bound raised", update["after"], target, low, high)
    axes[3].set_xlabel("ratio r of a token; clipped above $c_{high}$ if A > 0, below $c_{low}$ if A < 0", fontsize=13)
    figure.suptitle("Too little blue? Raise the upper bound until blue reaches the target.", fontsize=16, weight="bold")
    figure.get_layout_engine().set(hspace=0.08)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main():
    """Draw the picture to the file that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    out = parser.parse_args().out
    draw(out, UPDATE)
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
