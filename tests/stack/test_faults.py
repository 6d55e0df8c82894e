# SPDX-License-Identifier: Apache-2.0
"""After a fault in the real stack the run ends soon, names the cause, leaves nothing behind and can be resumed."""

import itertools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.stack_runs import ROOT, SCRIPT, SHORT_STEPS, Started, environment_of, updates_of

from recipe.bapo.host.cleanup import vllm_processes

LIMIT = 300  # seconds from the fault to the end of the run, on any machine: a run that hangs takes longer
SHORT = (
    "trainer.total_training_steps=60",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "watchdog.grace_s=10",
)
BROKEN_SYNCHRONISATION = """
from recipe.bapo.verl_patches.cpu.vllm import CPUWorkerExtension

class BrokenExtension(CPUWorkerExtension):
    received = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        self.received += 1
        if self.received > 2:
            raise RuntimeError("no room for these weights")
        super().update_weights_from_ipc(*args, **kwargs)
"""


def ends_cleanly(run, code=1):
    """Check how the run ends after a fault. Returns the last lines that it printed."""
    found, took = run.end(timeout=LIMIT)
    text = run.text()
    print(f"ended after {took:.0f} s")
    assert found == code, text
    assert not run.left()
    return "\n".join(text.splitlines()[-6:])


def can_go_on(last, *overrides, output=None):
    """Check that preflight accepts the checkpoint that the run's last lines name."""
    folder = last.split("The last checkpoint is ")[1].split(": to resume")[0]
    run = subprocess.run(
        [*SCRIPT, SHORT_STEPS, "--preflight", *SHORT, "trainer.resume_mode=auto", *overrides],
        cwd=ROOT,
        env=environment_of(output or Path(folder).parent.parent),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and f"training goes on from {folder}" in run.stdout, run.stdout + run.stderr
    return folder


@pytest.fixture
def start(tmp_path):
    """Start a run, and kill its remaining processes at the end."""
    started = []

    def start_one(*overrides, output=None, **options):
        name = f"run{len(started)}"
        console = tmp_path / f"{name}.console"
        started.append(Started(output or tmp_path / name, *SHORT, *overrides, console=console, **options))
        return started[-1]

    yield start_one
    for run in started:
        run.clean_up()


def in_generation(run):
    """Do nothing: after the line of the first step the run samples for the second."""


def in_an_update(run):
    """Wait until the third update of the second step."""
    run.wait_for(lambda: len(updates_of(run.output)) >= 8 + 2, "an update", interval=0.01)


def in_a_checkpoint(run):
    """Stop the worker while it writes a checkpoint."""
    saved = run.output / "checkpoints"
    pid = run.find("ray::WorkerDict")[0]
    for step in itertools.count(2):
        run.wait_for((saved / f"global_step_{step}" / "actor").exists, "a checkpoint", interval=0.001)
        os.kill(pid, signal.SIGSTOP)
        if saved_steps(saved) < step:
            return
        os.kill(pid, signal.SIGCONT)  # it was complete already


def saved_steps(folder):
    """Return the step of the last checkpoint that is complete."""
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def in_a_synchronisation(run):
    """Wait until the weights are being sent to vLLM."""
    sockets = "rl-colocate-zmq-01000000-*.sock"
    assert not list(Path("/tmp").glob(sockets)), "one is there between synchronisations"
    run.wait_for(lambda: list(Path("/tmp").glob(sockets)), "a synchronisation", interval=0.001)


@pytest.mark.parametrize(
    "victim, moment",
    [
        ("VLLM::EngineCore", in_generation),
        pytest.param("ray::WorkerDict", in_a_checkpoint, marks=pytest.mark.slow),
        pytest.param("ray::vLLMHttpServer", in_generation, marks=pytest.mark.slow),
        pytest.param("ray::WorkerDict", in_an_update, marks=pytest.mark.slow),
        pytest.param("ray::WorkerDict", in_a_synchronisation, marks=pytest.mark.slow),
        pytest.param("VLLM::EngineCore", in_a_synchronisation, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_run(start, victim, moment):
    run = start()
    run.wait_for_step(1)
    assert set(run.reachable().values()) <= {"ray::WorkerDict"}  # torch's rendezvous, see docs/reliability.md
    pid = run.find(victim)[0]
    if victim.startswith("VLLM::"):  # watchdog (on a cluster) and checks (of other runs) find vLLM by Ray's job id
        assert pid in vllm_processes("01000000")
    moment(run)
    os.kill(pid, signal.SIGKILL)
    last = ends_cleanly(run)
    assert victim.removeprefix("ray::") in last and "died" in last
    folder = can_go_on(last)
    if moment is in_a_checkpoint:  # the one after it is incomplete
        step = saved_steps(run.output / "checkpoints")
        assert folder.endswith(f"global_step_{step}") and Path(folder).with_name(f"global_step_{step + 1}").exists()


def test_a_ray_with_too_few_cpus_is_named(start):
    run = start("ray_kwargs.ray_init.num_cpus=4", "preflight=false")  # it refuses so few
    run.wait_for(lambda: "Warning: verl asks Ray for 5 CPUs (" in run.text(), "what Ray waits for")
    assert "3 for 1 GPU to train), and it has 4, so" in run.text()
    run.process.send_signal(signal.SIGINT)
    ends_cleanly(run, code=128 + signal.SIGINT)


@pytest.mark.slow
def test_weights_that_vllm_cannot_load_end_the_run(start, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_SYNCHRONISATION)
    extension = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=broken.BrokenExtension"
    run = start(f"++{extension}", "watchdog.max_sync_s=10", PYTHONPATH=str(tmp_path))
    run.wait_for_step(1)
    last = ends_cleanly(run)
    assert "the weights did not reach vLLM in " in last and "no room for these weights" in last
    can_go_on(last)


@pytest.mark.slow
def test_a_stopped_server_is_noticed_by_the_silence(start):
    run = start("watchdog.max_silence_s=240")
    run.wait_for_step(1)
    os.kill(run.find("VLLM::EngineCore")[0], signal.SIGSTOP)
    run.wait_for(lambda: (run.output / "stacks.txt").exists(), "stacks", timeout=300)
    last = ends_cleanly(run)
    assert "no step ended in" in last and "watchdog.max_silence_s=240" in last
    stacks = (run.output / "stacks.txt").read_text()
    assert "run_ppo" in stacks and "ray::WorkerDict" in stacks


@pytest.mark.slow
@pytest.mark.parametrize(
    "body, message",
    [
        ("raise KeyError('no such answer')", "no such answer"),
        ("return float('nan')", "in advantages. No optimizer step was made"),
        ("return 'good'", "can't assign a str"),
    ],
)
def test_a_bad_reward_function_is_named(start, tmp_path, body, message):
    (tmp_path / "reward.py").write_text(f"def compute_score(*args, **kwargs):\n    {body}\n")
    run = start(f"reward.custom_reward_function.path={tmp_path}/reward.py")
    run.wait_for(lambda: (run.output / "train.log").exists(), "a log")
    code, _ = run.end(timeout=400)
    assert code == 1 and message in "\n".join(run.text().splitlines()[-6:]), run.text()
    assert not run.left()


FAILS_FOR_SOME = """
import random

def compute_score(*args, **kwargs):
    if random.random() < {share}:
        raise ValueError("the judge did not answer")
    return random.random()
"""


@pytest.mark.parametrize(
    "mode, share, ends",
    [
        ("sync", 0.2, False),
        pytest.param("sync", 0.8, True, marks=pytest.mark.slow),
        pytest.param("colocate_async", 0.2, True, marks=pytest.mark.slow),  # one of 8 fails for most prompts
    ],
)
def test_responses_that_get_lost_are_counted_and_named(start, tmp_path, mode, share, ends):
    (tmp_path / "reward.py").write_text(FAILS_FOR_SOME.format(share=share))
    one_step = (f"trainer.v1.trainer_mode={mode}", "trainer.total_training_steps=1")
    run = start(f"reward.custom_reward_function.path={tmp_path}/reward.py", *one_step)
    code, _ = run.end(timeout=400)
    text = run.text()
    failed = "Warning: a response failed in its reward, tool or agent loop. The first error is ValueError: the judge"
    assert code == int(ends) and f"{failed} did not answer (AgentLoopWorkerTQ)" in text, text
    if ends:
        assert "responses arrived, fewer than watchdog.min_arrived=0.5" in text
    else:
        arrived = re.search(r"Warning: in step 1 ([\d.]+)% of the responses arrived", text)
        assert arrived and 50 <= float(arrived[1]) < 100, text
    assert not run.left()


@pytest.mark.parametrize("up, number", [("gcs_server", signal.SIGHUP), ("ray::RuntimeEnvAgent", signal.SIGINT)])
def test_an_interruption_during_the_start_is_clean(start, up, number):
    run = start()
    run.wait_for(lambda: "Starting Ray" in run.text(), "the start of Ray")
    run.wait_for(lambda: run.find(up), "Ray's processes")
    run.process.send_signal(number)
    last = ends_cleanly(run, code=128 + number)
    assert f"Error: interrupted by {number.name}. No checkpoint was saved." in last


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_keeps_the_one_before(start, small_disk):
    run = start(output=small_disk / "run")  # logs and metrics are there, too
    run.wait_for_step(1)
    with open(small_disk / "filler", "wb") as filler:
        filler.write(b"x" * (shutil.disk_usage(small_disk).free - (1 << 16)))
    last = ends_cleanly(run)
    assert f"no space left: {small_disk}/run has 0." in last
    (small_disk / "filler").unlink()
    can_go_on(last)


@pytest.mark.slow
def test_a_disk_that_turns_read_only_at_a_checkpoint_is_named(start, small_disk):
    run = start(f"trainer.default_local_dir={small_disk}")
    run.wait_for_step(1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    last = ends_cleanly(run)
    assert "Read-only file system" in last
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    can_go_on(last, f"trainer.default_local_dir={small_disk}", output=run.output)
