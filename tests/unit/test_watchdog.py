# SPDX-License-Identifier: Apache-2.0
"""The watchdog's rules, and those for what a run leaves; that it ends a real run is in tests/stack/test_faults.py."""

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import shared_memory as python_shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.util.state
from omegaconf import OmegaConf

from recipe.bapo.checks.machine import check_other_runs
from recipe.bapo.launch import cleanup, locks, process_tree, watchdog
from recipe.bapo.launch.watchdog import Watchdog


@contextmanager
def killed_at_the_end(command, **options):
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_step_that_ends_is_progress(tmp_path):
    dog = Watchdog(tmp_path, max_silence_s=100, max_sync_s=60, max_exit_s=60, grace_s=0)
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
    dog = Watchdog(tmp_path, None, 60, 60, 0)
    monkeypatch.setattr(dog, "processes", lambda: dict(there))
    assert dog.dead_server() is None
    there[9] = "VLLM::Worker"
    assert dog.dead_server() is None
    del there[7], there[8]
    assert dog.dead_server() == "VLLM::EngineCore (process 7) of a vLLM server has died"


def test_what_a_server_holds_is_noted(tmp_path, monkeypatch):
    """If the server is killed, nobody's maps name it any more."""
    block = python_shared_memory.SharedMemory(create=True, size=4096)
    try:
        dog = Watchdog(tmp_path, None, 60, 60, 0)
        monkeypatch.setattr(dog, "processes", lambda: {os.getpid(): "VLLM::Worker"})
        dog.dead_server()
        assert Path("/dev/shm", block.name) in dog.shared_memory
    finally:
        block.close()
        block.unlink()


def test_weights_that_are_too_long_on_their_way_are_named(tmp_path, monkeypatch):
    socket = tmp_path / "socket"
    monkeypatch.setattr(watchdog, "weight_sockets", lambda job: [socket])
    dog = Watchdog(tmp_path, None, 60, 60, 0)
    dog.job = "01000000"
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
    try:
        assert path in cleanup.shared_memory([os.getpid()])
        assert path not in cleanup.shared_memory([1 << 30])
    finally:
        block.close()
        block.unlink()
    assert path not in cleanup.shared_memory([os.getpid()])


DIED = {"reason": "WORKER_DIED", "pid": 7, "node_ip_address": "10.0.0.2", "class_name": "WorkerDict"}


@pytest.mark.parametrize(
    "death, found",
    [
        (None, None),  # it lives
        ({}, None),
        ({"actor_died_error_context": {**DIED, "reason": "OUT_OF_SCOPE"}}, None),
        ({"actor_died_error_context": {**DIED, "reason": "RAY_KILL"}}, None),
        ({"actor_died_error_context": DIED}, "the worker WorkerDict (process 7 on 10.0.0.2) has died"),
        ({"actor_died_error_context": {**DIED, "class_name": ""}}, "the worker A (process 7 on 10.0.0.2) has died"),
    ],
)
def test_an_actor_that_was_not_ended_on_purpose_is_named(tmp_path, monkeypatch, death, found):
    actors = [SimpleNamespace(death_cause=death, class_name="A", state="DEAD")]
    monkeypatch.setattr(ray.util.state, "list_actors", lambda **query: actors)
    dog = Watchdog(tmp_path, None, 60, 60, 0)
    dog.job = "01000000"
    assert dog.dead_actor() == found


def test_a_ray_that_does_not_answer_is_in_the_log_and_no_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.util.state, "list_actors", lambda **query: 1 / 0)
    dog = Watchdog(tmp_path, None, 60, 60, 0)
    dog.job = "01000000"
    assert dog.find_reason() is None
    dog.max_silence_s = -1
    assert "no step ended" in dog.find_reason()  # the other looks go on
    assert (tmp_path / "train.log").read_text() == "watchdog: ZeroDivisionError: division by zero\n"


def test_the_trainer_has_time_to_report_what_was_found(tmp_path, monkeypatch):
    dog = Watchdog(tmp_path, None, 60, 60, grace_s=0.3)
    monkeypatch.setattr(watchdog, "INTERVAL", 0)
    assert not dog.should_end()
    monkeypatch.setattr(dog, "find_reason", lambda: "the worker has died")
    assert not dog.should_end() and dog.reason == "the worker has died"
    monkeypatch.setattr(dog, "find_reason", lambda: "another one too")
    time.sleep(0.4)
    assert dog.should_end() and dog.reason == "the worker has died"


def test_processes_of_a_cluster_are_found_by_their_actors(tmp_path, monkeypatch):
    """They are below Ray's processes there, not below the launcher."""
    monkeypatch.setattr(process_tree, "below", list)
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    with killed_at_the_end([sys.executable, "-c", code], start_new_session=True) as actor:
        dog = Watchdog(tmp_path, None, 60, 60, 0)
        dog.node = "here"
        dog.actors = [
            SimpleNamespace(state="ALIVE", node_id="here", pid=actor.pid),
            SimpleNamespace(state="ALIVE", node_id="elsewhere", pid=os.getpid()),
            SimpleNamespace(state="DEAD", node_id="here", pid=1),
        ]
        until = time.monotonic() + 30
        while "sleep 60" not in dog.processes().values() and time.monotonic() < until:
            time.sleep(0.1)
        found = dog.processes()
        os.killpg(actor.pid, 9)
    assert len(found) == 2 and actor.pid in found and "sleep 60" in found.values()


