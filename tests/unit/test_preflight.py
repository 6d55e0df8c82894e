# SPDX-License-Identifier: Apache-2.0
"""Preflight reports a mistake in a config in one line with the field, the value and the fix, before Ray starts.

It refuses what verl refuses and what would go wrong without a word. Of everything else it warns. The cases are the rows
of ``preflight_cases.md``.
"""

import json
import re
import shutil
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import peft
import pytest
import torch
from omegaconf import OmegaConf
from packaging.version import Version
from support.configs import ROOT, composed, few_rows
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

import verl  # noqa: F401  loads the plugin
from recipe.bapo import main_bapo
from recipe.bapo.config import compose_config, prepare
from recipe.bapo.preflight import keys, rules, stages
from recipe.bapo.preflight.stages import run_preflight, run_stages
from recipe.bapo.run import train
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.utils.fsdp_utils import collect_lora_params, get_fsdp_wrap_policy

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHORT = {  # of the sections in preflight_cases.md
    "actor.": f"{ACTOR}.",
    "rollout.": f"{ROLLOUT}.",
    "model.": "actor_rollout_ref.model.",
    "loss.": f"{ACTOR}.policy_loss.",
    "correction.": "algorithm.rollout_correction.",
}
SETS = {
    "fsdp1": "actor.strategy=fsdp",
    "fsdp2": "actor.strategy=fsdp2",
    "bypass": "correction.bypass_mode=true actor.calculate_entropy=true",
    "monitor": "loss.loss_mode=vanilla loss._target_=recipe.bapo.policy_loss.MonitorConfig",
    "stock": "loss.loss_mode=vanilla loss._target_=verl.workers.config.PolicyLossConfig",
    "separate": (
        "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=8 rollout.nnodes=1 "
        "rollout.n_gpus_per_node=1 correction.bypass_mode=true actor.calculate_entropy=true"
    ),
}


