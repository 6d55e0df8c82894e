# SPDX-License-Identifier: Apache-2.0
"""Report what a run clips, whether staleness is the cause, and whether BAPO's target is in reach, from dumped tokens.

... actor_rollout_ref.actor.policy_loss.token_dump_dir=/data/dump      # in a run of a few steps, any method
.venv/bin/python -m recipe.bapo.report /data/dump                      # verdict, and /data/dump/report.html
.venv/bin/python -m recipe.bapo.report /data/dump --html report.html --json report.json

docs/clip_report.md explains the sections of the page, and how to dump tokens from other trainers.
"""

import argparse
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipe.bapo.report.facts import report_on


def page(report: dict, name: str) -> str:
    """Render the report on the dump ``name`` as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= FORMATS
    return environment.get_template("page.html.jinja").render(report=report, name=name)


def percent(share: float) -> str:
    """Format a share as ``12.3 %`` without a line break. Small shares keep two digits, so that 0.02 % is not 0."""
    digits = ".1f" if share == 0 or abs(share) >= 0.01 else ".2g"
    return f"{100 * share:{digits}}\N{NO-BREAK SPACE}%"


FORMATS = {
    "number": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
    "rho": lambda value: f"{value:.3f}",
    "percent": percent,
}


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the folder that token_dump_dir named")
    parser.add_argument("--html", type=Path, help="file for the page (default: report.html in the dump's folder)")
    parser.add_argument("--json", type=Path, help="file for the report's numbers (default: none)")
    arguments = parser.parse_args()
    html = arguments.html or arguments.dump / "report.html"
    if arguments.json and arguments.json.absolute() == html.absolute():
        parser.exit(1, f"Error: --json {arguments.json} is where the page goes: give the numbers another file.\n")
    try:
        report = report_on(arguments.dump)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        html.write_text(page(report, arguments.dump.resolve().name))
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {error}\n")
    print("\n".join(filter(None, [*report["verdict"], report["staleness"], f"Report: {html}"])))


if __name__ == "__main__":
    main()