def test_stacks_are_written(tmp_path, monkeypatch):
    code = "import time; print(flush=True); time.sleep(60)"
    with killed_at_the_end([sys.executable, "-c", code], stdout=subprocess.PIPE) as sleeper:
        dog = Watchdog(tmp_path, None, 60, 60, 0)
        monkeypatch.setattr(dog, "processes", lambda: {sleeper.pid: "ray::Sleeper.sleep", 1: "raylet"})
        sleeper.stdout.readline()  # it is where it should be
        dog.write_stacks(os.getpid())
    written = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert set(written) == {f"Sleeper_sleep-{sleeper.pid}.txt", f"driver-{os.getpid()}.txt"}
    text = written[f"Sleeper_sleep-{sleeper.pid}.txt"]
    if "Permission" in text:
        pytest.skip("tracing is refused here")
    assert "<module>" in text  # of a frame; the command line is there in any case


def test_the_servers_of_another_run_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = OmegaConf.create({"trainer": {"nnodes": 1}})
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")  # whatever else runs here
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)
    assert check_other_runs(config) == "none on this machine"
    environment = {**os.environ, "VERL_RAY_JOB_ID": "a test's"}
    command = ["bash", "-c", "exec -a VLLM::EngineCore sleep 60"]
    with killed_at_the_end(command, env=environment) as other:
        until = time.monotonic() + 30
        while not locks.servers_of_other_runs() and time.monotonic() < until:
            time.sleep(0.1)
        with pytest.raises(
            ValueError, match=f"another run is on this machine .process {other.pid}, VLLM::EngineCore"
        ) as e:
            check_other_runs(config)
        assert all(way in str(e.value) for way in ("wait for its end", "scripts/apart.sh", "container"))
        with socket.create_server(("127.0.0.1", 0)) as head:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
            assert "a job of a Ray cluster" in check_other_runs(config)
        with pytest.raises(ValueError, match="RAY_ADDRESS=127.0.0.1:.* does not answer"):
            check_other_runs(config)


@pytest.mark.parametrize("scheme", ["", "http://", "ray://"])
def test_a_ray_address_at_which_nothing_listens_is_named_at_once(scheme):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"{scheme}127.0.0.1:{head.getsockname()[1]}"
        locks.check_ray_address(address)
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} does not answer .*refused.*: start Ray there .*unset"):
        locks.check_ray_address(address)
    assert time.monotonic() - began < 4
    with pytest.raises(ValueError, match="RAY_ADDRESS=no-such-host.invalid:6379 does not answer"):
        locks.check_ray_address("no-such-host.invalid:6379")


@pytest.mark.parametrize("address", ["10.0.0.1", "head:port", ":6379", "http://head"])
def test_a_ray_address_without_host_or_port_is_named(address):
    with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} is not usable: give HOST:PORT"):
        locks.check_ray_address(address)


def test_what_names_no_host_is_left_to_ray():
    for address in ("", "local", "auto"):
        locks.check_ray_address(address)


def test_two_runs_that_start_at_once_do_not_both_get_the_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")  # whatever else runs here
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)
    claim = locks.claim_machine()
    assert claim is not None and locks.claim_machine() is None
    with pytest.raises(ValueError, match="another run is on this machine"):  # it has no server yet
        check_other_runs(OmegaConf.create({"trainer": {"nnodes": 1}}))
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:  # it holds the machine no longer than the run
        os.close(claim)
        again = locks.claim_machine()
        child.kill()
    assert again is not None
    os.close(again)


def test_shared_memory_of_others_stays(tmp_path):
    """A data set in shared memory, mapped by a worker, is not the run's to remove."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        inside = Path(folder) / "psm_data"
        with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".arrow") as data:
            for path in (Path(data.name), inside):
                path.write_bytes(b"x" * 4096)
                with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
                    assert str(path) in Path("/proc/self/maps").read_text()
                    assert not cleanup.shared_memory([os.getpid()]) & {path}


def test_stacks_that_cannot_be_written_do_not_keep_the_run(tmp_path):
    stacks = tmp_path / "stacks"
    stacks.write_text("a file where the folder should be")
    Watchdog(tmp_path, None, 60, 60, 0).write_stacks(os.getpid())  # does not raise
    assert stacks.read_text() == "a file where the folder should be"


def test_the_final_check_finds_what_the_trainer_did_not_say(tmp_path, monkeypatch):
    dog = Watchdog(tmp_path, None, 60, 60, 0)
    monkeypatch.setattr(dog, "find_reason", lambda: "the worker has died")
    dog.final_check()
    assert dog.reason == "the worker has died"
    monkeypatch.setattr(dog, "find_reason", lambda: "no step ended")
    dog.final_check()
    assert dog.reason == "the worker has died"
