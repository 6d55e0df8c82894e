# SPDX-License-Identifier: Apache-2.0
"""Preflight takes anyone's command: verl's own entry point without our lines, with the monitor's, and with the two."""

import re
import runpy
import subprocess
import sys

import pytest
from support.commands import LIMIT
from support.configs import ROOT, few_rows

from recipe.bapo.preflight.__main__ import main
from recipe.bapo.preflight.stages import STAGES, run_preflight

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss"
MONITOR = [f"{LOSS}._target_=recipe.bapo.policy_loss.MonitorConfig"]
TWO_LINES = [f"{LOSS}.loss_mode=bapo", f"{LOSS}._target_=recipe.bapo.policy_loss.BAPOPolicyLossConfig"]


def documented():
    """Return the arguments that each of the README's commands of verl's entry point adds."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python -m verl\.trainer\.main_ppo(.*?)^```", text, re.M | re.S)
    return [re.findall(r"^    (actor_rollout_ref\S+)", one, re.M) for one in commands]


@pytest.fixture
def stock(task, monkeypatch):
    """Return the arguments of a small run of verl's own entry point, on a machine without GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return [
        f"actor_rollout_ref.model.path={task}/model",
        *few_rows(task),
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "data.max_prompt_length=128",
        "data.max_response_length=30",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        "reward.custom_reward_function.path=pkg://recipe.bapo.example.reward",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
    ]


def found(arguments, **options):
    """Return what is not ok in a command of verl's entry point, as ``{stage: (status, detail)}``."""
    lines = run_preflight(arguments, **{"name": "ppo_trainer", **options})
    return {line.name: (line.status, line.detail) for line in lines if line.status not in ("ok", "skipped")}


# On a machine without GPUs.
OF_THE_MACHINE = {"CPUs"}


def test_the_readme_has_the_lines():
    assert documented() == [MONITOR, TWO_LINES]


@pytest.mark.parametrize("lines", [[], MONITOR, TWO_LINES], ids=["stock", "monitor", "bapo"])
def test_a_command_of_verls_entry_point_passes(stock, lines):
    left = found([*stock, *lines])
    assert left.keys() <= OF_THE_MACHINE and {status for status, _ in left.values()} <= {"warning"}, left


# The command, on a machine where no other run is seen.
ALONE = """
import sys
from pathlib import Path
from recipe.bapo.host import locks
locks.SOCKETS, locks.FIRST_JOB = Path(sys.argv.pop(1)), "no job"
from recipe.bapo.preflight.__main__ import main
sys.exit(main())
"""


def test_the_command_prints_the_table_and_what_the_loss_is(stock, tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path), *stock, *MONITOR]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0 and not run.stderr, run.stdout + run.stderr
    printed = run.stdout.splitlines()
    assert {line.split()[0] for line in printed} == {"ok", "skipped", "warning"} and len(printed) == len(STAGES)
    assert "bound_scope=none, because loss_mode=vanilla is only monitored" in run.stdout


@pytest.mark.parametrize(
    "lines, said",
    [
        ([*MONITOR, f"{LOSS}.loss_mode=vanila"], "loss_mode=vanila: Unsupported loss mode: vanila. Supp"),
        ([*MONITOR, f"{LOSS}.loss_mode=bapo"], "loss_mode=bapo with MonitorConfig, which leaves the"),
        (TWO_LINES[:1], f"loss_mode=bapo without its config: set {TWO_LINES[1]}"),
        (TWO_LINES[1:], "loss_mode='vanilla' with BAPOPolicyLossConfig: use loss_mode=bapo"),
        (
            ["custom_reward_function.path=/my/reward.py"],
            "custom_reward_function.path: verl.trainer.main_ppo 0.9.1 does",
        ),
        (["reward_model.reward_manager=dapo"], "reward_model.reward_manager: verl.trainer.main_ppo 0.9.1 does not"),
    ],
)
def test_what_would_go_wrong_in_it_is_refused(stock, lines, said):
    failed = [detail for status, detail in found([*stock, *lines]).values() if status == "failed"]
    assert len(failed) == 1 and said in failed[0], failed


