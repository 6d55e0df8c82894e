# SPDX-License-Identifier: Apache-2.0
"""The report as one page: the template reads every number from the report's JSON and says from where."""

from __future__ import annotations

import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WIDTH, HEIGHT = 320, 180  # of a chart, without its labels


def page(report: dict, name: str) -> str:
    """HTML of the report on the dump ``name``. Each number is in a ``<data>`` with its JSON path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"areas": areas, "boxes": boxes}

    def number(path: str, kind: str = "number") -> Markup:
        value = look_up(report, path)
        return Markup('<data data-at="{}" value="{}">{}</data>').format(path, value, FORMATS[kind](value))

    return environment.get_template("page.html.jinja").render(
        report=report,
        name=name,
        number=number,
        entropy_top=axis_end(report["entropy"] or {}),
        width=WIDTH,
        height=HEIGHT,
    )


def look_up(report: dict, path: str):
    """The value at ``a.0.b`` of the report."""
    for part in path.split("."):
        report = report[int(part)] if isinstance(report, list) else report[part]
    return report


def percent(share: float) -> str:
    """``12.3 %``; small shares keep two digits, so that 0.02 % is not 0."""
    if share == 0 or abs(share) >= 0.01:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.2g} %"


FORMATS = {
    "number": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
    "rho": lambda value: f"{value:.3f}",
    "percent": percent,
}


def areas(curve: dict) -> dict[str, str]:
    """Points of the polygons ``at_once`` (from the bottom) and ``never`` (from the top); between them: on the way."""
    targets = curve["target"]
    first, span = targets[0], targets[-1] - targets[0]
    xs = [WIDTH * (target - first) / span for target in targets]

    def points(edge, from_y):
        line = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, edge, strict=True)]
        return " ".join([f"0,{from_y}", *line, f"{WIDTH},{from_y}"])

    return {
        "at_once": points([HEIGHT * (1 - share) for share in curve["at_once"]], HEIGHT),
        "never": points([HEIGHT * share for share in curve["never"]], 0),
    }


def boxes(rows: list[dict], top: float) -> list[dict]:
    """Of each ratio bin its label and the heights of its five percentiles; ``top`` is the axis' end."""
    found = []
    for column, row in enumerate(rows):
        label = f">{row['above']:g}" if row["to"] is None else f"≤{row['to']:g}"
        centre = WIDTH * (column + 0.5) / len(rows)
        drawn = {"label": label, "x": centre, "half": 0.32 * WIDTH / len(rows), "tokens": row["tokens"]}
        if row["percentiles"] is not None:
            drawn["ys"] = [HEIGHT * (1 - min(value / top, 1)) for value in row["percentiles"]]
        found.append(drawn)
    return found


def axis_end(boxes_by_sign: dict) -> float:
    """The end of an axis, a whole number, that holds all percentiles."""
    rows = [row for of_sign in boxes_by_sign.values() for row in of_sign if row["percentiles"]]
    return float(max([1, *(math.ceil(row["percentiles"][-1]) for row in rows)]))
