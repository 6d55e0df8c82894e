# SPDX-License-Identifier: Apache-2.0
"""vLLM's share of a GPU follows from model and GPUs, and what does not fit is said. GPUs and weights are pretended."""

import os
import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from support.configs import ROOT, compose_in_groups
from support.gpus import write_model, write_nvidia_smi

from recipe.bapo.config.memory import GIB, Needs, read_needs, usable_memory
from recipe.bapo.preflight import CheckSkipped, CheckWarning, machine

FSDP, ROLLOUT = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout"
# GiB that torch names as a GPU's capacity, of one of these or of the eighth of eight.
GPUS = {"20 GiB": (1, 20.0), "RTX 4090": (1, 23.6), "A100, 40 GB": (1, 39.5), "L40S": (1, 44.4)}
GPUS |= {"H100": (1, 79.6), "8 x H100": (8, 79.6)}
PARAMETERS = 7_615_616_512  # of Qwen2.5-7B, by its model card and transformers
REFUSED = "GiB are missing. Take more GPUs, or set actor_rollout_ref.actor.fsdp_config.offload_policy=true"
PAGE = (ROOT / "docs/larger_models.md").read_text()
# vLLM's share with the sizes of configs/size, by the page's table; 0.7 is the default.
ROWS = re.findall(r"^\| ([\d.]+B) \| " + r" \| ".join([r"(too large|0\.\d+)"] * 5) + r" \|$", PAGE, re.M)
CASES = [("20 GiB", "0.5B", "0.64")]  # 0.7 would leave 0.5 GiB
CASES += [(gpu, model, share) for model, *row in ROWS for gpu, share in zip([*GPUS][1:], row, strict=True)]


@pytest.fixture(scope="module")
def models(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(task, folder / name, name) for name in ("0.5B", "1.5B", "3B", "7B")}


