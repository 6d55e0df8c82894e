# SPDX-License-Identifier: Apache-2.0
"""Jobs of the real stack, submitted to two Ray nodes on this machine."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.commands import until
from support.stack_runs import (
    ROOT,
    SHORT_STEPS,
    free_ports,
    left_since,
    removing_what_others_leave,
    temporary_files,
    updates_of,
)

from recipe.bapo.host.metrics import read_metrics

NODES = ("127.0.0.1", "127.0.0.2")
RAY = (sys.executable, "-m", "ray.scripts.scripts")


def call(*command, timeout, **environment):
    """Run a command in the repository's root. Its stdout holds stderr, too."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "VERL_PLATFORM": "cpu", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def cluster():
    """Start a cluster of two nodes with a logical GPU each. Yields the environment for jobs, and the nodes' folder."""
    with removing_what_others_leave():  # vLLM leaves empty sockets
        yield from two_nodes()


def two_nodes():
    folder = Path(tempfile.mkdtemp(prefix="bapo", dir="/tmp"))  # a short path: Ray's sockets lie in it
    port, dashboard = free_ports(2)
    (folder / "token").write_text(secrets.token_hex(32))
    of_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = of_token | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}/ray"]
    join = [f"--address={NODES[0]}:{port}"]
    nodes = []

    def have_joined():
        alive = call(*RAY, "list", "nodes", "--filter", "state=ALIVE", "--format=json", timeout=100, **environment)
        return alive.stdout.count('"node_id"') == len(nodes)

    def accepts_jobs():
        return call(*RAY, "job", "submit", "--", "true", timeout=100, **environment).returncode == 0

    try:
        for options, address in zip((head, join), NODES, strict=True):
            log = open(folder / f"{address}.log", "w")
            start = [*RAY, "start", "--block", "--disable-usage-stats", "--num-cpus=16", "--num-gpus=1", *options]
            nodes.append(
                subprocess.Popen(
                    [*start, f"--node-ip-address={address}"],
                    cwd=ROOT,
                    env={**os.environ, "VERL_PLATFORM": "cpu", **of_token},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            until(have_joined, 200, f"node {address}")
        until(accepts_jobs, 200, "the job agent")
        yield environment, folder
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            node.wait(timeout=60)
        left = subprocess.run(["pgrep", "-fa", str(folder)], capture_output=True, text=True).stdout
        shutil.rmtree(folder)
        assert not left, left


def test_a_job_on_two_nodes(cluster, tmp_path):
    environment, folder = cluster
    before = temporary_files()
    length = ("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1")
    run = call(
        *("bash", "recipe/bapo/run_bapo_example.sh", SHORT_STEPS, *length),
        timeout=600,
        **environment,
        NNODES="2",
        OUTPUT_DIR=str(tmp_path / "run"),
        WANDB_API_KEY="planted-secret",
    )
    log = tmp_path / "run" / "train.log"
    assert run.returncode == 0, run.stdout + (log.read_text()[-4000:] if log.exists() else "")
    # The job's output has the lines of a local run.
    assert re.findall(r"^step +(\d+)/2 ", run.stdout, re.M) == ["1", "2"] and "2 steps, mean of" in run.stdout
    assert not [
        path for path in left_since(before) if path.name.startswith("psm_")
    ]  # shared memory of vLLM on either node
    # One of the two ranks is on the second node.
    text = log.read_text()
    for node in NODES[1:]:
        assert re.search(rf"\(\w*WorkerDict pid=\d+, ip={node}\)", text)
    rho = [update.values["positive_contribution"] for update in updates_of(tmp_path / "run")]
    # Each update has its own data, so rho differs. (The bounds need not differ, because all may be the last pair.)
    assert len(rho) == 2 * 8 and len(set(rho)) > 8
    # The submitter's secrets are not forwarded.
    written = [path for path in (*(tmp_path / "run").rglob("*"), *(folder / "ray").rglob("*.log")) if path.is_file()]
    assert not [path for path in written if b"planted-secret" in path.read_bytes()]


def test_a_jobs_failure_is_the_commands(cluster, tmp_path):
    environment, _ = cluster
    run = call(
        *("bash", "recipe/bapo/run_bapo_example.sh", SHORT_STEPS, "actor_rollout_ref.actor.clip_ratio_c=1.0"),
        timeout=200,
        **environment,
        NNODES="2",
        OUTPUT_DIR=str(tmp_path / "run"),
    )
    assert run.returncode == 1
    assert "Error: invalid actor_rollout_ref.actor.clip_ratio_c=1.0" in run.stdout


CLEANING = """
trap 'sleep 6; touch "$1"; exit' TERM
echo begun
while :; do sleep 1; done
"""


def test_a_stopped_job_has_the_time_to_clean_up(cluster, tmp_path):
    """A run ends its vLLM servers then. Ray alone kills a job after three seconds."""
    environment, _ = cluster
    cleaned, log = tmp_path / "cleaned", tmp_path / "log"
    job = ("scripts/cluster/job.py", "submit", tmp_path.name, "bash", "-c", CLEANING, "-", str(cleaned))
    with open(log, "w") as output:
        submitted = subprocess.Popen(
            [sys.executable, *job], cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=output
        )
    until(lambda: "\nbegun\n" in log.read_text(), 200, "the job")
    call(*RAY, "job", "stop", tmp_path.name, timeout=200, **environment)
    submitted.wait(200)
    assert cleaned.exists(), log.read_text()


CLAIMING = """
import os, subprocess, time
import ray
from recipe.bapo.host.cleanup import vllm_processes
from recipe.bapo.host.locks import claim_cluster

ray.init()
job = ray.get_runtime_context().get_job_id()
server = ["bash", "-c", "exec -a VLLM::EngineCore sleep 3600"]
other = subprocess.Popen(server, env={**os.environ, "VERL_RAY_JOB_ID": job})
try:
    while not vllm_processes(job):
        time.sleep(0.1)
    claim_cluster()
except ValueError as error:
    print("refused:", error)
finally:
    other.kill()
    other.wait()
claim = claim_cluster()
print("claimed")
"""


def test_a_run_of_another_ray_on_a_node_is_found_if_it_has_this_jobs_number(cluster, tmp_path):
    """Its vLLM servers could get this job's weights."""
    environment, _ = cluster
    job = ("scripts/cluster/job.py", "submit", tmp_path.name, sys.executable, "-c", CLAIMING)
    run = call(sys.executable, *job, timeout=200, **environment)
    assert run.returncode == 0, run.stdout
    assert re.search(r"^refused: another run is on a node of this Ray cluster .process \d+, VLLM::", run.stdout, re.M)
    assert "claimed" in run.stdout.splitlines()


def test_a_second_job_at_once_is_refused(cluster, tmp_path):
    """Refuse it, because verl would mix the samples of the two jobs."""
    environment, _ = cluster
    length = ("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1")
    jobs = []
    for name in "ab":
        run_dir = {"OUTPUT_DIR": str(tmp_path / name)}
        jobs.append(
            subprocess.Popen(
                ["bash", "recipe/bapo/run_bapo_example.sh", SHORT_STEPS, "trainer.n_gpus_per_node=1", *length],
                cwd=ROOT,
                env={**os.environ, "VERL_PLATFORM": "cpu", **environment, **run_dir},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [job.communicate(timeout=600)[0] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 1], outputs
    codes = [job.returncode for job in jobs]
    assert "2 steps, mean of" in outputs[codes.index(0)]
    assert "another verl run is on this Ray cluster" in outputs[codes.index(1)]
    assert len(read_metrics(tmp_path / "ab"[codes.index(0)])) == 2
