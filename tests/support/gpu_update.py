# SPDX-License-Identifier: Apache-2.0
"""Make one update of verl's worker in a separate process, and report measurements.

Each setting needs its own process, because verl patches the model's class for fused kernels, and a process can have
only one process group. ``look_at_update`` starts the process, which runs ``python -m tests.support.gpu_update FILE``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PATIENCE = 900  # seconds for one update and the start of its process


def write_llama(qwen2, folder):
    """Write a Llama that computes the same as a Qwen2, with its weights and tokenizer. Returns ``folder``.

    On a GPU vLLM uses different model runners for the two. A Llama's attention has one more bias, which is zero here.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

    source = Qwen2ForCausalLM.from_pretrained(qwen2, dtype="auto")
    config = {key: value for key, value in source.config.to_dict().items() if key in LlamaConfig().to_dict()}
    config |= {"attention_bias": True, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model = LlamaForCausalLM(LlamaConfig(**config)).to(source.dtype)
    absent, unknown = model.load_state_dict(source.state_dict(), strict=False)
    if unknown or not all(name.endswith("o_proj.bias") for name in absent):
        raise ValueError(f"A Llama cannot replace {qwen2}: the weights {absent} are missing, {unknown} are unknown")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(qwen2).save_pretrained(folder)
    return folder


def look_at_update(folder, overrides, platform, ranks=1, **about):
    """Make one update with a setting. Returns a list with the result of ``run`` on each rank.

    Args:
        folder: a folder for files of this update only.
        overrides: overrides of the config, after those of ``tests.support.actor.make_actor``.
        platform: a file of ``recipe/bapo/config/platform``.
        about: ``rows`` and ``longest`` of the mini-batch.

    Raises:
        RuntimeError: a rank failed. The message has the end of its output.
    """
    from tests.support.ports import free_port

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    environment["HF_HUB_OFFLINE"] = "1"
    if platform == "cpu":
        environment |= {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    processes, files = [], [folder / f"rank{rank}.json" for rank in range(ranks)]
    for rank, file in enumerate(files):
        given = {"overrides": overrides, "platform": platform, "rank": rank, "size": ranks, "port": port, **about}
        file.write_text(json.dumps(given))
        log = open(file.with_suffix(".log"), "w")
        command = [sys.executable, "-m", "tests.support.gpu_update", str(file)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [_end(process) for process in processes]
    if any(codes):
        tails = "\n".join(file.with_suffix(".log").read_text()[-3000:] for file in files)
        raise RuntimeError(f"the update's processes ended with {codes}:\n{tails}")
    return [json.loads(file.read_text()) for file in files]


def _end(process):
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def run(overrides, platform, rank, size, port, rows=16, longest=20):
    """Make one update.

    Returns:
        A dictionary with these keys:

        - ``logged``: the bounds and their metrics. With ``bound_scope=micro_batch`` they are means.
        - ``log_probs``: the dtype of the log-probs of the extra forward, if there was one.
    """
    from tests.support.actor import make_actor, make_mini_batch

    actor = make_actor(overrides, rank, size, port, platform=platform, ours=True)
    infer, dtypes = actor.infer_batch, []

    def infer_batch(data):
        output = infer(data)
        dtypes.append(str(output["log_probs"].dtype))
        return output

    actor.infer_batch = infer_batch
    data = make_mini_batch(actor, seed=3, rows=rows, rank=rank, size=size, longest=longest)
    actor.train_batch(data)
    return {"logged": actor.logged, "log_probs": dtypes[0] if dtypes else None}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    seen = run(**json.loads(file.read_text()))
    file.write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
