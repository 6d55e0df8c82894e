# SPDX-License-Identifier: Apache-2.0
"""Draw the curves of methods for a paper: the mean over runs, and its 95 % interval as a band."""

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.bapo.table.runs import CURVES, MEASURE

WIDTH = 6.75  # inches, a page of ICML; an \includegraphics of the text's width keeps the font readable
COLUMNS = 3
# Okabe-Ito: to be told apart by colour-blind readers, and by style in black and white.
COLORS = ("#0072B2", "#000000", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


@rc_context({"font.size": 8, "axes.titlesize": 8, "axes.linewidth": 0.6, "pdf.fonttype": 42})
def draw_curves(points: pd.DataFrame) -> Figure:
    """Draw a panel for each data set, and those of the training reward and the entropy where they were logged.

    Args:
        points: the means at each step, from ``scores.average``.
    """
    panels = dict(list(points.groupby(MEASURE)))
    drawn = [key for key in panels if key[2].startswith("mean@")]
    drawn += [key for title in CURVES.values() if (key := (title, "", "")) in panels]
    methods = points["method"].cat.categories
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, key in zip(axes, drawn, strict=False):
        for number, method in enumerate(methods):
            style = {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number % len(STYLES)]}
            own = panels[key][panels[key]["method"] == method]
            step, mean, width = own["step"], own["mean"], own["over_seeds"]
            axis.plot(step, mean, linewidth=1.2, label=method, **style)
            if width.notna().any():
                axis.fill_between(step, mean - width, mean + width, color=style["color"], alpha=0.15, linewidth=0)
        data_set, _, measure = key
        axis.set_title(f"{data_set}, {measure}" if measure else data_set)
        axis.set_xlabel("training step")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods), frameon=False)
    return figure
