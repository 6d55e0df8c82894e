# SPDX-License-Identifier: Apache-2.0
"""Run all checks of a config in order, and format their results.

``python -m recipe.bapo.run.preflight`` and ``main_bapo`` call this module. A new check needs an entry in ``CHECKS``.
"""

from dataclasses import dataclass

from omegaconf import OmegaConf

import verl  # noqa: F401  import it before our modules: it loads our plugin
from recipe.bapo.config import compose_config
from recipe.bapo.run.preflight import CheckWarning, innermost, inputs, machine, model
from recipe.bapo.run.preflight import config as config_checks
from recipe.bapo.run.preflight.config_errors import explain, problems
from verl.experimental.reward_loop import migrate_legacy_reward_impl


@dataclass(frozen=True)
class CheckResult:
    """One line of the table; ``status`` is ``ok``, ``warning`` or ``failed``."""

    name: str
    status: str
    detail: str


# Name, check, and the checks that have to pass first: after one of these failed, this one would only repeat its fault.
CHECKS = (
    ("versions", machine.check_versions, ()),
    ("attention", machine.check_attention, ()),
    ("compiler", machine.check_compiler, ()),
    ("devices", machine.check_devices, ()),
    ("CPUs", machine.check_cpus, ("devices",)),
    ("other runs", machine.check_other_runs, ()),
    ("limits", machine.check_limits, ()),
    ("names", config_checks.check_names, ()),
    ("folders", config_checks.check_folders, ()),
    ("reward", inputs.check_reward, ()),
    ("checkpoint", inputs.check_checkpoint, ()),
    ("parallelism", config_checks.check_parallel, ()),
    ("batches", config_checks.check_batches, ("names", "parallelism")),
    ("ratio", config_checks.check_ratio, ("names",)),
    ("model", model.check_model, ()),
    ("data", inputs.check_files, ("model",)),
    ("verl's rules", config_checks.check_verls_rules, ("batches",)),
    ("intent", config_checks.check_intent, ("verl's rules",)),
)
# Checks that only know FSDP. With another engine they are not run, and their line names what is not checked.
OF_FSDP = {
    "attention": "whether the attention can be imported",
    "parallelism": "whether the GPUs divide among pipeline, tensor, context and expert ranks",
    "batches": "whether batches divide among data-parallel ranks, and whether a micro-batch holds a sequence",
}


def run_checks(config) -> list[CheckResult]:
    """Resolve the config in place and run the checks. A check that relies on one that failed is left out.

    If the config has a wrong type, an unknown key or a value that cannot be resolved, or if the check ``values`` fails,
    only that is reported.
    """
    unusable = problems(config)
    if unusable:
        return [CheckResult("config", "failed", problem) for problem in unusable]
    OmegaConf.resolve(config)
    migrate_legacy_reward_impl(config)  # moves old keys of the reward, which verl's V1 trainer does not read
    lines = {"values": _line("values", config_checks.check_values, config)}
    if lines["values"].status == "failed":
        return [lines["values"]]
    for name, check, relies_on in CHECKS:
        if name in OF_FSDP and config.model_engine != "dp":
            unchecked = f"not checked with model_engine={config.model_engine}: {OF_FSDP[name]}"
            lines[name] = CheckResult(name, "ok", unchecked)
        elif all(other in lines and lines[other].status != "failed" for other in relies_on):
            lines[name] = _line(name, check, config)
    return list(lines.values())


def _line(name, check, config):
    try:
        return CheckResult(name, "ok", check(config))
    except CheckWarning as warning:
        return CheckResult(name, "warning", str(warning))
    except Exception as error:  # a check with an error of its own must not hide the others
        return CheckResult(name, "failed", str(error) if isinstance(error, ValueError) else innermost(error))


def table(lines: list[CheckResult]) -> str:
    """Format results as a table for the terminal."""
    return "\n".join(f"{line.status:<8} {line.name:<16} {line.detail}" for line in lines)


def run_preflight(overrides: list[str], groups: str | None) -> list[CheckResult]:
    """Compose the config and run all checks. If this raises an error, the only result says what it is."""
    try:
        return run_checks(compose_config(overrides, groups))
    except Exception as error:
        return [CheckResult("config", "failed", explain(error))]