def cases(heading):
    """Return the rows below a heading of ``preflight_cases.md`` as tuples of cells."""
    section = (Path(__file__).parent / "preflight_cases.md").read_text().partition(f"## {heading}\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def written_out(overrides, files):
    """Return the overrides of a cell in full."""
    found = []
    for one in " ".join(SETS.get(word, word) for word in overrides.split()).format(files=files).split():
        plus, name = re.fullmatch(r"(\+*)(.*)", one).groups()
        section = next((short for short in SHORT if name.startswith(short)), "")
        found.append(f"{plus}{SHORT.get(section, '')}{name.removeprefix(section)}")
    return found


@pytest.fixture(scope="module")
def files(task, tmp_path_factory):
    """Make a folder of unusable models and files, each named after its fault."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("headless", "truncated"):
        shutil.copytree(task / "model", folder / name)
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    config = json.loads((task / "model" / "config.json").read_text())
    (folder / "headless" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    row = {"prompt": [{"role": "user", "content": "9" * 300}], "reward_model": {"style": "rule", "ground_truth": "3"}}
    pd.DataFrame([{"data_source": "nobody/knows", **row}] * 70).to_parquet(folder / "long.parquet")
    (folder / "truncated.parquet").write_bytes(b"PAR1 and no more")
    return folder


@pytest.fixture(scope="module")
def said(task, files):
    """Return a function: what preflight says of the example with overrides, as lists ``failed`` and ``warning``."""

    def lines_of(overrides, only=None):
        overrides = written_out(overrides, files)
        config = composed(task, *few_rows(task), *overrides)
        prepare(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules, "version", lambda package: "0.21.0")
            if only:
                patch.setattr(stages, "STAGES", tuple(row for row in stages.STAGES if row[0] == only))
            lines = run_stages(config, overrides)
        return {status: [line.detail for line in lines if line.status == status] for status in ("failed", "warning")}

    return lines_of


@pytest.mark.parametrize("case", cases("All stages"), ids=lambda case: case[0])
def test_preflight_says_it_once_and_each_fix_takes_it_away(case, said):
    check_case(case, said)


@pytest.mark.parametrize("case", cases("Settings"), ids=lambda case: case[0])
def test_a_setting_is_reported_once_and_each_fix_takes_it_away(case, said):
    check_case(case, lambda overrides: said(overrides, only="settings"))


def check_case(case, said):
    overrides, status, text, fixes = case
    lines = said(overrides)
    found = [line for line in lines[status] if text in line]
    assert len(found) == 1 and "\n" not in found[0], lines
    assert status == "failed" or not lines["failed"], lines
    for fix in filter(None, fixes.split(";")):
        left = said(f"{overrides} {fix}")
        assert not left["failed"] and not [line for line in left[status] if text in line], fix


@pytest.mark.parametrize("overrides", [case[0] for case in cases("Nothing to say")])
def test_what_is_right_passes(overrides, said):
    assert said(overrides, only="settings") == {"failed": [], "warning": []}


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_no_estimator_of_verl_is_reported_by_itself(estimator, said):
    assert not said(f"algorithm.adv_estimator={estimator.value}", only="settings")["failed"]


def test_lora_with_fsdp1_passes_with_a_peft_that_finds_it(task, monkeypatch):
    monkeypatch.setattr(rules, "version", lambda package: "0.20.1")
    assert rules.check_rules(composed(task, *written_out("model.lora_rank=8 fsdp1", "")))


@pytest.fixture
def one_rank(tmp_path):
    """Start a process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_peft_finds_wrapped_adapters_as_its_version_says(one_rank):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, vocab_size=8, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    policy = get_fsdp_wrap_policy(model, is_lora=True)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    found = collect_lora_params(wrapped, layered_summon=False, base_sync_done=True)
    assert bool(found) == (Version(version("peft")) < rules.PEFT)


def test_several_failures_of_the_rules_are_in_one_line(said):
    (refused,) = said("trainer.critic_warmup=9 actor.optim.clip_grad=0", only="settings")["failed"]
    assert "makes every gradient 0" in refused and "trainer.critic_warmup=9 without a critic" in refused


def test_a_slip_in_a_yaml_file_is_named_by_file_and_line(task, tmp_path, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open(tmp_path / "configs" / "size" / "cpu.yaml", "a") as file:
        file.write("rollout:\n  n:8\n  m: 3\n")
    where = {"groups": tmp_path / "configs", "name": "bapo_trainer"}
    (line,) = run_preflight(["experiment=example", "size=cpu"], **where)
    assert line.status == "failed" and "mapping values are not allowed here" in line.detail
    assert "/configs/size/cpu.yaml" in line.detail and "line " in line.detail and "\n" not in line.detail


@pytest.mark.parametrize(
    "override, said",
    [
        ("trainer.totl_epochs=3", "Could not override 'trainer.totl_epochs'. To append to your config use +trainer.to"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "use +data.apply_chat_template_kwargs.enable_thi"),
        ("run_dir=${oops}", "Interpolation key 'oops' not found"),
        ("run_dir=a(b", "run_dir=a(b: no viable alternative at input 'a(b'"),
    ],
)
def test_hydras_answer_is_shown(override, said):
    (line,) = run_preflight([override], name="bapo_trainer")
    assert line.status == "failed" and said in line.detail and "\n" not in line.detail


def test_a_folder_of_groups_that_is_not_there_is_named():
    (line,) = run_preflight(["experiment=example"], name="bapo_trainer", groups="/nope")
    assert line.detail == "invalid --config-dir=/nope: there is no such folder."


def test_an_unknown_key_in_a_yaml_file_is_a_warning(task, tmp_path, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, str(task))
    groups = shutil.copytree(ROOT / "configs", tmp_path / "a (copy), of mine" / "configs")  # a folder of any name
    (groups / "size" / "broken.yaml").write_text("a: {")  # a broken file that is not selected changes nothing
    size = groups / "size" / "cpu.yaml"
    text = size.read_text().replace("train_batch_size: 64", "train_batch_sise: 64")
    size.write_text(
        f"{text}algorithm: {{kl_ctrl: {{kl_coeff: 0.1}}}}\n"
    )  # verl does not build what _target_ names there
    overrides = ["experiment=example", "size=cpu", "+data.image_keys=[x]", "+algorithm.my.beta=1"]
    config = compose_config(overrides, groups)
    prepare(config)
    assert keys.unknown_keys(config, overrides) == ["data.train_batch_sise", "algorithm.kl_ctrl.kl_coeff"]
    monkeypatch.setattr(stages, "STAGES", stages.STAGES[:1])
    (line,) = run_stages(config, overrides)
    assert line.status == "warning" and "has data.train_batch_sise, algorithm.kl_ctrl.kl_coeff. If you" in line.detail


OWN_ESTIMATOR = """
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("mine")
def compute(token_level_rewards, response_mask, config=None, **kwargs):
    return token_level_rewards, token_level_rewards
"""


def test_an_estimator_of_ones_own_is_found_where_verl_imports_it(said, tmp_path, monkeypatch):
    (tmp_path / "own_estimator.py").write_text(OWN_ESTIMATOR)
    monkeypatch.syspath_prepend(tmp_path)
    own = "model.external_lib=own_estimator algorithm.adv_estimator=mine"
    assert said(own, only="verl's config") == {"failed": [], "warning": []}


def test_verls_name_for_cuda_is_a_platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    assert compose_config([]).trainer.device == "cuda"


def test_it_can_be_left_out_of_a_run(task, tmp_path, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(train, "claim_machine", lambda: None)  # it is held until the process ends
    monkeypatch.setattr(train, "call_verl", trained.append)
    monkeypatch.setattr(train.HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"task": []}}))
    for wanted in (True, False):
        run_dir = tmp_path / str(wanted)
        config = composed(task, "trainer.critic_warmup=1000", f"preflight={wanted}", f"run_dir={run_dir}")
        with pytest.raises(SystemExit) if wanted else nullcontext():
            main_bapo.main.__wrapped__(config)
    (config,) = trained
    assert config.run_dir == str(tmp_path / "False") and list(config.trainer.logger) == ["file"]
    config = composed(task, f"{ACTOR}.ppo_mini_batch_size=128", "preflight=false")
    with pytest.raises(SystemExit):
        main_bapo.main.__wrapped__(config)  # verl's own entry point asks the same function
    assert capsys.readouterr().err.endswith(
        "\nError: train_batch_size (64) must be >= actor.ppo_mini_batch_size (128)\n"
    )


@pytest.mark.parametrize(
    "given, used", [("console", ["console", "file"]), (["file"], ["file"]), (None, ["file"]), ("file", ["file"])]
)
def test_the_file_logger_is_added_to_what_the_user_named(task, given, used):
    config = composed(task)
    config.trainer.logger = given
    prepare(config)
    assert list(config.trainer.logger) == used
