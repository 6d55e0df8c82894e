"""Faults injected into the real stack: the run ends soon, names the cause, leaves nothing behind and can be resumed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from stack_runs import Started

pytestmark = pytest.mark.stack
WITHIN = 75  # seconds from the fault to the end of the run
SHORT = (
    "trainer.total_training_steps=60",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "watchdog.grace_s=10",
)


def ends_cleanly(run, *messages, code=1):
    """The run's end after a fault."""
    found, took = run.end(timeout=WITHIN)
    text = run.text()
    print(f"ended after {took:.0f} s")
    assert found == code, text
    last = "\n".join(text.splitlines()[-6:])
    for message in messages:
        assert message in last, text
    assert not run.processes() and not run.left_behind()
    return last


@pytest.fixture
def start(tmp_path):
    """Starts a run; what is left of it is killed at the end."""
    started = []

    def start_one(*overrides, **options):
        started.append(Started(tmp_path / f"run{len(started)}", *SHORT, *overrides, **options))
        return started[-1]

    yield start_one
    for run in started:
        run.clean_up()


@pytest.mark.parametrize(
    "victim, message",
    [
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("ray::WorkerDict", "WorkerDict"),
        pytest.param("ray::vLLMHttpServer", "vLLM", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_run(start, victim, message):
    run = start()
    run.wait_for_step(1)
    os.kill(run.find(victim)[0], signal.SIGKILL)
    last = ends_cleanly(run, message, "died")
    assert "The last checkpoint is" in last and "global_step_" in last


@pytest.mark.slow
def test_a_stopped_server_is_noticed_by_the_silence(start):
    run = start("watchdog.max_silence_s=150")
    run.wait_for_step(1)
    os.kill(run.find("VLLM::EngineCore")[0], signal.SIGSTOP)
    run.wait_for(lambda: (run.output / "stacks").exists(), "stacks", timeout=200)
    ends_cleanly(run, "no step ended in", "watchdog.max_silence_s=150")
    stacks = {path.name.split("-")[0]: path.read_text() for path in (run.output / "stacks").iterdir()}
    assert "ray.get" in stacks["driver"] or "get" in stacks["driver"]
    assert any(name.startswith("WorkerDict") for name in stacks), sorted(stacks)


@pytest.mark.parametrize(
    "body, message",
    [
        ("raise KeyError('no such answer')", "no such answer"),
        pytest.param("return float('nan')", "in advantages. No clip bounds were found", marks=pytest.mark.slow),
        pytest.param("return 'good'", "can't assign a str", marks=pytest.mark.slow),
    ],
)
def test_a_bad_reward_function_is_named(start, tmp_path, body, message):
    (tmp_path / "reward.py").write_text(f"def compute_score(*args, **kwargs):\n    {body}\n")
    run = start(f"reward.custom_reward_function.path={tmp_path}/reward.py")
    run.wait_for(lambda: (run.output / "train.log").exists(), "a log")
    code, took = run.end(timeout=240)
    assert code == 1 and message in "\n".join(run.text().splitlines()[-6:]), run.text()
    assert not run.processes() and not run.left_behind()


@pytest.mark.parametrize("up", ["gcs_server", "ray::"])
def test_an_interruption_during_the_start_is_clean(start, up):
    run = start()
    run.wait_for(lambda: "Starting Ray" in run.text(), "the start of Ray")
    run.wait_for(lambda: run.find(up), "Ray's processes")
    run.process.send_signal(signal.SIGINT)
    last = ends_cleanly(run, code=128 + signal.SIGINT)
    assert "Error: interrupted by SIGINT. No checkpoint was saved." in last


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_at_a_checkpoint_keeps_the_one_before(start, small_disk):
    run = start(f"trainer.default_local_dir={small_disk}")
    run.wait_for_step(1)
    with open(small_disk / "filler", "wb") as filler:
        filler.write(b"x" * (shutil.disk_usage(small_disk).free - (1 << 16)))
    last = ends_cleanly(run, f"no space left: {small_disk} has 0.")
    # What it names is complete: preflight takes it.
    folder = Path(last.split("The last checkpoint is ")[1].split(": the same")[0])
    (small_disk / "filler").unlink()
    check = subprocess.run(
        ["bash", "recipe/bapo/run_bapo_example.sh", "--preflight", *SHORT, "trainer.resume_mode=auto"]
        + [f"trainer.default_local_dir={small_disk}"],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0 and f"training goes on from {folder}" in check.stdout, check.stdout + check.stderr


def test_no_network_is_needed(start):
    up = "import fcntl, socket, struct; s = socket.socket(); fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x49))"
    inside = ["unshare", "--net", "bash", "-c", f'python3 -c "{up}" && exec "$@"', "bash"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are refused here")
    run = start("trainer.total_training_steps=1", "trainer.save_freq=-1", inside=inside)
    code, _ = run.end(timeout=300)
    assert code == 0, run.text()
    assert not run.processes() and not run.left_behind()
