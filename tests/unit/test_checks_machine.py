# SPDX-License-Identifier: Apache-2.0
"""The machine without GPUs: versions, shared memory, open files, disk; and the table as a whole."""

import json
import sys
from types import SimpleNamespace

import pytest
from support.configs import composed

from recipe.bapo.run import locks
from recipe.bapo.run.preflight import CheckWarning, __main__, machine, preflight


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Ignore other runs on this machine."""
    monkeypatch.setattr(locks, "SOCKETS", tmp_path)
    monkeypatch.setattr(locks, "FIRST_JOB", "a test's")


def results_of(config):
    return {line.name: line for line in preflight.run_checks(config)}


def test_the_example_passes_and_nothing_is_written(task, tmp_path):
    lines = results_of(composed(task, f"run_dir={tmp_path}/run"))
    assert [line for line in lines.values() if line.status != "ok"] == []
    assert lines["batches"].detail == (
        "64 prompts of 8 responses, staleness 8 (updates on each batch), data-parallel ranks: 1"
    )
    assert lines["data"].detail == "rows: 2,160 for training and 288 for validation"
    assert not (tmp_path / "run").exists()


def test_several_failures_are_all_shown_and_each_once(task):
    config = composed(
        task, "data.train_files=/no.parquet", "data.train_batch_size=7", "reward.reward_manager.name=nope"
    )
    failed = {name for name, line in results_of(config).items() if line.status == "failed"}
    assert failed == {"data", "batches", "reward"}
    lines = results_of(composed(task, "actor_rollout_ref.model.path=/no/such/model"))
    assert [name for name, line in lines.items() if line.status == "failed"] == ["model"] and "data" not in lines


def test_a_check_that_breaks_does_not_hide_the_others(task, monkeypatch):
    broken = ("broken", lambda config: config.no_such_key.x, ())
    monkeypatch.setattr(preflight, "CHECKS", (broken, *preflight.CHECKS[:2]))
    lines = results_of(composed(task))
    assert lines["broken"].status == "failed" and "no_such_key" in lines["broken"].detail
    assert lines["versions"].status == "ok"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["trainer.no_such_key=1"], "no_such_key"),
        (
            ["trainer.project_name=${trainer.experiment_name}", "trainer.experiment_name=${trainer.project_name}"],
            "cannot be resolved: Recursive interpolation",
        ),
        (["run_dir=${oc.env:OUTPUT_DIR}"], "run_dir=${oops} is not usable: set it to a value without '${'"),
    ],
)
def test_a_config_that_does_not_come_together_is_one_line_of_json(monkeypatch, task, capsys, overrides, said):
    for name, value in {"MODEL_PATH": task / "model", "TRAIN_FILE": task, "TEST_FILE": task}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OUTPUT_DIR", "${oops}")
    monkeypatch.setattr(sys, "argv", ["checks", "--json", "experiment=example", "size=cpu", *overrides])
    sys.argv += ["--config-dir", str(machine.Path(__file__).parents[2] / "configs")]
    assert __main__.main() == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert line["name"] == "config" and line["status"] == "failed" and said in line["detail"]
    assert "\n" not in line["detail"]


@pytest.mark.parametrize(
    "replaced, said",
    [
        ({"version": lambda name: "0.8.0"}, "verl 0.8.0: the recipe is written for"),
        ({"version": lambda name: [].pop()}, "the package=verl is not usable: .*; run bash scripts/setup.sh"),
    ],
)
def test_another_verl_and_a_missing_package(task, monkeypatch, replaced, said):
    for name, value in replaced.items():
        monkeypatch.setattr(machine.metadata, name, value)
    with pytest.raises((CheckWarning, ValueError), match=said):
        machine.check_versions(composed(task))


def test_few_open_files_are_refused(task, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (20, 20))
    with pytest.raises(ValueError, match="ulimit -n is 20, and Ray opens more files: set ulimit -n 65536"):
        machine.check_limits(composed(task))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (20, 4096))  # Ray raises it
    assert machine.check_limits(composed(task)).startswith("4096 open files")


def test_little_shared_memory_is_a_warning_on_a_cpu_and_a_failure_on_gpus(task, monkeypatch):
    config = composed(task)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    with pytest.raises(
        CheckWarning, match="/dev/shm has 0.06 GiB free, and Ray, NCCL and .*: docker run --shm-size=16g"
    ):
        machine.check_limits(config)
    config.trainer.device = "cuda"
    with pytest.raises(ValueError, match="/dev/shm has 0.06 GiB free"):
        machine.check_limits(config)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    assert machine.check_limits(config).endswith("1 GiB free in /dev/shm")


@pytest.mark.parametrize(
    "missing, said",
    [
        ("gcc", None),  # clang will do
        ("gcc clang", "there is no C compiler clang here"),
        ("Python.h", "Python.h does not exist"),
    ],
)
def test_what_triton_compiles_with_is_asked_for_on_a_gpu(monkeypatch, tmp_path, missing, said):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None if name in missing.split() else name)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    if missing != "Python.h":
        (tmp_path / "Python.h").touch()
    config = SimpleNamespace(trainer=SimpleNamespace(device="cuda"))
    if said is None:
        assert machine.check_compiler(config) == f"clang, {tmp_path / 'Python.h'}"
    else:
        with pytest.raises(ValueError, match=said):
            machine.check_compiler(config)
