# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of the report: one run, or several in the same panels, a color each."""

from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from recipe.bapo.report.findings import TARGETS, Run, clipped_by_bounds, clipped_by_loss, ends_of_search, steps_of

POINTS = 500  # of a curve at most; where there are more steps, a point is a mean over neighboring ones


@rc_context({"font.size": 12})
def picture(runs: dict[str, Run]) -> Figure:
    """Draw runs by name. Each needs at least one update with an advantage."""
    figure = Figure(figsize=(16, 11.5), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    for number, run in enumerate(runs.values()):
        _draw(run, panels, f"C{number}")
    _explain(panels, list(runs.values()))
    names = [Patch(color=f"C{number}", label=name) for number, name in enumerate(runs)]
    figure.legend(handles=names, loc="outside upper center", ncols=2, frameon=False, fontsize=14)
    return figure


def _draw(run, panels, color):
    """Draw the curves of a run."""
    positive, negative, position, rho, ends, targets = panels
    target = run.config.positive_contribution_target
    numbers, steps = _stretches(run.by_step(POINTS)[1])
    clipped = [([clipped_by_bounds(updates) for updates in steps], "-" if run.applied else "--")]
    if not run.applied and run.own_clip is not None:
        clipped = [([clipped_by_loss(run, updates) for updates in steps], "-"), *clipped]
    for shares, style in clipped:
        positive.plot(numbers, [share[0] for share in shares], style, color=color)
        negative.plot(numbers, [share[1] for share in shares], style, color=color)
    places, by_place = _stretches(run.by_position(POINTS))
    of_places = [clipped_by_loss(run, updates) or clipped_by_bounds(updates) for updates in by_place]
    for sign, style in enumerate(("o-", "o--")):
        position.plot(places, [shares[sign] for shares in of_places], style, color=color)
    for axis, name, style in (
        (rho, "positive_contribution_start", "-"),
        (rho, "positive_contribution_highest", "--"),
        (ends, "met_at_start", "-"),
        (ends, "met_by_moving", "-."),
        (ends, "saturated", "--"),
    ):
        axis.plot(numbers, [fmean(updates[name].tolist()) for updates in steps], style, color=color)
    rho.axhline(target, color=color, linestyle=":")
    found = ends_of_search(run, run.config.contribution)
    shares = [found[target] for target in TARGETS]
    at_start, met = [share[0] for share in shares], [share[0] + share[1] for share in shares]
    targets.plot(TARGETS, at_start, "-", color=color)
    targets.fill_between(TARGETS, at_start, met, color=color, alpha=0.35)
    targets.axvline(target, color=color, linestyle=":")


def _stretches(groups):
    """Return the middle of the labels of each group, and the groups' updates."""
    return [(first + last) / 2 for first, last, _ in groups], [updates for *_, updates in groups]


def _explain(panels, runs):
    """Add titles, units and legends."""
    capped = any(run.own_clip and run.own_clip["kind"] == "cap" for run in runs)
    clips = "clipped or capped" if capped else "clipped"
    units = {steps_of(run.updates)[0] for run in runs}
    unit = units.pop() if len(units) == 1 else "training step or call"
    measures = " or ".join(sorted({run.config.contribution for run in runs}))
    by = [_line("-", "by the run's loss"), _line("--", "by the bounds that BAPO would use")]
    by = by[:1] if all(run.applied for run in runs) else by
    explained = [
        (f"Tokens with A > 0: share {clips}", unit, by),
        (f"Tokens with A < 0: share {clips}", unit, by),
        (
            "The same, as a rollout batch is reused",
            "number of the update on its rollout batch",
            [_line("-", "of the tokens with A > 0"), _line("--", "of the tokens with A < 0")],
        ),
        (
            "rho: share of the tokens with A > 0 in the loss",
            unit,
            [_line("-", "at the start of the search"), _line("--", "highest on its path"), _line(":", "target")],
        ),
        (
            "How BAPO's searches end, share of updates",
            unit,
            [
                _line("-", "met at the start"),
                _line("-.", "met by moving bounds"),
                _line("--", "saturated"),
            ],
        ),
        (
            "For which targets would bounds move?",
            f"target (contribution={measures})",
            [
                _line("-", "below: met at the start"),
                Patch(color="0.3", alpha=0.35, label="band: met by moving"),
                Patch(color="none", label="above: saturated"),
                _line(":", "the target"),
            ],
        ),
    ]
    for axis, (title, label, handles) in zip(panels, explained, strict=True):
        axis.set_title(title, loc="left")
        axis.set_xlabel(label)
        axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False, labelspacing=0.2)
        axis.grid(alpha=0.25)
    for axis in panels[:5]:
        few = axis.get_xlim()[1] >= 10_000  # labels of five digits need more room
        axis.xaxis.set_major_locator(MaxNLocator(5 if few else 10, integer=True))
    for axis in (*panels[:3], *panels[4:]):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axis in panels[:3]:
        top = max(axis.get_ylim()[1], 0.01)
        axis.set_ylim(-0.03 * top, top)  # a curve at zero is drawn above the axis
    for axis in panels[4:]:
        axis.set_ylim(-0.03, 1.03)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panels[5].set_ylabel("share of the updates")


def _line(style, label):
    return Line2D([], [], color="0.3", linestyle=style, label=label)
