# SPDX-License-Identifier: Apache-2.0
"""Draw how fast each method of the study learns, and the entropy that it keeps."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from scripts.study.plan import ROWS  # noqa: E402
from scripts.study.tables import METHOD_NAMES, runs_of_whole_seeds  # noqa: E402

LINE_STYLES = {  # Okabe-Ito
    "high_only": ("#009E73", "-."),
    "bapo": ("#0072B2", "-"),
    "grpo": ("black", "--"),
    "gspo": ("#D55E00", ":"),
}


CLAIM = (  # what docs/results/language_model.md shows
    "BAPO and a wide fixed range learn faster than GRPO, and end with less entropy\n"
    "A language model of 135M parameters learns to sort; thin lines are 3 seeds, thick ones their mean"
)


def draw(folder: Path = ROWS) -> plt.Figure:
    """Draw held-out reward and entropy by method: a thin line for each seed, a thick one for their mean.

    Raises:
        ValueError: no seed is complete with all methods.
    """
    runs = [(run, pd.read_parquet(folder / f"{run.name}.parquet")) for run in runs_of_whole_seeds(folder)]
    if not runs:
        raise ValueError(f"No seed in {folder} is complete with all methods yet: `list` shows what is left to run.")
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    figure.suptitle(
        CLAIM if folder == ROWS else f"{folder.name}: thin lines are seeds, thick ones their mean", fontsize=11
    )
    for method, (colour, style) in LINE_STYLES.items():
        of_method = [rows for run, rows in runs if run.method == method]
        rewards = [[rows["held_out_before"].iloc[0], *rows["held_out_reward"].dropna()] for rows in of_method]
        entropies = [rows.groupby("rollout")["entropy"].mean() for rows in of_method]
        for axis, lines, first in ((axes[0], rewards, 0), (axes[1], entropies, 1)):
            batches = range(first, first + len(lines[0]))
            for line in lines:
                axis.plot(batches, line, style, color=colour, linewidth=0.8, alpha=0.5)
            axis.plot(batches, np.mean(lines, 0), style, color=colour, linewidth=2.2, label=METHOD_NAMES[method])
    axes[0].set(ylabel="held-out reward (share of 512 answers)")
    axes[1].set(ylabel="entropy, nats a token", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="rollout batch, 16 updates each", xticks=range(5))
        axis.grid(alpha=0.4)
    axes[0].legend(frameon=False, loc="lower right")
    return figure
