# SPDX-License-Identifier: Apache-2.0
"""The rules of watchdog and clean-up. tests/stack/test_faults.py tests that the watchdog ends a real run."""

import errno
import mmap
import os
import socket
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.commands import LIMIT, until

from recipe.bapo.host import cleanup, locks
from recipe.bapo.preflight.machine import check_other_runs
from recipe.bapo.run import watchdog
from recipe.bapo.run.watchdog import Watchdog


class Clock:
    """A clock that a test sets, in place of the machine's."""

    now = 1e9

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


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


@contextmanager
def mapped(path):
    """Write a file of a page and map it into this process."""
    path.write_bytes(b"x" * 4096)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert f"{path}\n" in Path("/proc/self/maps").read_text()
        yield path


@pytest.fixture
def block():
    """Make a file in shared memory as Python does, and map it into this process."""
    with mapped(cleanup.SHARED_MEMORY / "psm_1234abcd") as path:
        yield path
    path.unlink(missing_ok=True)


def vllm_of(job):
    """Start a process with the title of a vLLM engine, in the environment of verl's server of a job."""
    command = ["bash", "-c", "exec -a VLLM::EngineCore sleep 3600"]
    return killed_at_the_end(command, env={**os.environ, "VERL_RAY_JOB_ID": job}, start_new_session=True)


def test_a_step_that_ends_is_progress(tmp_path, clock):
    dog = watch(tmp_path, max_silence_s=100)
    metrics = tmp_path / "metrics.jsonl"
    assert dog.silence() is None  # it has just started
    clock.now += 101
    assert "no step ended in 101 s (watchdog.max_silence_s=100)" in dog.silence()
    metrics.write_text("{}\n")
    os.utime(metrics, (0, clock.now - 1))
    assert dog.silence() is None
    os.utime(metrics, (0, clock.now - 150))
    assert "no step ended in 101 s" in dog.silence()


def test_a_server_that_was_there_and_is_gone_is_named_and_what_it_held_is_noted(tmp_path, monkeypatch, block):
    """When the server has died, no process maps its shared memory any more, so it cannot be found then."""
    there = {os.getpid(): "VLLM::EngineCore", 8: "ray::WorkerDict"}
    dog = watch(tmp_path)
    monkeypatch.setattr(dog, "processes", lambda: dict(there))
    assert dog.dead_server() is None and block in dog.shared_memory
    for child in (20, 21, 20):  # between vfork and exec a child of an engine shows its title, for some microseconds
        there[child] = "VLLM::EngineCore"
        assert dog.dead_server() is None
        del there[child]
        assert dog.dead_server() is None
    del there[os.getpid()], there[8]
    assert dog.dead_server() == f"VLLM::EngineCore (process {os.getpid()}) of a vLLM server has died"


def test_weights_that_are_too_long_on_their_way_are_named(tmp_path, monkeypatch, clock):
    socket = tmp_path / "socket"
    monkeypatch.setattr(cleanup, "weight_sockets", lambda job: [socket])
    dog = watch(tmp_path)
    dog.job = "01000000"
    assert dog.stuck_weights() is None  # no socket is open
    clock.now += 100
    socket.touch()
    for age, said in (
        (60, None),
        (61, "the weights did not reach vLLM in 61 s (watchdog.max_sync_s=60)"),
        (100, None),  # the socket is older than the run
    ):
        os.utime(socket, (0, clock.now - age))
        assert dog.stuck_weights() == said


def test_the_trainer_has_time_to_report_what_was_found(tmp_path, monkeypatch, clock):
    dog = watch(tmp_path, grace_s=10)
    monkeypatch.setattr(dog, "dead_server", lambda: "the worker has died")
    assert not dog.should_end() and dog.reason is None  # it has looked just before
    clock.now += watchdog.INTERVAL
    assert not dog.should_end() and dog.reason == "the worker has died"
    monkeypatch.setattr(dog, "silence", lambda: "another one too")
    clock.now += 9
    assert not dog.should_end()
    clock.now += 1
    assert dog.should_end() and dog.reason == "the worker has died"


