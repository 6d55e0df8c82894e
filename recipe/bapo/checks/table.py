# SPDX-License-Identifier: Apache-2.0
"""All checks as a table: a line each, ok, a warning, or failed with the field, the value and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipe.bapo.checks import Concern, config, inputs, machine, model, other_runs, size
from recipe.bapo.checks.schema import problems


@dataclass(frozen=True)
class Line:
    """One line of the table; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


# A check takes the resolved config and returns what is fine, or raises Concern or ValueError.
# With an engine or a number of these that cannot be used, the others would only say it again.
FIRST = (("engine", config.check_engine), ("ranges", config.check_ranges))
CHECKS = (
    ("versions", machine.check_versions),
    ("plugin", machine.check_plugin),
    ("flash-attn", machine.check_flash_attn),
    ("compiler", machine.check_compiler),
    ("devices", machine.check_devices),
    ("other runs", other_runs.check_other_runs),
    ("open files", machine.check_open_files),
    ("shared memory", machine.check_shared_memory),
    ("names", config.check_names),
    ("trainer", config.check_trainer),
    ("loss", config.check_loss),
    ("folders", config.check_folders),
    ("reward", inputs.check_reward),
    ("checkpoint", inputs.check_checkpoint),
    ("batches", config.check_batches),
    ("ratio", config.check_ratio),
    ("model", model.check_model),
)
# They read the model, so they are left out where it cannot be read.
CHECKS_OF_THE_MODEL = (
    ("data", inputs.check_files),
    ("parallelism", config.check_parallel),
    ("memory", size.check_memory),
    ("disk", size.check_disk),
)
# Left out where batches or trainer have failed, of which it says some in verl's words.
LAST = (("verl's rules", config.check_verls_dataclasses),)


def run(config, groups: str | Path | None = None) -> list[Line]:
    """Every check, each on its own.

    Args:
        config: resolved.
        groups: the folder of the groups, to name the file in which an unknown key stands.
    """
    lines = [_line(*FIRST[0], config)]
    if lines[0].status != "failed":
        lines += [Line("keys", "failed", problem) for problem in problems(config, groups)]
    for name, check in FIRST[1:]:
        if _failed(lines):
            return [line for line in lines if line.status == "failed"]
        lines.append(_line(name, check, config))
    if _failed(lines):
        return lines[-1:]
    lines += [_line(name, check, config) for name, check in CHECKS]
    if lines[-1].status != "failed":
        lines += [_line(name, check, config) for name, check in CHECKS_OF_THE_MODEL]
    if not {"batches", "trainer"} & {line.name for line in lines if line.status == "failed"}:
        lines += [_line(name, check, config) for name, check in LAST]
    return lines


def _failed(lines):
    return any(line.status == "failed" for line in lines)


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
