# SPDX-License-Identifier: Apache-2.0
"""Check a config, what it reads and this machine, and print a table or JSON: exit code 0 or 1; no run is started.

    bash recipe/bapo/run_bapo_example.sh --preflight [--json] [key=value ...]
    python -m recipe.bapo.checks [--json] [--config-dir configs] [key=value ...]

Each line is ok, a warning, or failed; a failed one names the field, the value and the fix. The main job makes the same
checks before it starts Ray.
"""

import argparse
import json
import logging
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf

if __name__ == "__main__":  # a run that makes the checks keeps what verl logs
    logging.disable(logging.INFO)  # verl announces its platform on import
import verl  # noqa: E402, F401  before anything of ours: it loads our plugin
from recipe.bapo.checks import Concern, inputs, machine, size  # noqa: E402
from recipe.bapo.checks import config as config_checks  # noqa: E402
from recipe.bapo.checks.composing import explain, problems  # noqa: E402
from recipe.bapo.config import compose_config  # noqa: E402


@dataclass(frozen=True)
class Line:
    """One line of the table; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


# A check takes the resolved config and returns what is fine, or raises Concern or ValueError. It is left out where one
# of those that it relies on has failed, because it would only say that again.
CHECKS = (
    ("versions", machine.check_versions, ()),
    ("attention", machine.check_attention, ()),
    ("compiler", machine.check_compiler, ()),
    ("devices", machine.check_devices, ()),
    ("other runs", machine.check_other_runs, ()),
    ("limits", machine.check_limits, ()),
    ("names", config_checks.check_names, ()),
    ("folders", config_checks.check_folders, ()),
    ("reward", inputs.check_reward, ()),
    ("checkpoint", inputs.check_checkpoint, ()),
    ("parallelism", config_checks.check_parallel, ()),
    ("batches", config_checks.check_batches, ("parallelism",)),
    ("ratio", config_checks.check_ratio, ()),
    ("model", inputs.check_model, ()),
    ("data", inputs.check_files, ("model",)),
    ("memory", size.check_memory, ("model",)),
    ("verl's rules", config_checks.check_verls_rules, ("names", "batches")),
)


def run(config, groups: str | Path | None = None) -> list[Line]:
    """Resolve the config in place and make every check, each on its own; a config that is not usable gets no others.

    Args:
        config: as composed.
        groups: the folder of the groups, to name the file in which a key stands.
    """
    unusable = problems(config, groups)
    if unusable:
        return [Line("config", "failed", problem) for problem in unusable]
    OmegaConf.resolve(config)
    lines = {"values": _line("values", config_checks.check_values, config)}
    if lines["values"].status == "failed":
        return [lines["values"]]
    for name, check, relies_on in CHECKS:
        if all(other in lines and lines[other].status != "failed" for other in relies_on):
            lines[name] = _line(name, check, config)
    return list(lines.values())


def _line(name, check, config):
    try:
        return Line(name, "ok", check(config))
    except Concern as concern:
        return Line(name, "warning", str(concern))
    except ValueError as error:
        return Line(name, "failed", str(error))
    except Exception as error:  # a check that breaks must not hide the others
        return Line(name, "failed", f"{type(error).__name__}: {error}")


def table(lines: list[Line]) -> str:
    """For people."""
    return "\n".join(f"{line.status:<8} {line.name:<16} {line.detail}" for line in lines)


def lines_of(overrides: list[str], groups: str | None) -> list[Line]:
    """All checks; a config that cannot be composed is the only line."""
    try:
        return run(compose_config(overrides, groups), groups)
    except Exception as error:
        return [Line("config", "failed", explain(error))]


def main() -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--config-dir", help="the folder with the groups size, experiment and method")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the main job")
    arguments = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")  # verl names the engines that are not installed
    with redirect_stdout(sys.stderr):  # verl prints while it validates
        lines = lines_of(arguments.overrides, arguments.config_dir)
    print(json.dumps([asdict(line) for line in lines], indent=1) if arguments.json else table(lines))
    return int(any(line.status == "failed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
