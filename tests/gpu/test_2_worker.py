# SPDX-License-Identifier: Apache-2.0
"""Make updates of verl's worker on the GPU, with FSDP2 and FSDP1, without Ray and vLLM.

Each setting makes one update of the same tiny model on the same mini-batch, in float32, and its bounds are compared
with those of the CPU platform. One test compares rho in the default precision. The last test takes a model of a usual
size with random weights. It reports the peak memory of an update, and its time by the way in which it finds its bounds.
"""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

import verl  # noqa: F401 - where a package is missing, the stage fails here, once
from tests.support.actor import untie_embeddings
from tests.support.gpu_update import ROOT, look_at_update, write_llama

ROWS = 16
ACTOR, MODEL, FSDP = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
COMMON = [
    f"{MODEL}.use_remove_padding=true",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    f"{ACTOR}.policy_loss.contribution=gradient",
    f"{ACTOR}.policy_loss.positive_contribution_target=0.56",
]
FLOAT32 = [
    f"{FSDP}.dtype=float32",
    f"{FSDP}.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
]
PLAIN = f"{MODEL}.use_fused_kernels=false"
SETTINGS = {
    "four micro-batches": [PLAIN],
    "micro-batch scope": [PLAIN, f"{ACTOR}.policy_loss.bound_scope=micro_batch"],
    "one micro-batch": [PLAIN, f"{ACTOR}.ppo_micro_batch_size_per_gpu={ROWS}"],
    "dynamic batches": [PLAIN, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=64"],
    "no gradient checkpointing": [PLAIN, f"{MODEL}.enable_gradient_checkpointing=false"],
    "offload": [PLAIN, f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"],
    "LoRA": [PLAIN, f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear"],
    "fused kernels": [f"{MODEL}.use_fused_kernels=true"],
    "FSDP1": [PLAIN, f"{ACTOR}.strategy=fsdp"],  # verl's default engine
    "monitor on FSDP1": [
        PLAIN,
        f"{ACTOR}.strategy=fsdp",
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
        f"{ACTOR}.policy_loss._target_=recipe.bapo.policy_loss.MonitorConfig",
    ],
}
SCOPES = {"micro-batch scope"}  # their bounds differ from the other settings'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def platform(rehearsal):
    """Return the platform whose attention computes in float32 without flash-attn."""
    return "cpu" if rehearsal else "gpu_without_flash_attn"


@pytest.fixture(scope="module")
def task(folder):
    """Make the example's tiny model, barely trained, on the CPU."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scripts.example_task", str(folder / "task"), "--steps", "6"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=900)
    return folder / "task"


@pytest.fixture(scope="module")
def reference(task, folder):
    """Return a function that returns the CPU's update with a setting. Each update is made only once."""
    made = {}

    def update(name):
        if name not in made:
            overrides = [f"{MODEL}.path={task}/model", *COMMON, *FLOAT32, *SETTINGS[name]]
            (made[name],) = look_at_update(folder / f"cpu, {name}", overrides, "cpu", rows=ROWS)
        return made[name]

    return update


def bounds_of(seen):
    """Return ``c_low``, ``c_high`` and the steps of an update's search, or the means over its searches."""
    return [seen["logged"][f"actor/bapo/{name}"] for name in ("clip_low", "clip_high", "search_steps")]


def distance_of_rho(seen, expected):
    """Return the difference between two updates' values of rho at the start of the search."""
    one, other = (update["logged"]["actor/bapo/positive_contribution_start"] for update in (seen, expected))
    return abs(one - other)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bounds_of_an_update_are_those_of_the_cpu(name, task, folder, platform, reference, tell):
    expected = reference(name if name in SCOPES else "four micro-batches")
    if name not in SCOPES:
        assert 0 < bounds_of(expected)[2] < 51  # the search stopped between start and end
    overrides = [f"{MODEL}.path={task}/model", *COMMON, *FLOAT32, *SETTINGS[name]]
    (seen,) = look_at_update(folder / name, overrides, platform, rows=ROWS)
    assert bounds_of(seen) == bounds_of(expected)
    assert distance_of_rho(seen, expected) <= 1e-4
    tell("rho is off by", distance_of_rho(seen, expected))


def test_a_llama_of_the_same_weights_finds_the_same_bounds(task, folder, platform, reference, tell):
    model = write_llama(task / "model", folder / "model of a Llama")
    (seen,) = look_at_update(
        folder / "Llama", [f"{MODEL}.path='{model}'", *COMMON, *FLOAT32, PLAIN], platform, rows=ROWS
    )
    assert bounds_of(seen) == bounds_of(reference("four micro-batches"))
    assert distance_of_rho(seen, reference("four micro-batches")) <= 1e-4
    tell("rho is off by", distance_of_rho(seen, reference("four micro-batches")))


def test_fused_kernels_find_the_bounds_of_a_model_whose_embeddings_are_not_tied(task, folder, platform, tell):
    model = untie_embeddings(task / "model", folder / "untied model")
    seen = {}
    for name in ("four micro-batches", "fused kernels"):
        overrides = [f"{MODEL}.path='{model}'", *COMMON, *FLOAT32, *SETTINGS[name]]
        (seen[name],) = look_at_update(folder / f"untied, {name}", overrides, platform, rows=ROWS)
    logits, fused = seen.values()
    assert bounds_of(fused) == bounds_of(logits)
    assert distance_of_rho(fused, logits) <= 1e-4
    tell("rho is off by", distance_of_rho(fused, logits))


def test_two_ranks_find_the_bounds_of_one(task, folder, platform, reference, rehearsal):
    if not rehearsal and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    overrides = [f"{MODEL}.path={task}/model", *COMMON, *FLOAT32, PLAIN]
    for seen in look_at_update(folder / "two ranks", overrides, platform, ranks=2, rows=ROWS):
        assert bounds_of(seen) == bounds_of(reference("four micro-batches"))
        assert distance_of_rho(seen, reference("four micro-batches")) <= 1e-4


def has_flash_attn():
    """Return whether flash-attn 2 is installed. (``import flash_attn`` also works if only flash-attn-4 is.)"""
    try:
        importlib.import_module("flash_attn_2_cuda")
    except (ImportError, OSError):
        return False
    return True


@pytest.mark.parametrize("platform", ["gpu_without_flash_attn", "gpu_varlen", "gpu"])
def test_ratios_in_the_default_precision(platform, task, folder, reference, on_gpu, tell):
    if platform == "gpu" and not has_flash_attn():
        pytest.skip("flash-attn is not installed")
    (seen,) = look_at_update(folder / platform, [f"{MODEL}.path={task}/model", *COMMON], platform, rows=ROWS)
    assert seen["log_probs"] == "torch.float32"
    off = distance_of_rho(seen, reference("four micro-batches"))
    tell("rho is off by", off)
    assert off <= 0.02


def test_torchs_flash_attention_has_the_gradients_of_float32(on_gpu, tell):
    from recipe.bapo.verl_patches.attention import attend_by_sequence, call_kernel, find_borders

    positions = torch.cat([torch.arange(length) for length in (300, 704, 37)])[None].cuda()
    shape = (positions.shape[1], 12, 128)  # tokens, heads, size of a head
    generator = torch.Generator("cuda").manual_seed(0)
    exact = [torch.randn(shape, device="cuda", generator=generator).requires_grad_() for _ in "qkv"]
    weight = torch.randn(shape, device="cuda", generator=generator)
    for window in ((-1, 0), (99, 0)):
        call = (*find_borders(positions), 128**-0.5, window)
        expected = torch.autograd.grad((attend_by_sequence(*exact, *call) * weight).sum(), exact)
        rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        found = torch.autograd.grad((call_kernel(*rounded, *call).float() * weight).sum(), rounded)
        off = [((one.float() - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)]
        tell(f"window {window}: the gradients are off by", [round(distance, 5) for distance in off])
        assert max(off) <= 0.02  # 0.0035 at most on an H100, without a window


# Name of a model in tests/support/gpus.py, tokens of a micro-batch, longest response.
REHEARSED = (None, 256, 20)  # None: the example's model
SMALL_GPU = ("0.5B", 4096, 400)  # for GPUs below 70 GiB
USUAL = ("1.5B", 8192, 900)


@pytest.fixture(scope="module")
def usual(rehearsal, task, folder):
    """Write a model with random weights, and return its path and the sizes above (in a rehearsal: the example's)."""
    if rehearsal:
        return task / "model", *REHEARSED[1:]
    sys.path.append(str(ROOT / "tests"))
    from support.gpus import write_model
    from transformers import AutoConfig, AutoModelForCausalLM

    name, *sizes = USUAL if torch.cuda.mem_get_info()[1] >= 70 << 30 else SMALL_GPU
    path = write_model(task, folder / name, name)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path, *sizes


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused kernels"])
@pytest.mark.parametrize("entropy", [False, True], ids=["no entropy", "entropy"])
def test_memory_and_time_of_an_update(fused, entropy, usual, folder, rehearsal, tell):
    path, tokens, longest = usual
    platform = "cpu" if rehearsal else "gpu" if has_flash_attn() else "gpu_varlen"
    file = folder / f"usual, {fused}, {entropy}.json"
    sizes = ["--model", path, "--tokens", tokens, "--longest", longest, "--rounds", 2 if rehearsal else 3]
    overrides = [
        f"{MODEL}.enable_gradient_checkpointing=true",
        f"{MODEL}.use_fused_kernels={str(fused).lower()}",
        f"{ACTOR}.entropy_from_logits_with_chunking=true",
        f"{ACTOR}.entropy_checkpointing=true",
        f"{FSDP}.use_torch_compile=false",
    ]
    command = [sys.executable, "-m", "tests.benchmark.update", "--platform", platform, "--json", file, *sizes]
    command += ["--entropy"] * entropy + [*overrides, "--kinds", "forecast", "forward", "redone"]
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, timeout=900)
    (seen,) = json.loads(file.read_text()).values()
    tell("weights; platform", f"{seen['parameters']:,}; {platform}")
    for kind, seconds in seen["seconds"].items():
        tell(f"seconds of an update, {kind}", [round(second, 3) for second in seconds])
        tell(f"peak GiB above what was in use, {kind}", round(seen["gibibytes"][kind], 2))
    tell("graphs that torch compiled", seen["graphs"])
    assert seen["graphs"] == 0  # torch compiled nothing: it would compile again for each number of tokens
