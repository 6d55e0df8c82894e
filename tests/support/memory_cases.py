# SPDX-License-Identifier: Apache-2.0
"""The configs for GPUs that docs/running.md names, as preflight sees them and as torch's tracker does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups
from support.gpus import write_model
from support.memory_tracker import Work, peak_gibibytes

from recipe.bapo.checks import size
from recipe.bapo.checks.config import sequence_parallel

FILES = ROOT / "recipe" / "bapo" / "example" / "files"
ACTOR = "actor_rollout_ref.actor"
EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
NO_UPDATE = {"evaluate"}
LOWEST, HIGHEST = 0.95, 1.20  # preflight's figure in multiples of the tracker's


@dataclass(frozen=True)
class Case:
    """A config with ``size=gpu``, a model of ``support.gpus.SHAPES``, and the GPUs that train it."""

    experiment: str
    model: str
    gpus: int
    changes: tuple[tuple[str, object], ...] = ()
    name: str = field(default="")

    def __str__(self):
        return f"{self.name or self.experiment}, {self.model} on {self.gpus}"


CASES = [
    Case("example", "0.5B", 1),
    Case("example", "1.5B", 1),
    Case("example", "7B", 2),
    Case("example", "7B", 4),
    Case("example", "7B", 8),
    Case("example", "32B", 8),
    Case("example", "32B", 64),
    Case("replay", "7B", 8),
    Case("partial_rollout", "7B", 8),
    Case("separate_async", "7B", 4),
    Case("paper_7b", "7B", 8),
    Case("paper_llama_3b", "3B", 8),
    Case("paper_32k", "7B", 8),
    Case("paper_7b_64k", "7B", 8),
    Case("paper_32b", "32B", 64),
    Case("paper_r1_32b", "32B", 64),
    Case("partial_rollout", "7B", 8, ((f"{ACTOR}.entropy_coeff", 0.001),), "partial_rollout, entropy_coeff=0.001"),
]


def config_of(case: Case, folder: Path):
    """The case's config, resolved; its model is a folder with a config and no weights."""
    files = {"TRAIN_FILE": str(FILES / "train.parquet"), "TEST_FILE": str(FILES / "test.parquet")}
    files["MODEL_PATH"] = str(write_model(FILES, folder / case.model, case.model))
    nodes, gpus = max(1, case.gpus // 8), min(8, case.gpus)
    changes = [f"{key}={value}" for key, value in case.changes]
    with patch.dict(os.environ, files):
        config = compose_in_groups(
            f"experiment={case.experiment}",
            "size=gpu",
            "platform=gpu",
            f"trainer.nnodes={nodes}",
            f"trainer.n_gpus_per_node={gpus}",
            *changes,
        )
        OmegaConf.resolve(config)
    return config


def works_of(case: Case, config) -> dict[str, Work]:
    """What a GPU does in each phase in which it computes."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update_tokens, log_prob_tokens = size.tokens_of_a_gpu(config)
    common = {
        "model": case.model,
        "shards": case.gpus,
        "temperature": rollout.temperature,
        "sequence_parallel": sequence_parallel(config)[1],
    }
    gradient = actor.entropy_coeff != 0
    measured = actor.calculate_entropy or gradient
    update = Work(tokens=update_tokens, update=True, entropy=measured, entropy_gradient=gradient, **common)
    if config.algorithm.rollout_correction.bypass_mode:
        return {"update": update}
    return {"log-probs": Work(tokens=log_prob_tokens, update=False, entropy=True, **common), "update": update}


def row_of(case: Case, folder: Path) -> dict[str, tuple[float, float]]:
    """GiB by preflight and by the tracker, without vLLM's share, for each phase."""
    config = config_of(case, folder)
    phases = size.phases_of_a_gpu(config, size.model_of(config), 0.0)
    works = works_of(case, config)
    return {phase: (sum(phases[phase].values()), peak_gibibytes(work)["total"]) for phase, work in works.items()}


def line_of(case: Case, row: dict[str, tuple[float, float]]) -> str:
    """The case's line of the table in docs/running.md."""
    cells = []
    for phase in ("log-probs", "update"):
        cells += [f"{gibibytes:.1f}" for gibibytes in row[phase]] if phase in row else ["-", "-"]
    return f"| {case.name or case.experiment} | {case.model} | {case.gpus} | {' | '.join(cells)} |"
