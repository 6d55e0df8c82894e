# SPDX-License-Identifier: Apache-2.0
"""verl's own Megatron engine on a CPU: its worker, its engine and Megatron's schedules, over gloo, in float32.

What this rig replaces, and hence does not show: TransformerEngine's layers (Megatron's local ones, with a plain
attention for packed sequences and context parallelism), Megatron-Bridge (the older mbridge loads the weights), CUDA and
NCCL, bfloat16, sequence parallelism. Nor does a test use offload, router replay, fused kernels, multi-token prediction,
or export weights to a rollout engine. The versions are those in ``PACKAGES``.

It changes the process in which it is used. ``tests/engines/layouts.py`` uses it in processes of its own.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".megatron"  # beside .venv and not in it, so that no other process imports it
PACKAGES = ("megatron-core==0.16.1", "mbridge==0.15.1")
ACTOR = "actor_rollout_ref.actor"
MEGATRON, TRANSFORMER = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"
# What needs TransformerEngine, Apex or CUDA.
FUSIONS = (
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
)
OPTIONS = (
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ACTOR}.optim.lr=7e-4",
    f"{ACTOR}.optim.total_training_steps=100",
    f"{ACTOR}.use_kl_loss=false",
    f"{ACTOR}.clip_ratio_c=3.0",
    "actor_rollout_ref.model.use_remove_padding=true",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    f"{MEGATRON}.vanilla_mbridge=true",
    f"{TRANSFORMER}.attention_backend=local",
    f"+{TRANSFORMER}.transformer_impl=local",
    f"+{TRANSFORMER}.sequence_parallel=false",  # mbridge would turn it on with tensor parallelism
    f"+{TRANSFORMER}.moe_grouped_gemm=false",
    *(f"+{TRANSFORMER}.{name}=false" for name in FUSIONS),
)
# Names of weights in a dense layer: Megatron's local layers', and TransformerEngine's, which mbridge knows.
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
EXPERT = re.compile(r"local_experts\.(\d+)\.(linear_fc\d)\.weight")


def install_packages() -> None:
    """Install Megatron and mbridge into ``.megatron/``, without their dependencies, unless they are there.

    Raises:
        subprocess.CalledProcessError: they cannot be installed.
    """
    done = FOLDER / "complete"
    if not done.exists() or done.read_text() != "\n".join(PACKAGES):
        command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable]
        subprocess.run([*command, "--target", FOLDER, *PACKAGES], check=True)
        done.write_text("\n".join(PACKAGES))
        importlib.invalidate_caches()  # Python remembers that the folder was not there when it was put on the path


def make_megatron_actor(overrides, rank, size, port, config_name="ppo_megatron_trainer"):
    """Make the actor's worker as verl's ``ActorRolloutRefWorker`` does, from ``OPTIONS`` and ``overrides``.

    Args:
        config_name: ``ppo_megatron_trainer`` is verl's own config; ``bapo_trainer`` is ours.
    """
    from hydra import compose, initialize_config_module

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    replace_cuda()
    use_local_layers()
    force_float32()
    from verl.workers.engine_workers import ActorRolloutRefWorker

    torch.manual_seed(0)
    ours = config_name == "bapo_trainer"
    with initialize_config_module("recipe.bapo.config" if ours else "verl.trainer.config", version_base=None):
        groups = ["model_engine=megatron", "platform=gpu"] if ours else []
        config = compose(config_name, [*groups, *OPTIONS, *overrides])
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker.actor


def replace_cuda() -> None:
    """Put on the CPU what Megatron makes on ``cuda``, and answer its calls of CUDA functions."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = lambda *args: None
    streams = MagicMock()
    torch.cuda.Stream = torch.cuda.current_stream = torch.cuda.stream = lambda *args: streams
    torch.nn.Module.cuda = lambda module, *args: module
    _CPUInPlaceOfCuda().__enter__()  # for the rest of the process


