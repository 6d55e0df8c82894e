# SPDX-License-Identifier: Apache-2.0
"""The rules of watchdog and clean-up. tests/stack/test_faults.py tests that the watchdog ends a real run."""

import mmap
import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import shared_memory as python_shared_memory
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.commands import until

from recipe.bapo.run import cleanup, locks, watchdog
from recipe.bapo.run.preflight.machine import check_other_runs
from recipe.bapo.run.watchdog import Watchdog


def watch(folder, on_cluster=False, **limits):
    """Make a watchdog for a run in ``folder`` that checks whenever it is called."""
    defaults = {"max_silence_s": 1e9, "max_sync_s": 60, "max_exit_s": 60, "grace_s": 0}
    return Watchdog(folder, OmegaConf.create({**defaults, **limits}), on_cluster)


@contextmanager
def killed_at_the_end(command, **options):
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def block():
    """Make a file in shared memory as Python does, and map it into this process."""
    made = python_shared_memory.SharedMemory(create=True, size=4096)
    yield Path("/dev/shm", made.name)
    made.close()
    made.unlink()


def vllm_of(job):
    """Start a process with the title of a vLLM engine, in the environment of verl's server of a job."""
    command = ["bash", "-c", "exec -a VLLM::EngineCore sleep 60"]
    return killed_at_the_end(command, env={**os.environ, "VERL_RAY_JOB_ID": job}, start_new_session=True)


def test_a_step_that_ends_is_progress(tmp_path):
    dog = watch(tmp_path, max_silence_s=100)
    assert dog.silence() is None  # it has just started
    dog.began -= 101
    assert "no step ended in 101 s (watchdog.max_silence_s=100)" in dog.silence()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert dog.silence() is None
    os.utime(tmp_path / "metrics.jsonl", (0, time.time() - 150))
    assert "no step ended in 101 s" in dog.silence()


def test_a_server_that_was_there_and_is_gone_is_named_and_what_it_held_is_noted(tmp_path, monkeypatch, block):
    """When the server has died, no process maps its shared memory any more, so it cannot be found then."""
    there = {os.getpid(): "VLLM::EngineCore", 8: "ray::WorkerDict"}
    dog = watch(tmp_path)
    monkeypatch.setattr(dog, "processes", lambda: dict(there))
    assert dog.dead_server() is None and block in dog.shared_memory
    there[9] = "VLLM::Worker"
    assert dog.dead_server() is None
    del there[os.getpid()], there[8], there[9]
    assert dog.dead_server() == f"VLLM::EngineCore (process {os.getpid()}) of a vLLM server has died"


def test_a_process_that_was_seen_once_is_no_server(tmp_path, monkeypatch):
    """Between vfork and exec a child of an engine shows the engine's title, for some microseconds."""
    there = {8: "VLLM::EngineCore"}
    dog = watch(tmp_path)
    monkeypatch.setattr(dog, "processes", lambda: dict(there))
    for child in (20, 21, 20):
        there[child] = "VLLM::EngineCore"
        assert dog.dead_server() is None
        del there[child]
        assert dog.dead_server() is None
    there.clear()
    assert dog.dead_server() == "VLLM::EngineCore (process 8) of a vLLM server has died"


def test_weights_that_are_too_long_on_their_way_are_named(tmp_path, monkeypatch):
    socket = tmp_path / "socket"
    monkeypatch.setattr(cleanup, "weight_sockets", lambda job: [socket])
    dog = watch(tmp_path)
    dog.job = "01000000"
    assert dog.stuck_weights() is None  # no socket is open
    socket.touch()
    assert dog.stuck_weights() is None
    dog.began -= 100
    os.utime(socket, (0, time.time() - 61))
    assert dog.stuck_weights() == "the weights did not reach vLLM in 61 s (watchdog.max_sync_s=60)"
    os.utime(socket, (0, time.time() - 101))
    assert dog.stuck_weights() is None  # the socket is older than the run


