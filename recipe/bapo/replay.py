# SPDX-License-Identifier: Apache-2.0
"""Choose rho0 from your own data: what every definition of the contribution would have measured, and which bounds every
target would have chosen, on the tokens of a run that was dumped.

    ... actor_rollout_ref.actor.policy_loss.token_dump_dir=/data/dump      # in a run of a few steps, any method
    .venv/bin/python -m recipe.bapo.replay /data/dump                      # table, and /data/dump/replay.png
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from bapo import BAPOConfig, ClipStatistics, collect_clip_statistics, search_clip_bounds  # noqa: E402
from recipe.bapo.records.tokens import about_dump, read_dump  # noqa: E402

DEFINITIONS = [(c, w) for c in ("value", "gradient") for w in ("rollout_prob", "uniform")]
TARGETS = (0.4, 0.45, 0.5, 0.55)
VERLS_CLIP_RATIO_C = 3.0
CURVE = [0.25 + 0.01 * k for k in range(51)]  # targets of the picture


def statistics_of(folder: Path, config: BAPOConfig, clip_ratio_c: float | None) -> dict[tuple[str, str], list]:
    """For each definition the ``ClipStatistics`` of every update of a dump; measure and target do not enter them.

    Raises:
        ValueError: the dump cannot be read or holds non-finite values.
    """
    by_weight: dict[str, list[ClipStatistics]] = {"rollout_prob": [], "uniform": []}
    for update in read_dump(folder):
        for token_weight, of_weight in by_weight.items():
            measured = replace(config, token_weight=token_weight)
            total = ClipStatistics.zeros(measured)
            for tokens in update:
                rows = [tokens[name].unsqueeze(0) for name in ("old_log_prob", "log_prob", "advantages")]
                mask = torch.ones_like(rows[0], dtype=torch.bool)
                total = total + collect_clip_statistics(*rows, mask, measured, clip_ratio_c)
            of_weight.append(total)
    return {(contribution, token_weight): by_weight[token_weight] for contribution, token_weight in DEFINITIONS}


def search(statistics: list[ClipStatistics], config: BAPOConfig) -> dict[str, list[float]]:
    """The values of ``ClipBounds.read`` for every update."""
    values = [search_clip_bounds(update, config).read() for update in statistics]
    return {key: [value[key] for value in values] for key in values[0]}


def outcomes(found: dict[str, list[float]]) -> tuple[float, float, float]:
    """Shares of the updates in which the search stopped at once, on its way, and never."""
    updates = len(found["saturated"])
    never = sum(found["saturated"]) / updates
    at_once = sum(steps == 0 and not out for steps, out in zip(found["search_steps"], found["saturated"], strict=True))
    return at_once / updates, 1 - never - at_once / updates, never


def table(measured: dict, config: BAPOConfig, targets: tuple[float, ...]) -> str:
    """One line per definition and target."""
    updates = len(next(iter(measured.values())))
    head = (
        "contribution",
        "token weight",
        "rho at start",
        "target",
        "at once",
        "on the way",
        "never",
        "c_low",
        "c_high",
    )
    widths = (12, 12, 20, 6, 7, 10, 6, 6, 6)
    lines = [
        f"{updates} updates. rho at start: mean [lowest, highest] over updates, at [{config.ratio_lower_start}, "
        f"{config.ratio_upper_start}]. Where the search stopped: share of updates. Bounds: mean.",
        "  ".join(text.ljust(width) for text, width in zip(head, widths, strict=True)),
    ]
    for (contribution, token_weight), statistics in measured.items():
        for target in targets:
            switches = dict(contribution=contribution, token_weight=token_weight, positive_contribution_target=target)
            found = search(statistics, replace(config, **switches))
            start = found["positive_contribution_start"]
            cells = [
                contribution,
                token_weight,
                f"{sum(start) / updates:.3f} [{min(start):.3f}, {max(start):.3f}]",
                f"{target:g}",
                *(f"{share:.2f}" for share in outcomes(found)),
                *(f"{sum(found[side]) / updates:.3f}" for side in ("low", "high")),
            ]
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def draw(measured: dict, config: BAPOConfig, out: Path) -> None:
    """A panel per definition: in which share of the updates the search would have stopped where, by target."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), sharex=True, sharey=True, constrained_layout=True)
    for axis, ((contribution, token_weight), statistics) in zip(axes.flat, measured.items(), strict=True):
        definition = replace(config, contribution=contribution, token_weight=token_weight)
        shares = [
            outcomes(search(statistics, replace(definition, positive_contribution_target=target))) for target in CURVE
        ]
        labels = ("at once: bounds stay at their start", "on the way: bounds adapt", "never: bounds at their maximum")
        axis.stackplot(CURVE, *zip(*shares, strict=True), labels=labels, colors=("#DDDDDD", "#56B4E9", "#333333"))
        start = search(statistics, definition)["positive_contribution_start"]
        axis.axvline(sum(start) / len(start), color="#D55E00", linewidth=2.5, linestyle="--", label="mean rho at start")
        axis.set_title(f"contribution={contribution}, token_weight={token_weight}", fontsize=12)
        axis.tick_params(labelsize=11)
        axis.margins(0)
    for axis in axes[1]:
        axis.set_xlabel("target (positive_contribution_target)", fontsize=12)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of updates", fontsize=12)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=11)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the folder that token_dump_dir named")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="values of rho0 in the table")
    parser.add_argument("--clip-ratio-c", type=float, help="the run's dual clip (default: as the dump says, else 3.0)")
    parser.add_argument("--out", type=Path, help="the picture (default: replay.png in the dump's folder)")
    for name in ("lower", "upper"):
        parser.add_argument(
            f"--{name}", type=float, nargs=3, metavar=("START", "MAX", "STEP"), help=f"range and step of c_{name[:-2]}"
        )
    arguments = parser.parse_args()
    ranges = {
        f"ratio_{side}_{part}": value
        for side in ("lower", "upper")
        for part, value in zip(("start", "max", "step"), getattr(arguments, side) or (), strict=False)
    }
    out = arguments.out or arguments.dump / "replay.png"
    try:
        config = BAPOConfig(**ranges)
        for target in arguments.targets:
            replace(config, positive_contribution_target=target)
        about = about_dump(arguments.dump)
        clip_ratio_c = arguments.clip_ratio_c or float(about.get("clip_ratio_c", VERLS_CLIP_RATIO_C))
        measured = statistics_of(arguments.dump, config, clip_ratio_c)
        if about.get("bound_scope") == "micro_batch":
            print("The run found its bounds per micro-batch; what follows is per update, so the run's own differ.")
        print(table(measured, config, tuple(arguments.targets)))
        draw(measured, config, out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {error}\n")
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
