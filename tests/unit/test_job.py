# SPDX-License-Identifier: Apache-2.0
"""Which variables a job on a cluster gets, which the command names as not forwarded, and the mode of the token file."""

import os
import subprocess
from pathlib import Path

import pytest

from scripts.cluster import job

ROOT = Path(__file__).parents[2]


class Client:
    """Accepts jobs."""

    def submit_job(self, entrypoint, **_):
        self.entrypoint = entrypoint


def test_a_job_gets_what_the_network_needs_and_no_secret(monkeypatch, capsys):
    given = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "HF_HOME": "/hub", "VLLM_LOGGING_LEVEL": "INFO"}
    given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    left_out = {"HF_TOKEN": "planted-1", "WANDB_API_KEY": "planted-2", "UCX_NET_DEVICES": "planted-3"}
    others = {"EDITOR": "planted-4", "RAY_ADDRESS": "planted-5", "GITHUB_TOKEN": "planted-6", "NCCL_DEBUG": ""}
    for name, value in (given | left_out | others).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "follow", lambda client, name: 0)
    client = Client()
    assert job.submit(client, "name", ["true"]) == 0
    assert all(f"{name}={value}" in client.entrypoint for name, value in given.items())
    output = capsys.readouterr().out
    assert "planted" not in client.entrypoint + output
    named = output.split("Not given to the job: ")[1].split(". ")[0].split(", ")
    assert set(left_out) <= set(named) and not {*given, *others} & set(named)


def join(folder):
    """Run ``ray.sh join`` with the token ``folder / "token"``. It ends because there is no virtual environment."""
    settings = {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "BAPO_VENV": "/no/venv"}
    command = ["bash", "scripts/cluster/ray.sh", "join", "127.0.0.1:1"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True).stderr


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o600])
def test_a_token_that_others_can_use_is_closed(tmp_path, mode):
    token = tmp_path / "token"
    token.write_text("a token")
    token.chmod(mode)
    error = join(tmp_path)
    assert token.stat().st_mode & 0o777 == 0o600 and "/no/venv" in error
    assert (f"could be used by others (mode {mode:o})" in error) == (mode != 0o600)
