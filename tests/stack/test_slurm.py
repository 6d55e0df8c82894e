# SPDX-License-Identifier: Apache-2.0
"""scripts/cluster/slurm.sh in a real allocation, with Slurm's controller and two nodes on this machine."""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
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
)

from recipe.bapo.host.metrics import read_metrics

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo", "scontrol")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt install slurm-wlm munge)"),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/%n
SelectType=select/cons_tres
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm():
    """Start our own Slurm controller. Yields the environment in which Slurm's commands use it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a short path: sockets lie in it
    folder.chmod(0o755)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o600)
    controller, first, second = free_ports(3)
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            folder=folder,
            controller=controller,
            first=first,
            second=second,
        )
    )
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    started = []

    def start(*command):
        log = open(folder / f"{'-'.join(command[0:1] + command[-1:])}.log".replace("/", "_"), "w")
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    def idle_nodes():
        shown = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], env=environment, capture_output=True, text=True)
        return shown.stdout.split() == ["n1", "idle", "n2", "idle"]

    try:
        start(*munged)
        until((folder / "munge.socket").exists, 30, "munge's socket")
        start("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        until(idle_nodes, 90, "two idle nodes")
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_short_run_on_two_nodes(slurm, tmp_path):
    before, log, out = temporary_files(), tmp_path / "job.log", tmp_path / "run"
    port, dashboard = free_ports(2)
    variables = {
        "VERL_PLATFORM": "cpu",
        "OUTPUT_DIR": str(out),
        "HEAD_IP": "127.0.0.1",
        "PORT": str(port),
        "DASHBOARD_PORT": str(dashboard),
    }
    length = [
        SHORT_STEPS,
        "experiment=replay",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    with removing_what_others_leave():
        submit = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", "scripts/cluster/slurm.sh", *length]
        done = subprocess.run(submit, cwd=ROOT, env=slurm | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()

        def state():
            shown = subprocess.run(["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True).stdout
            found = re.search(r"JobState=(\w+).*ExitCode=(\d+:\d+)", shown, re.S)
            return found and found[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") and found.groups()

        found = until(state, 1200, "the job's end")
    text = log.read_text()
    assert found == ("COMPLETED", "0:0"), text[-4000:]
    assert "2 nodes" in text and len(read_metrics(out)) == 1
    # A successful run does not end with messages about killed steps.
    said = re.findall(r"^(?:srun|slurmstepd\S*|scancel): (.*)", text, re.M)
    assert set(said) <= {"cluster configuration lacks support for cpu binding"}  # because of this test's configuration
    assert not [path for path in left_since(before) if path.name.startswith("psm_")]
