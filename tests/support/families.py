# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of several families, and updates with them on two ranks in processes without our code.

This module imports nothing of ours, because its functions run in the processes that have to be verl's alone.
"""

import io
import multiprocessing
import sys
from contextlib import redirect_stderr

import torch
import torch.multiprocessing as mp
from support.actor import FSDP1, free_port, make_actor, make_mini_batch

ROWS, RANKS = 16, 2
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FUSED = f"{MODEL}.use_fused_kernels=true"
ENGINES = {"FSDP1": [FSDP1], "FSDP2": []}
MONITOR = [f"{ACTOR}.policy_loss._target_=recipe.bapo.policy_loss.MonitorConfig"]
LORA = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear"]

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, head_dim=8)
VISION = dict(depth=2, num_heads=2, patch_size=4, out_hidden_size=32, intermediate_size=64)
POSITIONS = dict(hidden_size=32, num_position_embeddings=16)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
ROTARY = dict(rope_type="default", rope_theta=10000.0)
FRACTIONAL = ROTARY | dict(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
# By name: the class of the model, and the settings of its config and of the vision part's. Untied, unless it says so.
FAMILIES = {
    "Qwen2": ("Qwen2ForCausalLM", {}, None),
    "Qwen2, tied": ("Qwen2ForCausalLM", {}, None),
    "Qwen2, LoRA": ("Qwen2ForCausalLM", {}, None),
    "Llama": ("LlamaForCausalLM", {}, None),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", EXPERTS, None),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        dict(head_dim=8, rope_parameters=ROTARY | dict(mrope_section=[2, 1, 1], mrope_interleaved=True)),
        VISION | POSITIONS | dict(deepstack_visual_indexes=[0]),
    ),
    "Qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        dict(head_dim=32, layer_types=["linear_attention", "full_attention"], rope_parameters=FRACTIONAL, **LINEAR),
        VISION | POSITIONS,
    ),
    "Qwen3.5, text": (
        "Qwen3_5ForCausalLM",
        dict(head_dim=32, layer_types=["linear_attention", "full_attention"], rope_parameters=FRACTIONAL, **LINEAR),
        None,
    ),
}
FAMILIES["Qwen3.5, LoRA"] = FAMILIES["Qwen3.5"]
FAMILIES |= {f"{name}, tied": FAMILIES[name] for name in ("Qwen3-MoE", "Qwen3-VL", "Qwen3.5")}


def write_model(family, folder):
    """Write a random model of a family and its tokenizer to a folder. Without images, verl needs no processor."""
    import transformers

    from scripts.example_task import make_tokenizer

    name, settings, vision = FAMILIES[family]
    tokenizer, tied = make_tokenizer(), family.endswith(", tied")
    tokens = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    cls = getattr(transformers, name)
    settings = SIZES | settings | tokens | dict(vocab_size=len(tokenizer) + 4)
    if vision is None:
        config = cls.config_class(**settings, tie_word_embeddings=tied)
    else:
        marks = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
        marks = {mark: len(tokenizer) + number for number, mark in enumerate(marks)}
        config = cls.config_class(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **marks)
    torch.manual_seed(1)
    cls(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(rank, port, model, overrides):
    """Make two updates on one batch from verl's own config, as one of ``RANKS`` ranks.

    Returns:
        verl's metrics and ours, the weights of this rank, whether the forward is a fused one, which of our modules this
        process has imported, and the lines that it printed for the user.
    """
    from verl.utils import tensordict_utils as tu

    common = [
        f"{MODEL}.path='{model}'",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    with redirect_stderr(io.StringIO()) as printed:
        actor = make_actor([*common, *overrides], rank, RANKS, port)
    axes = 4 if hasattr(actor.engine.module.config, "vision_config") else 1
    data = make_mini_batch(actor, seed=7, rows=ROWS, rank=rank, size=RANKS, axes=axes)
    tu.assign_non_tensor(data, mini_batch_size=ROWS // 2, global_batch_size=ROWS // 2, epochs=1)
    metrics = tu.get(actor.train_mini_batch(data), "metrics")
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in actor.engine.module.named_parameters()}
    return {
        "metrics": {name: values for name, values in metrics.items() if "perf/" not in name},
        "weights": {name: weight.detach().clone() for name, weight in weights.items()},
        "attention": actor.engine.module.config._attn_implementation,
        "fused": any("_verl_fused_kernels_backend" in vars(module) for module in actor.engine.module.modules()),
        "told": [line for line in printed.getvalue().splitlines() if line.startswith("BAPO: ")],
        "ours": sorted(name for name in sys.modules if name.startswith(("bapo", "recipe.bapo."))),
    }


def train_to_file(rank, port, model, overrides, file):
    torch.save(train(rank, port, model, overrides), f"{file}.{rank}")


def train_ranks(model, overrides, file):
    """Make the updates of ``train`` on all ranks, each in a process that has imported verl and nothing of ours.

    Each process is a fork of one that has only imported verl. verl patches the classes of models and our code patches
    verl, so no process may serve for two cases.
    """
    multiprocessing.set_forkserver_preload(["torch", "transformers", "verl.workers.engine_workers"])
    arguments = (free_port(), str(model), overrides, str(file))
    mp.start_processes(train_to_file, arguments, nprocs=RANKS, start_method="forkserver")
    return [torch.load(f"{file}.{rank}", weights_only=False) for rank in range(RANKS)]
