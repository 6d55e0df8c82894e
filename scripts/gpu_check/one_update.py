# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of scripts/gpu_check.sh: updates of verl's FSDP2 worker on the GPU, without Ray and vLLM.

Each setting makes one update of the same tiny model on the same mini-batch, in float32, and its bounds are compared
with those of the CPU platform. verl patches the model's class for fused kernels: a process for each kind of setting.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from scripts.benchmark.loss import TARGET
from scripts.gpu_check.table import ROOT, Table, main
from tests.support.actor import free_port, make_actor, make_mini_batch, run_update

ROWS = 16
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
COMMON = [
    f"{MODEL}.use_remove_padding=true",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    f"{ACTOR}.policy_loss.contribution=gradient",
    f"{ACTOR}.policy_loss.positive_contribution_target=0.56",
]
FLOAT32 = [
    f"{MODEL}.use_fused_kernels=false",
    f"{ACTOR}.fsdp_config.dtype=float32",
    f"{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
]
MICRO_BATCH = "bound_scope=micro_batch"
SETTINGS = {
    "four micro-batches": [],
    MICRO_BATCH: [f"{ACTOR}.policy_loss.bound_scope=micro_batch"],
    "one micro-batch": [f"{ACTOR}.ppo_micro_batch_size_per_gpu={ROWS}"],
    "dynamic batches": [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=64"],
    "gradient checkpointing": [f"{MODEL}.enable_gradient_checkpointing=true"],
    "offload": [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"],
    "LoRA": [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear"],
}
GROUPS = {  # kind: settings
    "reference": {name: [*FLOAT32, *SETTINGS[name]] for name in ("four micro-batches", MICRO_BATCH)},
    "float32": {name: [*FLOAT32, *setting] for name, setting in SETTINGS.items()},
    "fused": {"fused kernels": [*FLOAT32, f"{MODEL}.use_fused_kernels=true"]},
    "ranks": {"two ranks": FLOAT32},
    "default": {"default precision": []},
}
MODEL_SIZE = {True: (2, 64, 20), False: (12, 1024, 900)}  # layers, hidden size, longest response; by rehearsal


@contextmanager
def waits(on_gpu):
    """Counts where the host waits for the GPU: in ``ours``, in ``verl`` or elsewhere (``other``)."""
    counts: Counter[str] = Counter()

    def show(message, *_, **__):
        if "called a synchronizing" in str(message):
            counts[caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")


def caller():
    """Whose code calls: the innermost frame that is ours or verl's decides."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename.startswith((f"{ROOT}/bapo/", f"{ROOT}/recipe/")):
            return "ours"
        if "/verl/" in frame.f_code.co_filename:
            return "verl"
    return "other"


def run_setting(overrides, platform, task, folder, rank, size, port):
    """One update with a setting; what was seen of it."""
    record = folder / "bounds"
    settings = [f"{MODEL}.path={task}/model", f"{ACTOR}.policy_loss.bounds_record_dir='{record}'", *COMMON, *overrides]
    actor = make_actor(settings, rank, size, port, platform=platform)
    on_gpu = platform != "cpu"
    infer, dtypes = actor.infer_batch, []

    def infer_batch(data):
        output = infer(data)
        dtypes.append(str(output["log_probs"].dtype))
        return output

    actor.infer_batch = infer_batch
    data = make_mini_batch(actor, seed=3, rows=ROWS, rank=rank, size=size)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with waits(on_gpu) as counts:
        run_update(actor, data)
    return {
        "record": [json.loads(line) for line in (record / f"rank{rank}.jsonl").read_text().splitlines()],
        "log-probs": dtypes[0],
        "waits": dict(counts),
        "seconds": time.perf_counter() - begin,
        "peak MB": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else 0,
    }


def run_group(group, platform, task, folder, rank, size, port):
    """In a process of its own: the settings of a group, each of which writes a file."""
    for name, overrides in GROUPS[group].items():
        here = Path(folder) / name
        here.mkdir(parents=True, exist_ok=True)
        try:
            with redirect_stdout(sys.stderr):
                seen = run_setting(overrides, platform, task, here, int(rank), int(size), int(port) or free_port())
        except Exception as error:
            traceback.print_exc()
            seen = {"error": f"{type(error).__name__}: {error}"[:200]}
        (here / f"rank{rank}.json").write_text(json.dumps(seen))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Updates:
    """Starts the groups and reads what they saw."""

    def __init__(self, folder, rehearsal):
        self.folder, self.rehearsal, self.task = Path(folder), rehearsal, Path(folder) / "task"
        self.without_flash = "cpu" if rehearsal else "gpu_without_flash_attn"

    def call(self, *arguments, platform, wait=True):
        """``python -m`` in a process with a platform's environment."""
        environment = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
        environment["HF_HUB_OFFLINE"] = "1"
        if platform == "cpu":
            environment |= {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=sys.stderr)
        return process if not wait else self.end(process)

    @staticmethod
    def end(process, patience=900):
        """Wait; a process that hangs is killed."""
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return process.returncode

    def run(self, group, platform, ranks=1):
        """What each setting's ranks saw: the exit code is no news, a setting that failed says so itself."""
        here = self.folder / f"{group} {platform}"
        port = 0 if ranks == 1 else free_port()
        common = ("scripts.gpu_check.one_update", "group", group, platform, str(self.task), str(here))
        started = [
            self.call(*common, str(rank), str(ranks), str(port), platform=platform, wait=False) for rank in range(ranks)
        ]
        codes = [self.end(process) for process in started]
        nothing = {"error": f"the process ended with {codes}"}
        files = {name: [here / name / f"rank{rank}.json" for rank in range(ranks)] for name in GROUPS[group]}
        return {
            name: [json.loads(path.read_text()) if path.exists() else nothing for path in paths]
            for name, paths in files.items()
        }


def bounds_of(seen):
    """``c_low``, ``c_high`` and steps of each search in a record."""
    return [tuple(float.fromhex(line[name]) for name in ("low", "high", "search_steps")) for line in seen["record"]]


def rho_of(seen):
    """The share at the start of each search."""
    return [float.fromhex(line["positive_contribution_start"]) for line in seen["record"]]


def compare(table: Table, name, ranks, reference, tolerance, bounds=True):
    """Rows of one setting: each rank's bounds against the CPU's; what the first rank saw beside."""
    for seen in ranks:
        if "error" in seen:
            table.check(name, "an update", seen["error"], False)
            return
    expected = reference[MICRO_BATCH if name == MICRO_BATCH else "four micro-batches"][0]
    if bounds:
        same = all(bounds_of(seen) == bounds_of(expected) for seen in ranks)
        table.check(f"{name}: bounds and steps", bounds_of(expected)[0], bounds_of(ranks[0])[0], same)
    off = max(abs(a - b) for seen in ranks for a, b in zip(rho_of(seen), rho_of(expected), strict=True))
    table.check(f"{name}: rho", f"within {tolerance:g} of the CPU's", f"{off:.1e}", off <= tolerance)
    ours, most = ranks[0]["waits"].get("ours", 0), 2 if name == "one micro-batch" else ROWS // 4 + 1
    if table.rehearsal:
        return
    table.check(f"{name}: waits of ours for the GPU", f"at most {most}", ours, ours <= most or "dynamic" in name)
    told = f"{ranks[0]['waits'].get('verl', 0)}, {ranks[0]['peak MB']:.0f}, {ranks[0]['log-probs']}"
    table.tell(f"{name}: waits of verl's, peak MB, log-probs", told)


def updates_against_the_cpu(table: Table):
    with tempfile.TemporaryDirectory() as folder:
        updates = Updates(folder, table.rehearsal)
        make_task = ("recipe.bapo.example.task", str(updates.task), "--steps", "6")
        if updates.call(*make_task, platform="cpu"):
            raise RuntimeError("the example's task could not be made")
        reference = updates.run("reference", "cpu")
        for name, (seen,) in reference.items():
            if "error" in seen:
                raise RuntimeError(f"on the CPU platform: {name}: {seen['error']}")
        _, _, steps = bounds_of(reference["four micro-batches"][0])[0]
        table.check("the CPU's search", "stops on its way", f"{steps:.0f} steps", 0 < steps < 51)
        for group in ("float32",) if table.rehearsal else ("float32", "fused"):
            for name, ranks in updates.run(group, updates.without_flash).items():
                compare(table, name, ranks, reference, 1e-4)
        if table.rehearsal or torch.cuda.device_count() > 1:
            for name, ranks in updates.run("ranks", updates.without_flash, ranks=2).items():
                compare(table, name, ranks, reference, 1e-4)
        for platform in () if table.rehearsal else ("gpu_without_flash_attn", "gpu"):
            if platform == "gpu" and importlib.util.find_spec("flash_attn") is None:
                table.tell("default precision, platform=gpu", "flash-attn is not installed")
                continue
            ((name, ranks),) = updates.run("default", platform).items()
            compare(table, f"{name}, platform={platform}", ranks, reference, 0.02, bounds=False)


def what_an_update_costs(table: Table):
    layers, hidden, longest = MODEL_SIZE[table.rehearsal]
    with tempfile.TemporaryDirectory() as folder:
        updates, file = Updates(folder, table.rehearsal), Path(folder) / "update.json"
        sizes = (str(layers), str(hidden), "1" if table.rehearsal else "7", updates.without_flash, str(longest))
        if updates.call("scripts.gpu_check.one_update", "time", str(file), *sizes, platform=updates.without_flash):
            raise RuntimeError("the update could not be timed")
        for name, seen in json.loads(file.read_text()).items():
            table.tell(f"{layers} x {hidden}: {name}", f"{seen:,.4f} s" if name != "weights" else f"{seen:,}")


def the_loss_beside_verls(table: Table):
    with tempfile.TemporaryDirectory() as folder:
        updates, file = Updates(folder, table.rehearsal), Path(folder) / "loss.json"
        small = ("--rows", "4", "--columns", "100", "--repeats", "1") if table.rehearsal else ()
        if updates.call("scripts.benchmark.loss", "--json", str(file), *small, platform=updates.without_flash):
            raise RuntimeError("the loss could not be timed")
        for dtype, machines in json.loads(file.read_text()).items():
            for machine, times in machines.items():
                for name in (name for name in times if name.startswith("bapo")):
                    ratio = times[name] / times["vanilla"]
                    judged = None if table.rehearsal or machine.startswith("CPU") else ratio <= TARGET
                    what = f"{name}, {dtype}, {machine}, in multiples of vanilla ({times['vanilla']:.2f} ms)"
                    table.check(what, f"at most {TARGET}", f"{ratio:.2f}", judged)


CHECKS = (updates_against_the_cpu, what_an_update_costs, the_loss_beside_verls)

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["group", *given]:
            run_group(*given)
        case ["time", file, layers, hidden, repeats, platform, longest]:
            from scripts.benchmark.update import measure

            with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
                found = measure(folder, int(layers), int(hidden), int(repeats), platform, int(longest))
            Path(file).write_text(json.dumps(found))
        case _:
            sys.exit(main("2", CHECKS))