def test_the_jobs_servers_on_a_cluster_are_found(tmp_path):
    """On a cluster they are descendants of Ray's processes, not of the launcher."""
    dog, job, other_job = watch(tmp_path, on_cluster=True), uuid.uuid4().hex, uuid.uuid4().hex
    assert dog.processes() == {}  # before Ray is up
    dog.job = job
    with vllm_of(job) as ours, vllm_of(other_job) as other:
        for one in (job, other_job):
            until(lambda of=one: cleanup.vllm_processes(of), LIMIT, "a process of vLLM's")
        assert dog.processes() == {ours.pid: "VLLM::EngineCore 3600"} and ours.pid != other.pid


def test_shared_memory_of_a_run_is_found_until_it_is_removed_and_that_of_others_stays(block):
    """A data set in shared memory that a worker maps does not belong to the run, so it must stay."""
    assert cleanup.shared_memory([os.getpid()]) == {block}
    assert not cleanup.shared_memory([1 << 30])
    block.unlink()
    assert not cleanup.shared_memory([os.getpid()])  # still mapped
    folder = block.with_name("folder")
    folder.mkdir()
    with mapped(folder / "psm_data") as one, mapped(block.with_name("data.arrow")) as other:
        assert not cleanup.shared_memory([os.getpid()])
    one.unlink(), other.unlink(), folder.rmdir()


def test_weights_that_nobody_has_mapped_are_found_if_the_run_is_older():
    path = cleanup.SHARED_MEMORY / "verl_weights_1234abcd"
    with mapped(path):
        assert not cleanup.unmapped_weights(earlier=set())  # another process may be sending them
    assert cleanup.unmapped_weights(earlier=set()) == {path} == cleanup.weights()
    assert not cleanup.unmapped_weights(earlier={path})
    path.unlink()
    assert not cleanup.unmapped_weights(earlier=set())


@pytest.fixture
def run():
    """Return the config of a run that starts its own Ray."""
    return OmegaConf.create({"trainer": {"nnodes": 1}})


def test_the_servers_of_another_run_are_found(run, monkeypatch):
    assert check_other_runs(run) == "none on this machine"
    with vllm_of(locks.FIRST_JOB) as other:
        until(lambda: cleanup.vllm_processes(locks.FIRST_JOB), LIMIT, "a process of vLLM's")
        with pytest.raises(ValueError, match=f"another run is on this machine .process {other.pid}, VLLM::EngineCore"):
            check_other_runs(run)
        with socket.create_server(("127.0.0.1", 0)) as head:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
            assert "a job of a Ray cluster" in check_other_runs(run)
    monkeypatch.delenv("RAY_ADDRESS")
    assert check_other_runs(run) == "none on this machine"


def test_two_runs_that_start_at_once_do_not_both_get_the_machine(run):
    claim = locks.claim_machine()
    with pytest.raises(ValueError, match="another run is on this machine, and"):  # the other run has no server yet
        check_other_runs(run)
    with killed_at_the_end(["sleep", "3600"], close_fds=False):
        os.close(claim)  # a child must not hold the claim longer than the run
        assert check_other_runs(run) == "none on this machine"


def test_where_files_cannot_be_locked_there_is_no_claim(run, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert check_other_runs(run) == "none on this machine"


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_ray_address_at_which_nothing_listens_is_named_at_once(scheme):
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))  # as long as it does not listen, the port refuses, and nobody else can take it
        address = f"{scheme}127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} does not answer"):
            locks.check_ray_address(address)
        head.listen()
        locks.check_ray_address(address)


def test_a_ray_address_without_host_or_port_is_named():
    locks.check_ray_address("auto")  # not checked
    for address in ("10.0.0.1", "head:port", "http://head", "..:80"):
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} does not answer .*give the HOST:PORT"):
            locks.check_ray_address(address)
