# SPDX-License-Identifier: Apache-2.0
"""Which variables a job on a cluster gets, and which the command names as not forwarded."""

import os

import pytest

from scripts.cluster import job


def test_a_job_gets_what_the_network_needs_and_no_secret(monkeypatch, capsys):
    given = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "HF_HOME": "/hub", "VLLM_LOGGING_LEVEL": "INFO"}
    given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    left_out = {"HF_TOKEN": "planted-1", "WANDB_API_KEY": "planted-2", "UCX_NET_DEVICES": "planted-3"}
    others = {"EDITOR": "planted-4", "RAY_ADDRESS": "planted-5", "GITHUB_TOKEN": "planted-6", "NCCL_DEBUG": ""}
    for name, value in (given | left_out | others).items():
        monkeypatch.setenv(name, value)
    called = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.extend(arguments))
    job.main(["submit", "name", "true"])
    of_job = called[called.index("--") + 1 :]
    assert of_job[0] == "env" and of_job[-1] == "true"
    assert {f"{name}={value}" for name, value in given.items()} <= set(of_job)
    output = capsys.readouterr().out
    assert "planted" not in f"{called} {output}"
    named = output.split("Not given to the job: ")[1].split(". ")[0].split(", ")
    assert set(left_out) <= set(named) and not {*given, *others} & set(named)


@pytest.mark.parametrize("arguments", [[], ["submit", "name"], ["stop", "name"]])
def test_wrong_arguments_submit_nothing(arguments, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was submitted"))
    assert job.main(arguments) == 2
