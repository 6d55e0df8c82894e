# SPDX-License-Identifier: Apache-2.0
"""What is clipped in a run, is it the staleness, and would BAPO's target be in reach: from the run's dumped tokens.

... actor_rollout_ref.actor.policy_loss.token_dump_dir=/data/dump      # in a run of a few steps, any method
.venv/bin/python -m recipe.bapo.report /data/dump                      # table, and /data/dump/report.png
.venv/bin/python -m recipe.bapo.report /data/dump --html report.html --json report.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import Progress

from bapo import BAPOConfig
from recipe.bapo.records.tokens import about_dump, count_files
from recipe.bapo.report.facts import facts
from recipe.bapo.report.measure import measure
from recipe.bapo.report.page import page

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

TARGETS = (0.4, 0.45, 0.5, 0.55)
VERLS_CLIP_RATIO_C = 3.0


def table(report: dict, config: BAPOConfig) -> str:
    """One line per definition and target."""
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
        f"{report['dump']['updates']} updates. rho at start: mean [lowest, highest] over updates, at "
        f"[{config.ratio_lower_start}, {config.ratio_upper_start}]. Where the search stopped: share of updates. "
        "Bounds: mean.",
        "  ".join(text.ljust(width) for text, width in zip(head, widths, strict=True)),
    ]
    for rho in report["rho"]:
        start = rho["start"]
        for row in rho["targets"]:
            cells = [
                rho["contribution"],
                rho["token_weight"],
                f"{start['mean']:.3f} [{start['lowest']:.3f}, {start['highest']:.3f}]",
                f"{row['target']:g}",
                *(f"{row[where]:.2f}" for where in ("at_once", "on_the_way", "never")),
                *(f"{row[side]:.3f}" for side in ("c_low", "c_high")),
            ]
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def switches_of(about: dict[str, str]) -> BAPOConfig | None:
    """Those of the run that made the dump; None where it does not say.

    Raises:
        ValueError: they are not those of this version.
    """
    if "switches" not in about:
        return None
    try:
        return BAPOConfig(**json.loads(about["switches"]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"switches={about['switches']} in the dump's metadata are not those of this version: {error}. Dump the "
            "tokens anew."
        ) from error


def report_on(
    folder: Path,
    targets: tuple[float, ...] = TARGETS,
    ranges: dict[str, float] | None = None,
    clip_ratio_c: float | None = None,
    updates_per_rollout_batch: int | None = None,
    after_file: Callable[[], None] = lambda: None,
) -> tuple[dict, BAPOConfig]:
    """The numbers of the report, and the switches whose ranges they are for: the run's own if it searches.

    Args:
        folder: of the dump.
        targets: of the table.
        ranges: values of ``ratio_lower_start`` and so on.
        clip_ratio_c: the run's dual clip; None: as the dump says, else 3.0.
        updates_per_rollout_batch: where the dump does not number its updates.
        after_file: called after each file that was read.

    Raises:
        ValueError: as ``read_dump``, or a range or target is not usable.
    """
    about = about_dump(folder)
    own = switches_of(about)
    searches = own is not None and not own.fixed
    config = replace(own if searches else BAPOConfig(), **(ranges or {}))
    for target in targets:
        replace(config, positive_contribution_target=target)
    if updates_per_rollout_batch is not None and updates_per_rollout_batch < 1:
        raise ValueError(f"--updates-per-rollout-batch={updates_per_rollout_batch} is not usable: give 1 or more.")
    if clip_ratio_c is None:
        clip_ratio_c = float(about.get("clip_ratio_c", VERLS_CLIP_RATIO_C))
    measured = measure(folder, config, clip_ratio_c, own, after_file)
    return facts(measured, config, targets, about, clip_ratio_c, updates_per_rollout_batch), config


def picture(report: dict) -> Figure:
    """A panel per definition: in which share of the updates the search would have stopped where, by target."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), sharex=True, sharey=True, constrained_layout=True)
    for axis, rho in zip(axes.flat, report["rho"], strict=True):
        curve = rho["curve"]
        labels = ("at once: bounds stay at their start", "on the way: bounds adapt", "never: bounds at their maximum")
        shares = (curve["at_once"], curve["on_the_way"], curve["never"])
        axis.stackplot(curve["target"], *shares, labels=labels, colors=("#DDDDDD", "#56B4E9", "#333333"))
        axis.axvline(rho["start"]["mean"], color="#D55E00", linewidth=2.5, linestyle="--", label="mean rho at start")
        axis.set_title(f"contribution={rho['contribution']}, token_weight={rho['token_weight']}", fontsize=12)
        axis.tick_params(labelsize=11)
        axis.margins(0)
    for axis in axes[1]:
        axis.set_xlabel("target (positive_contribution_target)", fontsize=12)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of updates", fontsize=12)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=11)
    return figure


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the folder that token_dump_dir named")
    parser.add_argument("--html", type=Path, help="write the report as a page, in place of the picture")
    parser.add_argument("--json", type=Path, help="write the report's numbers")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="values of rho0 in the table")
    parser.add_argument("--clip-ratio-c", type=float, help="the run's dual clip (default: as the dump says, else 3.0)")
    parser.add_argument("--out", type=Path, help="the picture (default: report.png in the dump's folder)")
    parser.add_argument(
        "--updates-per-rollout-batch",
        type=int,
        help="where the dump does not number its updates: one of another trainer's",
    )
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
    try:
        for path in filter(None, (arguments.html, arguments.json, arguments.out)):  # before the dump is read
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}.")
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("Reading the dump", total=count_files(arguments.dump))
            options = (arguments.clip_ratio_c, arguments.updates_per_rollout_batch, lambda: progress.advance(task))
            report, config = report_on(arguments.dump, tuple(arguments.targets), ranges, *options)
        if report["dump"]["bound_scope"] == "micro_batch":
            print("The run found its bounds per micro-batch; what follows is per update, so the run's own differ.")
        print("\n".join([table(report, config), "", *report["verdict"], report["staleness"] or ""]).rstrip())
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        if arguments.html:
            arguments.html.write_text(page(report, arguments.dump.resolve().name))
            print(f"Report: {arguments.html}")
        if arguments.out or not arguments.html:
            out = arguments.out or arguments.dump / "report.png"
            picture(report).savefig(out, dpi=110)
            print(f"Picture: {out}")
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {error}\n")
