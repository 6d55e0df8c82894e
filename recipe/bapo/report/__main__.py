# SPDX-License-Identifier: Apache-2.0
"""What is clipped in a run, is it the staleness, and would BAPO's target be in reach: from the run's dumped tokens.

... actor_rollout_ref.actor.policy_loss.token_dump_dir=/data/dump      # in a run of a few steps, any method
.venv/bin/python -m recipe.bapo.report /data/dump                      # verdict, and /data/dump/report.html
.venv/bin/python -m recipe.bapo.report /data/dump --html report.html --json report.json

docs/clip_report.md says what its sections answer and how other trainers dump.
"""

import argparse
import json
from pathlib import Path

from recipe.bapo.report.facts import report_on
from recipe.bapo.report.page import page


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the folder that token_dump_dir named")
    parser.add_argument("--html", type=Path, help="where the page goes (default: report.html in the dump's folder)")
    parser.add_argument("--json", type=Path, help="write the report's numbers")
    arguments = parser.parse_args()
    html = arguments.html or arguments.dump / "report.html"
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
