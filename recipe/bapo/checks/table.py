# SPDX-License-Identifier: Apache-2.0
"""All checks as a table: a line each, ok, a warning, or failed with the field, the value and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipe.bapo.checks import Concern, inputs, machine, model, size
from recipe.bapo.checks import config as config_checks
from recipe.bapo.checks.composing import problems


@dataclass(frozen=True)
class Line:
    """One line of the table; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


# A check takes the resolved config and returns what is fine, or raises Concern or ValueError. It is left out where one
# of those that it relies on has failed, because it would only say that again.
CHECKS = (
    ("values", config_checks.check_values, ("engine",)),
    ("versions", machine.check_versions, ("values",)),
    ("attention", machine.check_attention, ("values",)),
    ("compiler", machine.check_compiler, ("values",)),
    ("devices", machine.check_devices, ("values",)),
    ("other runs", machine.check_other_runs, ("values",)),
    ("limits", machine.check_limits, ("values",)),
    ("names", config_checks.check_names, ("values",)),
    ("loss", config_checks.check_loss, ("values",)),
    ("folders", config_checks.check_folders, ("values",)),
    ("reward", inputs.check_reward, ("values",)),
    ("checkpoint", inputs.check_checkpoint, ("values",)),
    ("parallelism", config_checks.check_parallel, ("values",)),
    ("batches", config_checks.check_batches, ("values", "parallelism")),
    ("ratio", config_checks.check_ratio, ("values",)),
    ("model", model.check_model, ("values",)),
    ("data", inputs.check_files, ("values", "model")),
    ("memory", size.check_memory, ("values", "model")),
    ("disk", size.check_disk, ("values", "model")),
    ("verl's rules", config_checks.check_verls_rules, ("values", "names", "loss", "batches")),
)


def run(config, groups: str | Path | None = None) -> list[Line]:
    """Every check, each on its own.

    Args:
        config: resolved.
        groups: the folder of the groups, to name the file in which an unknown key stands.
    """
    lines: dict[str, Line] = {"engine": _line("engine", config_checks.check_engine, config)}
    if lines["engine"].status != "failed":
        unusable = [Line("keys", "failed", problem) for problem in problems(config, groups)]
        if unusable:
            return unusable
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
