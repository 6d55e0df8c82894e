# SPDX-License-Identifier: Apache-2.0
"""Draw the curves of methods for a paper: the mean over runs, and its 95 % interval as a band."""

from collections.abc import Iterator

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.table.runs import CURVES, Measure, Run
from recipe.bapo.table.statistics import half_width, values_by_step

WIDTH = 6.75  # inches, a page of ICML; an \includegraphics of the text's width keeps the font readable
COLUMNS = 3
# Okabe-Ito: to be told apart by colour-blind readers, and by style in black and white.
COLORS = ("#0072B2", "#000000", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def panels(methods: dict[str, list[Run]]) -> Iterator[tuple[str, dict[str, dict[int, list[float]]]]]:
    """Yield the title of each panel, and the values of all runs of each method by step."""
    for measure in sorted({m for runs in methods.values() for run in runs for m in run.validations if m.is_mean}):
        yield _title(measure), {method: values_by_step(runs, measure) for method, runs in methods.items()}
    for metric, title in CURVES.items():
        series = {}
        for method, runs in methods.items():
            steps = set.intersection(*(set(run.curves[metric]) for run in runs))
            series[method] = {step: [run.curves[metric][step] for run in runs] for step in sorted(steps)}
        if any(series.values()):
            yield title, series


def _title(measure: Measure) -> str:
    return f"{measure.source}, {measure.name}"


@rc_context({"font.size": 8, "axes.titlesize": 8, "axes.linewidth": 0.6, "pdf.fonttype": 42})
def picture(methods: dict[str, list[Run]]) -> Figure:
    """Draw a panel for each data set, and those of the training reward and the entropy where they were logged."""
    drawn = list(panels(methods))
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, (title, series) in zip(axes, drawn, strict=False):
        for number, (method, values) in enumerate(series.items()):
            style = {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number % len(STYLES)]}
            steps, means = list(values), np.array([np.mean(one) for one in values.values()])
            axis.plot(steps, means, linewidth=1.2, label=method, **style)
            widths = np.array([half_width(one) for one in values.values()])
            if not np.isnan(widths).all():
                axis.fill_between(steps, means - widths, means + widths, color=style["color"], alpha=0.15, linewidth=0)
        axis.set_title(title)
        axis.set_xlabel("training step")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods), frameon=False)
    return figure
