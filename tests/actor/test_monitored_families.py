# SPDX-License-Identifier: Apache-2.0
"""The monitor changes nothing in updates of models that verl trains in different ways, on two ranks."""

import pytest
import torch
from support.actor import TWO_LINES
from support.families import ENGINES, FAMILIES, FUSED, LORA, MONITOR, RANKS, train_ranks, write_model

KERNELS = {"logits": [], "fused": [FUSED]}
FAST = [  # of each way in which verl computes the log-probs of a head that is not tied, one; and adapters
    ("Qwen3.5", "FSDP2", "fused"),
    ("Qwen3-VL", "FSDP2", "fused"),
    ("Qwen3-MoE", "FSDP2", "logits"),
    ("Qwen2, LoRA", "FSDP1", "fused"),
]
# verl 0.9.1 itself fails at these families with FSDP2: its fused forwards of text models give the kernels a shard of a
# head that is an FSDP2 unit of its own (docs/dev/upstream.md).
SHARDED = ("Qwen2", "Qwen2, LoRA", "Llama", "Qwen3-MoE", "Qwen3.5, text")
# verl's gradient of the head is wrong at these, with and without the monitor.
UNREDUCED = {("Qwen3.5", "FSDP2", "fused"), ("Qwen3-VL", "FSDP2", "fused")}


def mark(cases, fast):
    """Return the cases as parameters, slow except for the ones in ``fast``."""
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow, id="; ".join(case)) for case in cases]


ALL = [
    (family, engine, kernels)
    for family in FAMILIES
    for engine in ENGINES
    for kernels in KERNELS
    if (engine, kernels) != ("FSDP2", "fused") or family not in SHARDED
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that makes the updates of a case, monitored or not, and returns the results of each rank."""
    folder = tmp_path_factory.mktemp("families")

    def run_case(family, engine, kernels, settings):
        model = folder / family.replace(", ", "-")
        if not model.exists():
            write_model(family, model)
        adapters = LORA if family.endswith("LoRA") else []
        return train_ranks(model, [*ENGINES[engine], *KERNELS[kernels], *adapters, *settings], folder / "results")

    return run_case


@pytest.mark.parametrize("family, engine, kernels", mark(ALL, FAST))
def test_the_monitor_leaves_each_familys_updates_alone(run, family, engine, kernels):
    ranks_of_verl, ranks_monitored = (run(family, engine, kernels, settings) for settings in ([], MONITOR))
    for of_verl, monitored in zip(ranks_of_verl, ranks_monitored, strict=True):
        of_the_platform = "recipe.bapo.config", "recipe.bapo.verl_patches"
        assert not [name for name in of_verl["ours"] if not name.startswith(of_the_platform)]
        assert of_verl["fused"] == monitored["fused"] == (kernels == "fused")
        assert len(of_verl["metrics"]["grad_norm"]) == 2 and min(of_verl["metrics"]["grad_norm"]) > 0.05
        own = {name: values for name, values in monitored["metrics"].items() if not name.startswith("actor/bapo/")}
        assert own == of_verl["metrics"]
        assert of_verl["weights"].keys() == monitored["weights"].keys()
        for name, weight in of_verl["weights"].items():
            assert torch.equal(weight, monitored["weights"][name]), name
        assert len(monitored["metrics"]["actor/bapo/clip_low"]) == 2 * RANKS  # of each update, each rank's
        warned = any("Set actor_rollout_ref.model.use_fused_kernels=false" in line for line in monitored["told"])
        assert warned == ((family, engine, kernels) in UNREDUCED)


BROKEN = [*sorted(UNREDUCED), *((family, "FSDP2", "fused") for family in ("Qwen2", "Qwen3-MoE"))]


@pytest.mark.parametrize("family, engine, kernels", mark(BROKEN, [("Qwen3.5", "FSDP2", "fused")]))
def test_a_run_with_bapo_gets_the_gradient_of_the_logits(run, family, engine, kernels):
    fused, logits = (run(family, engine, way, TWO_LINES) for way in (kernels, "logits"))
    for of_rank, expected in zip(fused, logits, strict=True):
        found = of_rank["metrics"]["grad_norm"]
        assert found == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5) and min(found) > 0.05
        told = [line for line in of_rank["told"] if "lm_head is kept in FSDP2's unit of the whole model" in line]
        assert len(told) == 1 and not [line for line in expected["told"] if "lm_head" in line]
