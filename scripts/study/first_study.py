# SPDX-License-Identifier: Apache-2.0
"""The first study's tables and pictures in docs/results.md, from its runs in docs/results/first_study_*.jsonl.

    python -m scripts.study.first_study

Its runs were made by commit 9177dc2 and those before it, whose ``scripts/study.py`` makes them anew.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
METHODS = ["grpo", "clip_higher", "authors_code", "widest", "bapo", "bapo_gradient"]
ADDED = ["bapo@0.38", "bapo_gradient@0.38"]
WINDOW = 8  # updates; the series of a run are means over so many, but for the gradient norm

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by the number of seeds, two-sided
FIXED = ("grpo", "clip_higher", "widest")  # no search, so no target to be out of reach of
SPIKE = 5  # times the run's median gradient norm
BEGIN, END = "<!-- made by scripts/study/first_study.py: begin -->", "<!-- end -->"
ALL = METHODS + ADDED  # the order of tables and legends
COLOURS = ["#000000", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#D55E00", "#0072B2", "#8B4513"]
STYLES = ["-", "--", ":", "-.", "-", "--", ":", "-."]
MEASURES = {
    "final reward": "{:.3f}",
    "mean reward": "{:.3f}",
    "entropy kept": "{:.2f}",
    "spikes": "{:.1f}",
    "largest/median norm": "{:.1f}",
}
SEARCH = {"rho at start": "{:.3f}", "rho at bounds": "{:.3f}", "c_low": "{:.3f}", "c_high": "{:.3f}"}
SEARCH |= {"out of reach": "{:.2f}", "clipped +": "{:.3f}", "clipped -": "{:.3f}"}
# Of the loop alone: the contribution at the bounds by one definition each for all methods, and the lengths at the end.
COMMON = {
    "rho, value": "{:.3f}",
    "rho, gradient": "{:.3f}",
    "successes, tokens": "{:.1f}",
    "failures, tokens": "{:.1f}",
}


def read_runs(part: str, folder: Path = RESULTS) -> dict[int, dict[str, list[dict]]]:
    """The runs of one part by staleness and method, in the order of their seeds."""
    runs: dict[int, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    records = map(json.loads, (folder / f"first_study_{part}.jsonl").read_text().splitlines())
    for record in sorted(records, key=lambda r: (r["settings"]["staleness"], ALL.index(r["method"]), r["seed"])):
        runs[record["settings"]["staleness"]][record["method"]].append(record)
    return runs


def measures(record: dict) -> dict[str, float]:
    """What the plan names, of one run."""
    series = record["series"]
    mean = {key: _mean(values) for key, values in series.items()}
    last = {key: values[-max(1, len(values) // 5) :] for key, values in series.items()}
    norm = statistics.median(series["grad_norm"])
    common = {}
    if "rho_value" in series:
        lengths = {name: last[f"length_of_{name}"] for name in ("successes", "failures")}
        common = {"rho, value": mean["rho_value"], "rho, gradient": mean["rho_gradient"]}
        common |= {f"{name}, tokens": _mean(values) for name, values in lengths.items()}
    return {
        **common,
        "final reward": record["final_reward"],
        "mean reward": mean["reward"],
        "entropy kept": sum(last["entropy"]) / len(last["entropy"]) / series["entropy"][0],
        "spikes": sum(value > SPIKE * norm for value in series["grad_norm"]),
        "largest/median norm": max(series["grad_norm"]) / norm,
        "rho at start": mean["positive_contribution_start"],
        "rho at bounds": mean["positive_contribution"],
        "c_low": mean["clip_low"],
        "c_high": mean["clip_high"],
        "out of reach": mean["saturated"],
        "clipped +": mean["clipfrac_positive"],
        "clipped -": mean["clipfrac_negative"],
    }


def _mean(values):
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def spread(values: list[float], form: str) -> str:
    """Mean and standard deviation over seeds."""
    if len(values) == 1:
        return f"{form.format(values[0])} (one seed)"
    deviation = statistics.stdev(values)
    return f"{form.format(statistics.mean(values))} ± {form.format(deviation)}"


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean of paired differences and half the width of its 95 % t interval."""
    half = T_95[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.mean(differences), half


def rows_of(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def tables(runs: dict[str, list[dict]]) -> list[str]:
    """The three tables of one staleness: outcome, differences from ``grpo``, and what the search did."""
    found = {method: {r["seed"]: measures(r) for r in records} for method, records in runs.items()}
    lines = []
    with_common = all(set(COMMON) <= measured.keys() for of_method in found.values() for measured in of_method.values())
    for columns in (MEASURES, SEARCH, COMMON) if with_common else (MEASURES, SEARCH):
        rows = [
            [f"`{method}`", *(_cell(method, name, list(of_method.values()), form) for name, form in columns.items())]
            for method, of_method in found.items()
        ]
        lines += [*rows_of(["method", *columns], rows), ""]
    rows = []
    for method in found.keys() - {"grpo"} if "grpo" in found else ():
        cells = []
        for name, form in MEASURES.items():
            seeds = found[method].keys() & found["grpo"].keys()
            if len(seeds) < 2:
                cells.append("too few seeds")
                continue
            mean, half = interval([found[method][seed][name] - found["grpo"][seed][name] for seed in sorted(seeds)])
            mark = "**" if abs(mean) > half else ""
            cells.append(f"{mark}{form.format(mean)} ± {form.format(half)}{mark}")
        rows.append([f"`{method}`", *cells])
    rows.sort(key=lambda row: ALL.index(row[0].strip("`")))
    lines += [
        "Difference from `grpo`, paired by seed, with its 95 % interval; bold where the interval leaves out 0:",
        "",
    ]
    return [*lines, *rows_of(["method", *MEASURES], rows), ""]


def _cell(method, name, of_method, form):
    if name == "out of reach" and method in FIXED:
        return "-"
    return spread([measured[name] for measured in of_method], form)


def control(runs: dict[str, list[dict]]) -> str:
    """Whether all methods ended with the same weights at staleness 1, seed by seed."""
    weights: dict[int, list[str]] = defaultdict(list)
    for record in (record for records in runs.values() for record in records):
        weights[record["seed"]].append(record["weights"])
    same = [len(set(of_seed)) == 1 for of_seed in weights.values() if len(of_seed) == len(METHODS)]
    return f"Control: at staleness 1 all methods end with bit-identical weights in {sum(same)} of {len(same)} seeds."


PANELS = [
    ("reward", "mean reward"),
    ("entropy", "entropy (nats a token)"),
    ("grad_norm", "gradient norm"),
    ("positive_contribution", "rho at the bounds, own measure"),
    ("clip_high", "c_high"),
    ("clip_low", "c_low"),
]


def draw(runs: dict[str, list[dict]], title: str, unit: str, out: Path) -> None:
    """Curves of one staleness: the mean over seeds, and a band from the lowest to the highest."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 8.2), constrained_layout=True)
    for axis, (key, label) in zip(axes.flat, PANELS, strict=True):
        for method, records in runs.items():
            series = [record["series"][key] for record in records]
            if key == "grad_norm" and len(series[0]) > len(records[0]["series"]["reward"]):
                series = [[max(s[i : i + WINDOW]) for i in range(0, len(s), WINDOW)] for s in series]
            at = list(zip(*series, strict=True))
            step = WINDOW if unit == "update" else 1
            x = [step * (i + 1) for i in range(len(at))]
            colour, style = COLOURS[ALL.index(method)], STYLES[ALL.index(method)]
            axis.plot(x, [sum(v) / len(v) for v in at], style, color=colour, linewidth=2, label=method)
            axis.fill_between(x, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.1)
        axis.set_xlabel(unit, fontsize=12)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(
            label + (f", largest of {WINDOW}" if key == "grad_norm" and unit == "update" else ""), fontsize=12
        )
        axis.tick_params(labelsize=11)
        axis.grid(alpha=0.25)
    figure.suptitle(title, fontsize=14)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=12)
    figure.savefig(out, dpi=90)
    plt.close(figure)


def generated(folder: Path = RESULTS) -> str:
    """The generated part of docs/results.md."""
    lines = [BEGIN, ""]
    for part, name in (("stack", "The real stack"), ("loop", "The loop in one process")):
        runs = read_runs(part, folder)
        seeds = max((len(records) for by_method in runs.values() for records in by_method.values()), default=0)
        for staleness, by_method in sorted(runs.items(), reverse=True):
            lines += [f"### {name}, staleness {staleness}, {seeds} seeds", ""]
            lines += [f"![curves](results/{part}-staleness{staleness}.png)", ""]
            lines += [control(by_method)] if part == "loop" and staleness == 1 else tables(by_method)
    return "\n".join([*lines, END])


def report() -> None:
    """Write the pictures, and the generated part of docs/results.md."""
    for part, unit in (("stack", "step"), ("loop", "update")):
        for staleness, runs in read_runs(part).items():
            title = f"{part}, staleness {staleness}: mean over seeds, band from lowest to highest"
            draw(runs, title, unit, RESULTS / f"{part}-staleness{staleness}.png")
    path = ROOT / "docs" / "results.md"
    before, rest = path.read_text().split(BEGIN)
    path.write_text(before + generated() + rest.split(END, 1)[1])
    print(f"Written: {path} and the pictures in {RESULTS}")


if __name__ == "__main__":
    report()
