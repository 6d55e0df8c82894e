# SPDX-License-Identifier: Apache-2.0
"""All checks as a table: a line each, ok, a warning, or failed with the field, the value and the fix."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.bapo.checks import Concern, config, inputs, machine, other_runs, size


@dataclass(frozen=True)
class Line:
    """One line of the table; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


# A check takes the resolved config and returns what is fine, or raises Concern or ValueError.
CHECKS = (
    ("engine", config.check_engine),
    ("Python", machine.check_python),
    ("stack", machine.check_stack),
    ("verl", machine.check_verl),
    ("plugin", machine.check_plugin),
    ("flash-attn", machine.check_flash_attn),
    ("compiler", machine.check_compiler),
    ("devices", machine.check_devices),
    ("other runs", other_runs.check_other_runs),
    ("shared memory", machine.check_shared_memory),
    ("trainer", config.check_trainer),
    ("loss", config.check_loss),
    ("watchdog", config.check_watchdog),
    ("model", inputs.check_model),
    ("training data", inputs.check_train_data),
    ("validation data", inputs.check_val_data),
    ("checkpoint", inputs.check_checkpoint),
    ("batches", config.check_batches),
    ("ratio", config.check_ratio),
    ("verl's rules", config.check_verls_rules),
)
# They read the model, so they are left out where it cannot be read.
CHECKS_OF_THE_MODEL = (
    ("parallelism", config.check_parallel),
    ("memory", size.check_memory),
    ("disk", size.check_disk),
)


def run(config) -> list[Line]:
    """Every check, each on its own; ``config`` is resolved. An engine that is refused is the only line."""
    lines = [_line(*CHECKS[0], config)]
    if lines[0].status == "failed":
        return lines
    lines += [_line(name, check, config) for name, check in CHECKS[1:]]
    if not any(line.status == "failed" and line.name == "model" for line in lines):
        lines += [_line(name, check, config) for name, check in CHECKS_OF_THE_MODEL]
    return lines


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
