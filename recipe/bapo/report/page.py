# SPDX-License-Identifier: Apache-2.0
"""The report as one page without network. ``page.html.jinja`` lays it out; what a number looks like is here.

The template reads every number from the report's JSON and says from where (``<data data-at="...">``), so that page and
JSON cannot differ.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def page(report: dict, name: str) -> str:
    """HTML of the report on the dump ``name``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )

    def number(path: str, kind: str = "number") -> Markup:
        value = look_up(report, path)
        return Markup('<data data-at="{}" value="{}">{}</data>').format(path, value, FORMATS[kind](value))

    return environment.get_template("page.html.jinja").render(report=report, name=name, number=number)


def look_up(report: dict, path: str):
    """The value at ``a.0.b`` of the report."""
    for part in path.split("."):
        report = report[int(part)] if isinstance(report, list) else report[part]
    return report


def percent(share: float) -> str:
    """``12.3 %``, without a line break in it; small shares keep two digits, so that 0.02 % is not 0."""
    digits = ".1f" if share == 0 or abs(share) >= 0.01 else ".2g"
    return f"{100 * share:{digits}}\N{NO-BREAK SPACE}%"


FORMATS = {
    "number": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
    "rho": lambda value: f"{value:.3f}",
    "percent": percent,
}
