# SPDX-License-Identifier: Apache-2.0
"""Which variables a job on a cluster gets, and which the command names as left out."""

from scripts.cluster import job


class Client:
    """Takes jobs."""

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