class _CPUInPlaceOfCuda(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")  # Megatron's optimizer asserts these names
        return result


def use_local_layers() -> None:
    """Have mbridge build Megatron's own layers, with our attention, and load the weights under their names."""
    from mbridge.core import llm_bridge
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def local_spec(config, use_transformer_engine, vp_stage=None):  # mbridge looks for the name vp_stage
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", vp_stage=vp_stage)

    def to_hugging_face(bridge, name):
        for local, known in NORMS.items():
            if local.partition(".")[0] not in bridge._MLP_MAPPING:  # a mixture of experts has it under its own name
                name = name.replace(local, known)
        return of_mbridge(bridge, name)

    def to_global(bridge, model, consider_ep=True):
        first = bridge.mpu.ep_rank * (bridge.config.num_moe_experts or 0) // bridge.mpu.ep_size
        names = of_all_ranks(bridge, model, consider_ep)
        return {
            local: EXPERT.sub(lambda match: f"{match[2]}.weight{int(match[1]) + first}", name)
            for local, name in names.items()
            if not name.endswith("expert_bias")  # it is not in the Hugging Face model, and starts at 0
        }

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    moe_utils.te_general_gemm = None  # Megatron defines it only where TransformerEngine is installed
    of_all_ranks = llm_bridge.LLMBridge._weight_name_mapping_mcore_local_to_global
    llm_bridge.LLMBridge._weight_name_mapping_mcore_local_to_global = to_global
    backends.LocalSpecProvider.core_attention = lambda provider: PlainAttention
    llm_bridge.get_gpt_decoder_block_spec = local_spec
    of_mbridge = llm_bridge.LLMBridge._weight_name_mapping_mcore_to_hf
    llm_bridge.LLMBridge._weight_name_mapping_mcore_to_hf = to_hugging_face


def force_float32() -> None:
    """Set the engine to float32 after the checks of verl's config, which accepts only bfloat16 and float16."""
    from verl.workers.config import McoreEngineConfig

    validate = McoreEngineConfig.__post_init__

    def validate_and_force(config):
        validate(config)
        object.__setattr__(config, "dtype", "float32")

    McoreEngineConfig.__post_init__ = validate_and_force


class PlainAttention(torch.nn.Module):
    """Causal attention. Megatron's own local attention supports neither packed sequences nor context parallelism.

    Queries stay where they are; keys and values of all context ranks are gathered.
    """

    def __init__(self, config, *args, pg_collection, softmax_scale=None, **kwargs):
        super().__init__()
        self.scale, self.group = softmax_scale, pg_collection.cp

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):
        """Attend. Shapes: ``(tokens, heads, size)`` if packed; ``(tokens, rows, heads, size)`` if right-padded."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        else:
            ends = [0, len(query) * self.group.size()]
        sequence, position = zip(*(self._places(ends, rank) for rank in range(self.group.size())), strict=True)
        mine = self.group.rank()
        allowed = sequence[mine][:, None] == torch.cat(sequence)
        allowed &= position[mine][:, None] >= torch.cat(position)
        heads_first = (part.permute(1, 2, 0, 3) for part in (query, self._gather(key), self._gather(value)))
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=allowed, scale=self.scale, enable_gqa=True
        )
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output.squeeze(1) if packed else output

    def _gather(self, part):
        if self.group.size() == 1:
            return part
        return torch.cat(torch.distributed.nn.functional.all_gather(part.contiguous(), group=self.group))

    def _places(self, ends, rank):
        """Return each token's sequence and its position in it. A context rank holds two chunks of each sequence."""
        chunks, sequences, positions = 2 * self.group.size(), [], []
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            of_sequence = torch.arange(end - start).view(chunks, -1) if chunks > 2 else torch.arange(end - start)[None]
            positions.append(of_sequence[[rank, -1 - rank]].flatten() if chunks > 2 else of_sequence[0])
            sequences.append(torch.full_like(positions[-1], number))
        return torch.cat(sequences), torch.cat(positions)
