# SPDX-License-Identifier: Apache-2.0
"""The report as one page without network. ``page.html.jinja`` lays it out; what a number looks like is here."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page(report: dict, name: str) -> str:
    """HTML of the report on the dump ``name``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )

    environment.filters |= FORMATS
    return environment.get_template("page.html.jinja").render(report=report, name=name)


def percent(share: float) -> str:
    """``12.3 %``, without a line break in it; small shares keep two digits, so that 0.02 % is not 0."""
    digits = ".1f" if share == 0 or abs(share) >= 0.01 else ".2g"
    return f"{100 * share:{digits}}\N{NO-BREAK SPACE}%"


FORMATS = {
    "number": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
    "rho": lambda value: f"{value:.3f}",
    "percent": percent,
}