def test_the_trainer_has_time_to_report_what_was_found(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "INTERVAL", 0)
    dog = watch(tmp_path, grace_s=0.3)
    assert not dog.should_end()
    monkeypatch.setattr(dog, "dead_server", lambda: "the worker has died")
    assert not dog.should_end() and dog.reason == "the worker has died"
    monkeypatch.setattr(dog, "silence", lambda: "another one too")
    time.sleep(0.4)
    assert dog.should_end() and dog.reason == "the worker has died"


def test_the_jobs_servers_on_a_cluster_are_found(tmp_path):
    """On a cluster they are descendants of Ray's processes, not of the launcher."""
    dog = watch(tmp_path, on_cluster=True)
    assert dog.processes() == {}  # before Ray is up
    dog.job = "a test's"
    with vllm_of("a test's") as ours, vllm_of("another's"):
        until(dog.processes, 30, "a process of vLLM's")
        assert dog.processes() == {ours.pid: "VLLM::EngineCore 60"}


def test_shared_memory_of_a_run_is_found_until_it_is_removed_and_that_of_others_stays(block):
    """A data set in shared memory that a worker maps does not belong to the run, so it must stay."""
    assert block in cleanup.shared_memory([os.getpid()])
    assert block not in cleanup.shared_memory([1 << 30])
    content = block.read_bytes()
    block.unlink()
    assert block not in cleanup.shared_memory([os.getpid()])  # still mapped
    block.write_bytes(content)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for path in (Path(folder) / "psm_data", Path(folder).with_suffix(".arrow")):
            path.write_bytes(b"x" * 4096)
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
                assert str(path) in Path("/proc/self/maps").read_text()
                assert not cleanup.shared_memory([os.getpid()]) & {path}
            path.unlink()


def test_weights_that_nobody_has_mapped_are_found_if_the_run_is_older():
    began = time.time() - 1
    weights = python_shared_memory.SharedMemory(f"verl_weights_test_{os.getpid()}", create=True, size=4096)
    path = Path("/dev/shm", weights.name)
    try:
        assert path not in cleanup.unmapped_weights(began)  # another process may be sending them
        weights.close()
        assert path in cleanup.unmapped_weights(began)
        assert path not in cleanup.unmapped_weights(time.time() + 60)
    finally:
        weights.unlink()
    assert path not in cleanup.unmapped_weights(began)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Isolate the rules for two runs from other runs here; the value is the config of a run that starts its own Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)
    return OmegaConf.create({"trainer": {"nnodes": 1}})


def test_the_servers_of_another_run_are_found(alone, monkeypatch):
    assert check_other_runs(alone) == "none on this machine"
    with vllm_of("a test's") as other:
        until(lambda: cleanup.vllm_processes(locks.FIRST_JOB), 30, "a process of vLLM's")
        with pytest.raises(
            ValueError, match=f"another run is on this machine .process {other.pid}, VLLM::EngineCore"
        ) as e:
            check_other_runs(alone)
        assert all(way in str(e.value) for way in ("wait until it has ended", "scripts/apart.sh", "container"))
        with socket.create_server(("127.0.0.1", 0)) as head:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
            assert "a job of a Ray cluster" in check_other_runs(alone)
    monkeypatch.delenv("RAY_ADDRESS")
    assert check_other_runs(alone) == "none on this machine"


def test_two_runs_that_start_at_once_do_not_both_get_the_machine(alone):
    claim = locks.claim_machine()
    with pytest.raises(ValueError, match="another run is on this machine, and"):  # the other run has no server yet
        check_other_runs(alone)
    with subprocess.Popen(
        ["sleep", "60"], close_fds=False
    ) as child:  # a child must not hold the claim longer than the run
        os.close(claim)
        assert check_other_runs(alone) == "none on this machine"
        child.kill()


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_ray_address_at_which_nothing_listens_is_named_at_once(scheme):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"{scheme}127.0.0.1:{head.getsockname()[1]}"
        locks.check_ray_address(address)
    with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} does not answer .*refused.*: start Ray there .*unset"):
        locks.check_ray_address(address)


def test_a_ray_address_without_host_or_port_is_named():
    locks.check_ray_address("auto")  # not checked
    for address in ("10.0.0.1", "head:port", "http://head", "..:80"):
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} does not answer .*give the HOST:PORT"):
            locks.check_ray_address(address)