@pytest.fixture
def config_on(models, tmp_path, monkeypatch):
    """Return a function that composes a config for a model on pretended GPUs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, "unused")

    def config_of(gpu, model, *overrides, experiment="example"):
        number, gibibytes = GPUS[gpu]
        write_nvidia_smi(tmp_path, number, gibibytes)
        monkeypatch.setenv("MODEL_PATH", str(models[model]))
        size = "size=gpu_few" if number == 1 else "size=gpu"
        chosen = [f"experiment={experiment}", size, "platform=gpu_without_flash_attn"]
        return compose_in_groups(*chosen, f"trainer.n_gpus_per_node={number}", *overrides)

    return config_of


def share_or_warning(config):
    try:
        machine.check_gpu_memory(config)
    except CheckWarning as warning:
        return str(warning)
    except CheckSkipped:
        pass
    return config.actor_rollout_ref.rollout.gpu_memory_utilization


@pytest.mark.parametrize("gpu, model, share", CASES)
def test_vllms_share_is_what_fits_after_the_first_update(config_on, gpu, model, share):
    found = share_or_warning(config_on(gpu, model))
    if share == "too large":
        assert REFUSED in found
        assert not isinstance(share_or_warning(config_on(gpu, model, f"{FSDP}.offload_policy=true")), str)  # the fix
    else:
        assert found == float(share)


def test_the_page_has_a_row_for_each_model(models):
    assert [model for model, *_ in ROWS] == [*models]


@pytest.mark.parametrize("row", re.findall(r"^\| (\S+B) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M))
def test_what_the_page_says_of_gpus_of_80_gb(row):
    """12 and 16 bytes of each parameter. Their number follows from the shapes of Qwen3-4B, Qwen2.5-7B and -32B."""
    model, gpus, *said = row
    parameters = {"Qwen3-4B": 4_022_468_096, "7B": PARAMETERS, "32B": 32_763_876_352}[model]
    assert said == [f"{each * parameters / int(gpus) / GIB:.1f}" for each in (12, 16)]


def test_on_fsdp1_the_fix_names_the_strategy_that_can_offload(config_on):
    given = "actor_rollout_ref.actor.strategy=fsdp"
    said = share_or_warning(config_on("RTX 4090", "3B", given))
    assert (
        "set actor_rollout_ref.actor.strategy=fsdp2 and actor_rollout_ref.actor.fsdp_config.offload_policy=true" in said
    )
    assert isinstance(share_or_warning(config_on("RTX 4090", "3B", given, f"{FSDP}.offload_policy=true")), str)


def test_the_share_of_gsm8k_is_lowered_too(config_on):
    assert share_or_warning(config_on("H100", "3B", experiment="gsm8k")) == 0.5


def test_of_a_share_that_is_too_large_it_warns_with_the_one_that_fits(config_on):
    given = [f"{ROLLOUT}.gpu_memory_utilization=0.7"]
    said = share_or_warning(config_on("H100", "3B", *given))
    assert said.startswith(
        "a GPU has 79.6 GiB: 34.5 for weights and AdamW's moments (3,085,938,688 parameters on 1 GPU), "
    )
    assert ", 55.7 for vLLM (gpu_memory_utilization=0.7), and an update needs " in said
    assert "from the first update on 10.6 GiB are missing" in said
    assert said.endswith(f"Set {ROLLOUT}.gpu_memory_utilization=0.54.")
    assert share_or_warning(config_on("H100", "3B", f"{ROLLOUT}.gpu_memory_utilization=0.54")) == 0.54


@pytest.mark.parametrize(
    "override, kept, update",
    [
        ("actor_rollout_ref.model.lora_rank=32", 5.8, 5.8),
        (f"{FSDP}.offload_policy=true", 0.0, 0.0),
        (f"{FSDP}.model_dtype=bfloat16", 8.6, 11.5),
    ],
)
def test_what_the_page_says_of_1_5b_on_24_gb(config_on, override, kept, update):
    assert isinstance(share_or_warning(config_on("RTX 4090", "1.5B", experiment="gsm8k")), str)
    config = config_on("RTX 4090", "1.5B", override, experiment="gsm8k")
    needs = read_needs(config)
    assert (round(needs.kept / GIB, 1), round(needs.update / GIB, 1)) == (kept, update)
    assert share_or_warning(config) == 0.5
    shown = [f"{number:g}" if not number else f"{number}" for number in (kept, 0.5, update)]
    assert f"| `{override}` | {shown[0]} | {shown[1]} | {shown[2]} |" in PAGE


def test_what_is_left_free_and_what_vllm_gets_at_least():
    needs = Needs(gpu=80 * GIB, parameters=1, shards=1, kept=30 * GIB, update=40 * GIB, served=6 * GIB)
    assert needs.largest_share() == 0.6  # (80 - 30 - 1.5) / 80
    assert replace(needs, kept=68 * GIB).largest_share() == 0.13  # 10.4 GiB, and it needs 6 + 4
    assert replace(needs, kept=68.5 * GIB).largest_share() is None
    assert replace(needs, update=78.5 * GIB).can_update and not replace(needs, update=78.6 * GIB).can_update


@pytest.mark.parametrize(
    "overrides, shards, kept, update",
    [
        ([], 8, 12, 16),
        ([f"{FSDP}.fsdp_size=4"], 4, 12, 16),
        ([f"{FSDP}.param_offload=true"], 8, 8, 16),
        ([f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"], 8, 0, 16),
        ([f"{FSDP}.offload_policy=true"], 8, 0, 0),
        ([f"{FSDP}.offload_policy=true", "actor_rollout_ref.actor.strategy=fsdp"], 8, 12, 16),  # FSDP1 has none
        ([f"{FSDP}.model_dtype=bfloat16"], 8, 6, 8),
        (["actor_rollout_ref.model.lora_rank=8"], 8, 4, 4),
    ],
)
def test_bytes_of_a_parameter(config_on, overrides, shards, kept, update):
    needs = read_needs(config_on("8 x H100", "7B", *overrides))
    assert (needs.parameters, needs.shards) == (PARAMETERS, shards)
    assert needs.kept == kept * PARAMETERS / shards and needs.update == update * PARAMETERS / shards
    assert needs.gpu == round(79.6 * 1024) << 20


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-3B"],  # on the hub
        ["trainer.v1.trainer_mode=separate_async"],
        ["trainer.device=cpu"],
        ["trainer.n_gpus_per_node=0"],
        [f"{ROLLOUT}.tensor_model_parallel_size=two"],
    ],
)
def test_where_nothing_is_known_the_share_stays(config_on, overrides):
    config = config_on("H100", "3B", *overrides)
    assert read_needs(config) is None and share_or_warning(config) == 0.7
    with pytest.raises(CheckSkipped, match="compared with the model only where"):
        machine.check_gpu_memory(config)


def test_weights_that_cannot_be_read_are_left_to_the_check_of_the_model(config_on, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    config = config_on("H100", "3B", f"actor_rollout_ref.model.path={folder}")
    assert read_needs(config) is None and share_or_warning(config) == 0.7


def test_without_nvidia_smi_the_share_stays(config_on, tmp_path):
    config = config_on("H100", "3B")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert usable_memory() is None and share_or_warning(config) == 0.7


def test_the_smallest_of_the_visible_gpus_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase \"$*\" in *--id=0,2*) echo '1000, 0' ;; *) ;; esac\necho '24000, 400'\necho '16000, 0'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert usable_memory() == 16000 << 20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2")
    assert usable_memory() == 1000 << 20


def test_a_config_that_is_resolved_keeps_the_share(config_on, tmp_path):
    config = config_on("H100", "3B")
    OmegaConf.resolve(config)
    (tmp_path / "nvidia-smi").unlink()  # as in Ray's task
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.54
