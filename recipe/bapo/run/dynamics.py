# SPDX-License-Identifier: Apache-2.0
"""Draw the dynamics of a run: ``python -m recipe.bapo.run.dynamics RUN`` writes ``RUN/dynamics.png``.

The parent of a run draws its picture when it ends, in a process of its own. To change the panels, change ``PANELS``.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.host.files import PICTURE
from recipe.bapo.host.metrics import read_metrics, validation_reward
from recipe.bapo.run import bapo_run

STYLES: Any = ("-", "--")  # of the curves of a panel
VALIDATION = "validation"  # the mean over the data sources, which has no key of its own
# Each panel by its title: its metrics, and how the legend names them.
PANELS = {
    "Reward": {"critic/rewards/mean": "training, mean of the step", VALIDATION: "validation"},
    "Entropy, nats a token": {"actor/entropy": ""},
    "Gradient norm before clipping": {"actor/grad_norm": ""},
    **bapo_run.PANELS,
    "Staleness": {
        "training/off_policy/trajectory_staleness/mean": "versions behind",
        "training/off_policy/trajectory_spans/mean": "versions in a response",
    },
}


@rc_context({"font.size": 12})
def picture(run: Path) -> Figure:
    """Draw a run, given as the folder with its ``metrics.jsonl``.

    Raises:
        ValueError: it has no metrics.
    """
    steps = read_metrics(run)
    if not any("training/global_step" in data for _, data in steps):
        raise ValueError(f"{run} has no metrics: give the folder of a run that made at least one step.")
    figure = Figure(figsize=(13, 10.5), layout="constrained")
    axes = figure.subplots(math.ceil(len(PANELS) / 3), 3)
    for axis, (title, curves) in zip(axes.flat, PANELS.items(), strict=False):
        for (metric, name), style in zip(curves.items(), itertools.cycle(STYLES), strict=False):
            marker = "o" if metric == VALIDATION else ""
            axis.plot(*points_of(steps, metric), style, marker=marker, color="C0", linewidth=2, label=name)
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if len(curves) > 1:
            axis.legend(framealpha=0.6, fontsize=10)
    figure.supxlabel("training step")
    return figure


def points_of(steps: list[tuple[int, dict[str, float]]], metric: str) -> tuple[list[int], list[float]]:
    """Return the steps that logged a metric, and its values."""
    values = [(step, validation_reward(data) if metric == VALIDATION else data.get(metric)) for step, data in steps]
    logged = [(step, value) for step, value in values if value is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def main(run: Path) -> None:
    """Draw a run into its folder."""
    try:
        picture(run).savefig(run / PICTURE, dpi=110)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {' '.join(str(error).split())}")
    print(f"Picture: {run / PICTURE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    main(parser.parse_args().run)
