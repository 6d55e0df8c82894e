# SPDX-License-Identifier: Apache-2.0
"""Make a real actor worker (verl's FSDP engine) without Ray, on a CPU or a GPU, for tests and timings of updates."""

import os
from pathlib import Path

from .ports import free_port as free_port
from .versions import WITHOUT_PLATFORM, as_padded_batch, has_platforms, has_v1_trainer, run_on_a_cpu

ROOT = Path(__file__).parents[2]


def make_actor(overrides, rank=0, size=1, port=0, platform="cpu", ours=False, role="actor"):
    """Make the actor's worker as verl's ``ActorRolloutRefWorker`` does, from verl's config with ``overrides``.

    Args:
        role: ``actor``, or ``ref`` for the worker of a reference model.
        platform: a file of ``recipe/bapo/config/platform``. On GPUs each rank uses the GPU of its number.
        ours: use the config of our trainer, with the settings of our example, instead of verl's.

    The engine is FSDP2, unless ``overrides`` has ``FSDP1``.
    """
    from recipe.bapo.config import compose_config, cpu_environment

    if platform == "cpu":
        os.environ.update(cpu_environment())
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK="0" if platform == "cpu" else str(rank),
    )
    os.environ["DIST_INIT_METHOD"] = f"tcp://127.0.0.1:{port}"
    os.environ.update({name: "unused" for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")})  # configs read them
    import torch

    import verl  # noqa: F401
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if platform == "cpu" and not has_platforms():
        run_on_a_cpu()
    if platform == "cpu" and FSDP1 in overrides:
        let_fsdp1_run_on_a_cpu()
    torch.set_num_threads(1)  # also in processes that a test has started
    torch.manual_seed(0)
    common = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.optim.total_training_steps=100"]
    if ours:
        groups = ["experiment=example", "size=cpu", f"platform={platform}"]
        no_record = "actor_rollout_ref.actor.policy_loss.record_dir=null"
        config = compose_config([*groups, *common, no_record, *overrides], ROOT / "configs")
    else:
        without = [] if has_platforms() else WITHOUT_PLATFORM
        config = compose_stock_config([f"+platform={platform}", *without, *STOCK, *common, *overrides])
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
    worker.init_model()
    return getattr(worker, role)


def let_fsdp1_run_on_a_cpu():
    """Replace what torch's FSDP1 and verl do with an accelerator, for the rest of the process."""
    import torch
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel
    from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

    from verl.utils import fsdp_utils
    from verl.workers.engine.fsdp import transformer_impl

    def use_cpu(state, *args, **kwargs):
        state._device_handle = _FSDPDeviceHandle(torch.device("cpu"), torch.cpu)
        return state

    _init_utils._init_device_handle = fully_sharded_data_parallel._init_device_handle = use_cpu
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None

    def make_weights(module):
        return module if torch.distributed.get_rank() == 0 else module.to_empty(device="cpu", recurse=False)

    transformer_impl.init_fn = make_weights  # of untied models, which verl loads on the first rank alone
    transformer_impl.get_device_id = lambda: torch.device("cpu")
    fsdp_utils.get_device_id = lambda: 0  # for offload


# What switches BAPO on in a run of verl.
TWO_LINES = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
    "actor_rollout_ref.actor.policy_loss._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig",
)
FSDP1 = "actor_rollout_ref.actor.strategy=fsdp"  # verl's default engine

# Values of the example's config, so that both configs make the same updates.
STOCK = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "actor_rollout_ref.actor.optim.lr=7e-4",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.calculate_entropy=false",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
)


def compose_stock_config(overrides):
    """Compose verl's own config, with the folder of our platforms added."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["hydra.searchpath=[pkg://recipe.bapo.config]", *overrides])


def actor_config(policy_loss, **changes):
    """Make verl's actor config for calls of a loss without a worker."""
    from verl.workers.config import FSDPActorConfig

    sizes = {"rollout_n": 8, "ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}
    return FSDPActorConfig(strategy="fsdp2", policy_loss=policy_loss, **sizes, **changes)


def untie_embeddings(source, folder):
    """Write the model in ``source`` to ``folder`` with an untied, different output layer. Returns ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    weight = model.lm_head.weight.detach()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.lm_head.weight = torch.nn.Parameter(weight + 0.02 * noise)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def make_mini_batch(actor, seed, rows, rank=0, size=1, staleness=0.6, longest=20, axes=1):
    """Make this rank's share of a mini-batch of ``rows`` sequences in the layout of verl's trainer.

    V1's is jagged; a verl without V1 has that of the trainer before it.

    The old log-probs differ from the model's by ``staleness`` (standard deviation). Vision-language models have
    positions on 4 ``axes``.
    """
    import torch
    from tensordict import NonTensorData, TensorDict

    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    sequences = {name: [] for name in ("prompts", "responses", "input_ids", "position_ids", "loss_mask")}
    masks, advantages, noise = [], [], []
    for _ in range(rows):
        prompt = torch.randint(5, 200, (4,), generator=generator)
        length = int(torch.randint(3, longest, (1,), generator=generator))
        response = torch.randint(5, 200, (length,), generator=generator)
        sequences["prompts"].append(prompt)
        sequences["responses"].append(response)
        sequences["input_ids"].append(torch.cat([prompt, response]))
        positions = torch.arange(4 + length)
        sequences["position_ids"].append(positions if axes == 1 else positions.expand(axes, -1))
        sequences["loss_mask"].append(torch.cat([torch.zeros(4), torch.ones(length)]).long())
        masks.append(torch.ones(length).long())
        advantages.append(torch.full((length,), 1.0 if len(advantages) % 2 else -1.0))
        noise.append(staleness * torch.randn(length, generator=generator))
    mine = slice(rank * rows // size, (rank + 1) * rows // size)

    def jagged(parts):
        return torch.nested.as_nested_tensor(parts[mine], layout=torch.jagged)

    count = len(masks[mine])
    data = TensorDict({name: jagged(parts) for name, parts in sequences.items()}, batch_size=[count])
    data["response_mask"] = jagged(masks)
    data["advantages"] = jagged(advantages)
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=rows, calculate_entropy=True, compute_loss=False)
    log_probs = actor.infer_batch(data.copy())["log_probs"].cpu()
    # The log-prob of a token is one position before it.
    responses = [part[-1 - len(off) : -1] for part, off in zip(log_probs.unbind(), noise[mine], strict=True)]
    old = [part + off for part, off in zip(responses, noise[mine], strict=True)]
    data["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    lengths = [len(ids) for ids in sequences["input_ids"]]  # of all ranks, as in verl's train_mini_batch
    tu.assign_non_tensor(data, compute_loss=True, global_token_num=NonTensorData(lengths))
    return data if has_v1_trainer() else as_padded_batch(data)


def run_update(actor, data):
    """Make one update. Returns its metrics and the gradient before its norm is clipped, as one flat vector."""
    import torch

    from verl.utils import tensordict_utils as tu

    gradients = []
    step = actor.engine.optimizer_step

    def keep_gradient():
        parameters = [p.grad for p in actor.engine.module.parameters() if p.grad is not None]
        gradients.append(torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in parameters]).clone())
        return step()

    actor.engine.optimizer_step = keep_gradient
    output = actor.train_batch(data)
    actor.engine.optimizer_step = step
    return tu.get(output, "metrics"), gradients[0]
