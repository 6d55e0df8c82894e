"""The watchdog's rules; that it ends a real run is in test_faults.py."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import shared_memory as python_shared_memory
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.bapo.checks import other_runs
from recipe.bapo.launch import processes, watchdog
from recipe.bapo.launch.watchdog import Watchdog


@contextmanager
def killed_at_the_end(command, **options):
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_step_that_ends_is_progress(tmp_path):
    dog = Watchdog(tmp_path, max_silence_s=100, max_sync_s=60, grace_s=0)
    assert dog.find_reason() is None  # it has only begun
    dog.began -= 101
    assert "no step ended in 101 s (watchdog.max_silence_s=100)" in dog.find_reason()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert dog.find_reason() is None
    os.utime(tmp_path / "metrics.jsonl", (0, time.time() - 150))
    assert "no step ended in 101 s" in dog.find_reason()
    dog.max_silence_s = None
    assert dog.find_reason() is None


def test_a_server_that_was_there_and_is_gone_is_named(tmp_path, monkeypatch):
    there = {7: "VLLM::EngineCore", 8: "ray::WorkerDict"}
    monkeypatch.setattr(watchdog, "processes", lambda: dict(there))
    dog = Watchdog(tmp_path, None, 60, 0)
    assert dog.dead_server() is None
    there[9] = "VLLM::Worker"
    assert dog.dead_server() is None
    del there[7], there[8]
    assert dog.dead_server() == "VLLM::EngineCore (process 7) of a vLLM server has died"


def test_weights_that_are_too_long_on_their_way_are_named(tmp_path, monkeypatch):
    socket = tmp_path / "socket"
    monkeypatch.setattr(watchdog, "weight_sockets", lambda: [socket])
    dog = Watchdog(tmp_path, None, 60, 0)
    assert dog.stuck_weights() is None  # none is open
    socket.touch()
    assert dog.stuck_weights() is None
    dog.began -= 100
    os.utime(socket, (0, time.time() - 61))
    assert dog.stuck_weights() == "the weights did not reach vLLM in 61 s (watchdog.max_sync_s=60)"
    os.utime(socket, (0, time.time() - 101))
    assert dog.stuck_weights() is None  # it was there before the run


def test_shared_memory_of_a_process_is_found_until_it_is_removed():
    block = python_shared_memory.SharedMemory(create=True, size=4096)
    path = Path("/dev/shm") / block.name
    assert path in processes.shared_memory([os.getpid()])
    assert path not in processes.shared_memory([1 << 30])
    block.close()
    block.unlink()
    assert path not in processes.shared_memory([os.getpid()])


def test_weights_that_nobody_holds_are_found(tmp_path):
    before, held, orphan = (Path(f"/dev/shm/verl_weights_{os.getpid()}_{i}") for i in range(3))
    socket = tmp_path / "socket"
    for path in (before, socket, held, orphan):
        path.write_bytes(b"x" * 4096)
        time.sleep(0.02)
    with open(held, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert processes.orphaned_weights([socket]) & {before, held, orphan} == {orphan}
        assert not processes.orphaned_weights([]) and not processes.orphaned_weights([tmp_path / "gone"])
    processes.remove([before, held, orphan])


def test_what_was_started_with_the_scratch_folder_is_killed():
    outside = subprocess.Popen(["sleep", "60"])
    scratch = processes.make_scratch()
    inside = subprocess.Popen(["sleep", "60"])
    try:
        processes.kill_children(scratch)
        assert inside.wait(10) == -signal.SIGKILL and outside.poll() is None
    finally:
        processes.remove_scratch(scratch, None)
        for child in (inside, outside):
            child.kill()
            child.wait()


def test_a_child_that_hides_its_environment_is_killed(tmp_path):
    known = subprocess.Popen(["env", "-i", "sleep", "60"])
    unknown = subprocess.Popen(["env", "-i", "sleep", "60"])
    try:
        children = [child for child in processes.descendants() if child.pid != unknown.pid]
        assert known.pid in {child.pid for child in children}
        processes.kill_children(tmp_path, children)
        assert known.wait(10) == -signal.SIGKILL and unknown.poll() is None
    finally:
        for child in (known, unknown):
            child.kill()
            child.wait()


def test_what_is_being_started_while_others_are_killed_is_killed_too(monkeypatch, tmp_path):
    late = subprocess.Popen(["sleep", "60"])
    looks = iter([{}, {}, {late.pid: "sleep 60"}])
    monkeypatch.setattr(processes, "_with_environment", lambda mark: next(looks, {}))
    try:
        processes.kill_children(tmp_path)
        assert late.wait(10) == -signal.SIGKILL
    finally:
        late.kill()
        late.wait()


def test_the_wait_for_what_was_killed_has_an_end(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_with_environment", lambda mark: {1 << 30: "never gone"})
    began = time.monotonic()
    processes.kill_children(tmp_path, patience=0.5)
    assert 0.5 <= time.monotonic() - began < 5


SLOW_TO_CLEAN_UP = """
import os, signal, sys, threading, time
from pathlib import Path
import ray
from omegaconf import OmegaConf
from recipe.bapo import main_bapo

def run(config, run_dir, out, watchdog, scratch):
    ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=f"{scratch}/ray")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ray.get(ray.remote(lambda: time.sleep(60)).remote())

