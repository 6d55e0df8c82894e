# SPDX-License-Identifier: Apache-2.0
"""What the launcher knows of BAPO: the module that trains, the trainer, and what of its metrics is shown.

The parent process imports this module, so it imports neither verl nor torch before they are needed.
"""

from statistics import fmean

NAME = "BAPO"  # the prefix of the worker's sentences in the log
TRAINING = "recipe.bapo.main_bapo"  # the module of the training process
CONFIG_NAME = "bapo_trainer"
SKIPPED = "actor/bapo/skipped"  # share of the updates whose step verl skipped; with BAPO's loss or the monitor
# What a step's line shows, by metric.
IN_A_LINE = {
    "actor/bapo/positive_contribution_start": "  rho {:.3f}",
    "actor/bapo/positive_contribution": " -> {:.3f}",
    "actor/bapo/clip_low": "  BAPO's bounds [{:.3f},",
    "actor/bapo/clip_high": " {:.3f}]",
}
# What the run's picture shows: each panel by its title, with its metrics and how the legend names them.
PANELS = {
    "Positive contribution rho": {
        "actor/bapo/positive_contribution": "at the bounds",
        "actor/bapo/positive_contribution_start": "start",
    },
    "Upper bound, mean of the updates": {"actor/bapo/clip_high": ""},
    "Lower bound, mean of the updates": {"actor/bapo/clip_low": ""},
    "Clipped tokens, share of their sign": {
        "actor/bapo/clipfrac_positive": "positive",
        "actor/bapo/clipfrac_negative": "negative",
    },
    "Saturated searches, share of updates": {"actor/bapo/saturated": ""},
}


def run_trainer(config) -> None:
    """Train, in the process of the task runner. ``config`` is the composed config."""
    from recipe.bapo.run.trainer import BAPOTaskRunner

    BAPOTaskRunner().run(config)


def summary_lines(steps: list[dict[str, float]]) -> list[str]:
    """Format what the search for bounds did in a run, or would have done in a run with another loss, and its cost.

    Args:
        steps: the metrics of the training steps.
    """
    steps = [data for data in steps if "actor/bapo/met_by_moving" in data]
    if not steps:
        return []

    def mean(name):
        return fmean(data[f"actor/bapo/{name}"] for data in steps)

    applied = steps[-1].get("actor/bapo/applied", 1.0) == 1  # otherwise the bounds were only searched
    rho = (mean("positive_contribution_start"), mean("positive_contribution"))
    at_the_bounds = "at the bounds used" if applied else "at the bounds found"
    rows = {
        "updates with the target met at the start": f"{mean('met_at_start'):.0%}",
        "updates with the target met by moving bounds": f"{mean('met_by_moving'):.0%}",
        "updates with a saturated search": f"{mean('saturated'):.0%}",
        "positive contribution (rho)": f"{rho[0]:.3f} at the start, {rho[1]:.3f} {at_the_bounds}",
        "bounds on the ratio": f"[{mean('clip_low'):.3f}, {mean('clip_high'):.3f}]",
    }
    if all("actor/bapo/redone" in data for data in steps):  # records of earlier versions have no costs
        rows["updates with an extra forward pass"] = f"{mean('extra_forward'):.0%}"
        rows["updates that were recomputed"] = f"{mean('redone'):.0%}"
    head = "The search for bounds" if applied else "What BAPO would have done"
    return [f"{head}, mean of all updates:", *(f"  {name:<46}{text}" for name, text in rows.items())]
