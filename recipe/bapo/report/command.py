# SPDX-License-Identifier: Apache-2.0
"""What is clipped in a run, is it the staleness, and would BAPO's target be in reach: from the run's dumped tokens.

... actor_rollout_ref.actor.policy_loss.token_dump_dir=/data/dump      # in a run of a few steps, any method
.venv/bin/python -m recipe.bapo.report /data/dump                      # verdict, and /data/dump/report.html
.venv/bin/python -m recipe.bapo.report /data/dump --html report.html --json report.json

docs/clip_report.md says what its sections answer and how other trainers dump.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from recipe.bapo.report.facts import TARGETS, report_on
from recipe.bapo.report.page import page


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the folder that token_dump_dir named")
    parser.add_argument("--html", type=Path, help="where the page goes (default: report.html in the dump's folder)")
    parser.add_argument("--json", type=Path, help="write the report's numbers")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="values of rho0 in the tables")
    parser.add_argument("--clip-ratio-c", type=float, help="the run's dual clip (default: as the dump says, else 3.0)")
    for side, bound in (("lower", "c_low"), ("upper", "c_high")):
        metavar, text = ("START", "MAX", "STEP"), f"range and step of {bound} (default: the run's, else BAPO's)"
        parser.add_argument(f"--{side}", type=float, nargs=3, metavar=metavar, help=text)
    arguments = parser.parse_args()
    ranges = {
        f"ratio_{side}_{part}": value
        for side in ("lower", "upper")
        for part, value in zip(("start", "max", "step"), getattr(arguments, side) or (), strict=False)
    }
    html = arguments.html or arguments.dump / "report.html"
    try:
        for path in filter(None, (arguments.html, arguments.json)):  # before the dump is read
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}.")
        watch = partial(track, description="Reading the dump's updates", console=Console(stderr=True))
        report, _ = report_on(arguments.dump, tuple(arguments.targets), ranges, arguments.clip_ratio_c, watch)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        html.write_text(page(report, arguments.dump.resolve().name))
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {error}\n")
    print("\n".join(filter(None, [*report["verdict"], report["staleness"], f"Report: {html}"])))