main_bapo.run = run
main_bapo.processes.leftovers = lambda: time.sleep(4) or set()
config = OmegaConf.create({"watchdog": {"max_silence_s": None, "max_sync_s": 60, "grace_s": 0}})
config.trainer = {"default_local_dir": f"{sys.argv[1]}/none"}
print(main_bapo.run_and_clean_up(config, Path(sys.argv[1]), sys.stdout), flush=True)
os._exit(0)
"""


def test_a_terminated_run_has_time_to_clean_up(tmp_path):
    """Ray's handler of SIGTERM would abort it after three seconds."""
    run = subprocess.run(
        [sys.executable, "-c", SLOW_TO_CLEAN_UP, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "('interrupted by SIGTERM. No checkpoint was saved.', 143)" in run.stdout


@pytest.mark.parametrize("longer, there", [(0, True), (1, False)])
def test_rays_sockets_find_room_for_their_names(monkeypatch, longer, there):
    parent = tempfile.mkdtemp(prefix="x" * (processes.LONGEST + longer - len("/tmp/") - 8), dir="/tmp")
    assert len(parent) == processes.LONGEST + longer
    monkeypatch.setenv("TMPDIR", parent)
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch = processes.make_scratch()
    try:
        assert (scratch.parent == Path(parent)) == there
        in_it = "ray/session_2026-11-21_09-07-02_593636_4194304/sockets/plasma_store"
        assert len(f"{scratch}/{in_it}") <= 107  # Unix's limit
    finally:
        processes.remove_scratch(scratch, None)
        os.rmdir(parent)


def test_a_scratch_folder_is_removed_and_keeps_the_logs_of_a_failure(tmp_path):
    for kept in (None, tmp_path / "kept"):
        scratch = processes.make_scratch()
        logs = scratch / "ray" / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "gcs_server.out").write_text("a log")
        processes.remove_scratch(scratch, kept)
        assert not scratch.exists()
    assert (tmp_path / "kept" / "gcs_server.out").read_text() == "a log"


def test_stacks_are_written(tmp_path, monkeypatch):
    code = "import time; print(flush=True); time.sleep(60)"
    with killed_at_the_end([sys.executable, "-c", code], stdout=subprocess.PIPE) as sleeper:
        monkeypatch.setattr(watchdog, "processes", lambda: {sleeper.pid: "ray::Sleeper.sleep"})
        sleeper.stdout.readline()  # it is where it should be
        watchdog.write_stacks(tmp_path)
    text = (tmp_path / f"Sleeper_sleep-{sleeper.pid}.txt").read_text()
    if "Permission" in text:
        pytest.skip("tracing is refused here")
    assert "<module>" in text  # of a frame; the command line is there in any case


def test_the_servers_of_another_run_are_found(tmp_path, monkeypatch):
    from recipe.bapo.checks.other_runs import check_other_runs

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = OmegaConf.create({"trainer": {"nnodes": 1}})
    monkeypatch.setattr(other_runs, "FIRST_JOB", "a test's")  # whatever else runs here
    monkeypatch.setattr(other_runs, "SOCKETS", tmp_path)
    assert check_other_runs(config) == "none on this machine"
    environment = {**os.environ, "VERL_RAY_JOB_ID": "a test's"}
    command = ["bash", "-c", "exec -a VLLM::EngineCore sleep 60"]
    with killed_at_the_end(command, env=environment) as other:
        until = time.monotonic() + 30
        while not other_runs.servers_of_other_runs() and time.monotonic() < until:
            time.sleep(0.1)
        with pytest.raises(ValueError, match=f"another run is on this machine .process {other.pid}, VLLM::EngineCore"):
            check_other_runs(config)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert "a job of a Ray cluster" in check_other_runs(config)


def test_two_runs_that_start_at_once_do_not_both_get_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(other_runs, "SOCKETS", tmp_path)  # whatever else runs here
    claim = other_runs.claim_machine()
    assert claim is not None and other_runs.claim_machine() is None
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:  # it holds the machine no longer than the run
        os.close(claim)
        again = other_runs.claim_machine()
        child.kill()
    assert again is not None
    os.close(again)


def test_shared_memory_of_others_stays(tmp_path):
    """A data set in shared memory, mapped by a worker, is not the run's to remove."""
    for path in (Path("/dev/shm/bapo-test-data.arrow"), Path("/dev/shm/bapo-test/psm_data")):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 4096)
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            assert str(path) in Path("/proc/self/maps").read_text()
            assert not processes.shared_memory([os.getpid()]) & {path}
        path.unlink()
    path.parent.rmdir()


def test_stacks_that_cannot_be_written_do_not_keep_the_run(tmp_path, monkeypatch):
    signals = []
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    (tmp_path / "stacks").write_text("a file where the folder should be")
    dog = Watchdog(tmp_path, max_silence_s=0.05, max_sync_s=60, grace_s=0.01)
    dog.start()
    dog.join(30)
    assert signals == [(os.getpid(), signal.SIGTERM)] and "no step ended" in dog.reason


def test_a_last_look_finds_what_the_trainer_did_not_say(tmp_path, monkeypatch):
    dog = Watchdog(tmp_path, None, 60, 0)
    monkeypatch.setattr(dog, "find_reason", lambda: 1 / 0)
    assert dog.last_look() is None
    monkeypatch.setattr(dog, "find_reason", lambda: "the worker has died")
    assert dog.last_look() == "the worker has died"
    dog.reason = "no step ended"
    assert dog.last_look() == "no step ended"
