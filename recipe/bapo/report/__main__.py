# SPDX-License-Identifier: Apache-2.0
"""Report what the loss of a run clips, and whether BAPO's bounds would move.

    .venv/bin/python -m recipe.bapo.report runs/mine                       # text, and runs/mine/report.png
    .venv/bin/python -m recipe.bapo.report runs/grpo runs/bapo --out compare.png
    .venv/bin/python -m recipe.bapo.report train.log                       # a log of any run of verl's
    .venv/bin/python -m recipe.bapo.report tokens FOLDER --tokenizer MODEL # a page on which tokens are clipped

A RUN is a record, record-*.jsonl, or the folder that holds it. docs/monitor.md says how to record a run and how to read
the report. A run that was not recorded is read from what verl writes anyway, which tells less: the console output in
a file, the file of verl's file logger, or wandb's history as csv. For these neither torch nor verl is needed.
"""

import argparse
import sys
from pathlib import Path

from recipe.bapo.host.files import METRICS, is_record
from recipe.bapo.report.log_report import report_on_log
from recipe.bapo.report.logs import read_log


def main() -> None:
    """Print the report on each run that the arguments name, and draw one picture of all that have a record."""
    if sys.argv[1:2] == ["tokens"]:
        return _make_token_page(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="record-*.jsonl, a folder, or a log of verl's"
    )
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="default: report.png beside the first record")
    arguments = parser.parse_args()
    try:
        recorded = []
        for path in arguments.runs:
            log = _log_of(path)
            if log is None:
                recorded.append(path)
            else:
                print("\n".join(report_on_log(str(path), read_log(log))), end="\n\n")
        if recorded:
            _report_on_records(recorded, arguments.out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")


def _make_token_page(arguments: list[str]) -> None:
    """Make the page on the tokens that a run wrote."""
    parser = argparse.ArgumentParser(prog="python -m recipe.bapo.report tokens", description=_make_token_page.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the token_dir of a run")
    parser.add_argument("--tokenizer", metavar="PATH", help="the run's model; without it tokens are shown by number")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="default: tokens.html in FOLDER")
    given = parser.parse_args(arguments)
    try:
        from recipe.bapo.report.token_page import write_page

        out = given.out or given.folder / "tokens.html"
        warning = write_page(given.folder, out, given.tokenizer)
    except ImportError as error:
        parser.exit(1, f"Error: {error.name} is not installed: pip install matplotlib pandas pyarrow.\n")
    except (ValueError, OSError) as error:
        parser.exit(1, f"Error: {' '.join(str(error).split())}\n")
    print(*filter(None, (warning, f"Page: {out}")), sep="\n")


def _log_of(path: Path) -> Path | None:
    """Return the log to read of what the command names; None for records.

    Raises:
        ValueError: it is not there.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder.")
    if path.is_dir():
        return path / METRICS if (path / METRICS).exists() and not any(path.glob("record-*.jsonl")) else None
    record = path.name.startswith("record-") or is_record(path)  # whose reader says what is wrong
    return None if record else path


def _report_on_records(paths: list[Path], out: Path | None) -> None:
    from recipe.bapo.report.findings import Run, read_runs  # imports torch, which a log does not need
    from recipe.bapo.report.record_report import report

    runs: dict[str, Run] = {}
    for path in paths:
        found = read_runs(path)
        runs |= {str(path if len(found) == 1 else run.starts[0].path): run for run in found}
    for name, run in runs.items():
        print("\n".join(report(name, run)), end="\n\n")
    out = out or next(iter(runs.values())).starts[0].path.with_name("report.png")
    out = out / "report.png" if out.is_dir() else out
    drawn = {name: run for name, run in runs.items() if run.updates and run.verdict.kind != "unusable"}
    if not drawn:
        print("No picture, because no run has numbers for one.")
        return
    try:
        from recipe.bapo.report.panels import picture
    except ImportError as error:
        print(f"No picture, because {error.name} is not installed: pip install matplotlib.")
        return
    picture(drawn).savefig(out, dpi=110)
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