def test_the_older_trainer_of_verl_takes_the_lines(stock):
    lines = run_preflight([*stock, *MONITOR, "trainer.use_v1=false"], name="ppo_trainer")
    assert {line.name for line in lines if line.status in ("failed", "warning")} <= OF_THE_MACHINE


@pytest.mark.parametrize(
    "name, overrides, module",
    [
        ("fully_async_ppo_trainer.yaml", ["data.train_batch_size=0"], "fully_async_policy.fully_async_main"),
        ("one_step_off_ppo_trainer", [], "one_step_off_policy.main_ppo"),
    ],
)
def test_a_config_of_another_entry_point_is_skipped(stock, name, overrides, module):
    (line,) = run_preflight([*stock, *overrides, *MONITOR], name=name, folder="config")
    assert line.status == "skipped" and line.detail.endswith(f"this is a config of verl.experimental.{module}")


def test_the_config_of_dapos_recipe_is_skipped(stock, tmp_path, monkeypatch, capsys):
    (tmp_path / "dapo_trainer.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    of_dapo = ["--config-path", str(tmp_path), "--config-name", "dapo_trainer"]
    monkeypatch.setattr(sys, "argv", ["preflight", *of_dapo, *stock, "reward_model.reward_manager=dapo"])
    assert main() == 2 and capsys.readouterr().out.startswith("skipped  keys ")


def test_a_loss_that_is_not_a_policy_loss_is_refused_as_in_the_worker(stock):
    teacher = "distillation.teacher_models.teacher_model"
    distils = ["distillation.enabled=true", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"]
    distils += [f"{teacher}.model_path=/teacher", f"{teacher}.inference.tensor_model_parallel_size=1"]
    distils += [f"{teacher}.num_replicas=1", f"{teacher}.key=guess"]
    status, detail = found([*stock, *TWO_LINES, *distils])["verl's config"]
    assert status == "failed" and "needs verl's ppo_loss (distillation.enabled=false), not distillation_" in detail
    status, detail = found([*stock, *MONITOR, *distils])["verl's config"]
    assert status == "warning" and "MonitorConfig does nothing in this run: " in detail
    assert "verl's config" not in found([*stock, *distils])


def test_a_monitor_that_would_do_nothing_is_a_warning(stock):
    engine = ["model_engine=torchtitan", f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"]
    status, detail = found([*stock, *MONITOR, *engine])["verl's config"]
    assert status == "warning" and "MonitorConfig does nothing in this run: strategy=torchtitan was not tried" in detail


def test_hydras_options_are_those_of_verls_entry_point(stock, tmp_path):
    megatron = {"name": "ppo_megatron_trainer.yaml", "folder": "config"}
    assert found([*stock, *MONITOR], **megatron).keys() <= OF_THE_MACHINE
    searched = "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
    (tmp_path / "mine.yaml").write_text(f"{searched}defaults: [ppo_trainer, _self_]\ntrainer:\n  val_onli: true\n")
    left = found([*stock, *MONITOR], name="mine", folder=tmp_path)
    assert (
        left.pop("keys")[1].startswith("neither verl nor BAPO has trainer.val_onli") and left.keys() <= OF_THE_MACHINE
    )


def test_a_verl_that_lacks_what_preflight_needs_is_one_row(monkeypatch, capsys):
    """As with 0.8.0."""
    monkeypatch.delitem(sys.modules, "recipe.bapo.preflight.stages")
    monkeypatch.delattr("verl.trainer.distillation.is_distillation_enabled")
    monkeypatch.setattr(sys, "argv", ["preflight", "trainer.nnodes=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipe.bapo.preflight", run_name="__main__")
    row = r"skipped  versions +nothing was checked, because verl \S+ lacks .*is_distillation_enabled.*; the two .*\n"
    assert ended.value.code == 2 and re.fullmatch(row, capsys.readouterr().out)
