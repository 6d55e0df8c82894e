# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation=torch_varlen`` makes sdpa's updates in verl's worker, with both engines, on two ranks."""

import pytest
from support.actor import TWO_LINES
from support.families import ENGINES, FUSED, MODEL, train_ranks, write_model

PACKED = [f"{MODEL}.use_remove_padding=true"]
VARLEN = [  # as platform=gpu_varlen sets them
    f"{MODEL}.external_lib=[recipe.bapo.verl_patches.attention,recipe.bapo.verl_patches.fused_heads]",
    f"{MODEL}.override_config.attn_implementation=torch_varlen",
]
COMMON = [*TWO_LINES, *PACKED, FUSED, "++actor_rollout_ref.actor.policy_loss.positive_contribution_target=0.45"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a Qwen2 with grouped keys."""
    folder = tmp_path_factory.mktemp("model")
    write_model("Qwen2, tied", folder)
    return folder


@pytest.mark.parametrize("engine", ["FSDP2", pytest.param("FSDP1", marks=pytest.mark.slow)])
def test_an_update_on_packed_sequences_is_sdpas(engine, model, tmp_path):
    ranks_of_sdpa, ranks_of_varlen = (
        train_ranks(model, [*COMMON, *ENGINES[engine], *chosen], tmp_path / "results") for chosen in ([], VARLEN)
    )
    for of_sdpa, of_varlen in zip(ranks_of_sdpa, ranks_of_varlen, strict=True):
        assert (of_sdpa["attention"], of_varlen["attention"]) == ("sdpa", "torch_varlen")
        expected, found = (of_rank["metrics"] for of_rank in (of_sdpa, of_varlen))
        assert all(0 < steps < 51 for steps in expected["actor/bapo/search_steps"])  # neither start nor end
        for name in ("clip_low", "clip_high", "search_steps"):
            assert found[f"actor/bapo/{name}"] == expected[f"actor/bapo/{name}"]
        for name in ("actor/bapo/positive_contribution_start", "actor/bapo/positive_contribution", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
        for name, weight in of_sdpa["weights"].items():
            assert (of_varlen["weights"][name] - weight).abs().max() <= 1e-5, name
