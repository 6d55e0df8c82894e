# SPDX-License-Identifier: Apache-2.0
"""Compare preflight's estimate of a GPU's memory with torch's FSDP2 memory tracker: docs/evidence/memory.md."""

import os
from typing import NamedTuple
from unittest.mock import patch

import pytest
from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups
from support.gpus import write_model
from support.memory_tracker import Work, peak_gibibytes

from recipe.bapo.checks import memory
from recipe.bapo.checks.config import sequence_parallel

FILES = ROOT / "recipe" / "bapo" / "example" / "files"
LOWEST, HIGHEST = 0.95, 1.20  # preflight's figure divided by the tracker's


class Case(NamedTuple):
    """An experiment with ``size=gpu``, a model of ``support.gpus.SHAPES``, the GPUs that train it, and a setting."""

    experiment: str
    model: str
    gpus: int
    setting: str = ""  # a setting of the actor
    platform: str = "gpu"


CASES = [
    Case("example", "0.5B", 1),
    Case("example", "1.5B", 1),
    Case("example", "7B", 2),
    Case("example", "7B", 4),
    Case("example", "7B", 8),
    Case("example", "32B", 8),
    Case("example", "32B", 64),
    Case("gsm8k", "0.5B", 1),
    Case("replay", "7B", 8),
    Case("partial_rollout", "7B", 8),
    Case("separate_async", "7B", 4),
    Case("paper_7b", "7B", 8),
    Case("paper_llama_3b", "3B", 8),
    Case("paper_32k", "7B", 8),
    Case("paper_7b_64k", "7B", 8),
    Case("paper_32b", "32B", 64),
    Case("paper_r1_32b", "32B", 64),
    Case("partial_rollout", "7B", 8, "entropy_coeff=0.001"),
    Case("example", "1.5B", 1, platform="gpu_without_flash_attn"),
    Case("example", "7B", 8, platform="gpu_without_flash_attn"),
    Case("example", "32B", 64, platform="gpu_without_flash_attn"),
]


def config_of(case, folder):
    """Return the case's resolved config. Its model is a folder with a config and no weights."""
    files = {"TRAIN_FILE": str(FILES / "train.parquet"), "TEST_FILE": str(FILES / "test.parquet")}
    files["MODEL_PATH"] = str(write_model(FILES, folder / case.model, case.model))
    nodes, gpus = max(1, case.gpus // 8), min(8, case.gpus)
    groups = [f"experiment={case.experiment}", "size=gpu", f"platform={case.platform}"]
    settings = [f"actor_rollout_ref.actor.{case.setting}"] if case.setting else []
    with patch.dict(os.environ, files):
        config = compose_in_groups(*groups, f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}", *settings)
        OmegaConf.resolve(config)
    return config


def works_of(case, config):
    """Return the work of a GPU in each phase in which it computes."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update_tokens, log_prob_tokens = memory.tokens_of_a_gpu(config)
    common = {
        "model": case.model,
        "shards": case.gpus,
        "temperature": rollout.temperature,
        "sequence_parallel": sequence_parallel(config)[1],
        "without_flash_attn": case.platform == "gpu_without_flash_attn",
    }
    gradient = actor.entropy_coeff != 0
    measured = actor.calculate_entropy or gradient
    update = Work(tokens=update_tokens, update=True, entropy=measured, entropy_gradient=gradient, **common)
    if config.algorithm.rollout_correction.bypass_mode:
        return {"update": update}
    return {"log-probs": Work(tokens=log_prob_tokens, update=False, entropy=True, **common), "update": update}


def row_of(case, folder):
    """Return the GiB of each phase by preflight and by the tracker, without vLLM's share."""
    config = config_of(case, folder)
    phases = memory.phases_of_a_gpu(config, *memory.sizes_of(config), 0.0)
    works = works_of(case, config)
    row = {phase: (sum(phases[phase].values()), peak_gibibytes(work)) for phase, work in works.items()}
    for phase, (preflight, tracker) in row.items():
        assert LOWEST * tracker <= preflight <= HIGHEST * tracker, phase
    return row


def test_every_shipped_experiment_is_a_case():
    # Leave out the evaluation, which trains nothing, and the language model, whose sizes are for 135 million weights.
    without = {"evaluate", "language_model"}
    trained = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")} - without
    assert {case.experiment for case in CASES} == trained


def test_preflight_is_near_the_tracker_for_a_small_model(tmp_path):
    assert row_of(CASES[0], tmp_path).keys() == {"log-probs", "update"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_preflight_is_near_the_tracker_and_the_table_says_so(case, tmp_path):
    row = row_of(case, tmp_path)
    cells = [f"{gibibytes:.1f}" for phase in ("log-probs", "update") for gibibytes in row.get(phase, ())]
    platform = "" if case.platform == "gpu" else f"platform={case.platform}"
    name = ", ".join(filter(None, (case.experiment, case.setting, platform)))
    line = " | ".join([name, case.model, str(case.gpus), *["-"] * (4 - len(cells)), *cells])
    print(f"| {line} |")  # pytest -rP shows the table
    assert f"| {line} |" in (ROOT / "docs" / "evidence" / "memory.md").read_text().splitlines()
