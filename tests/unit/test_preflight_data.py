# SPDX-License-Identifier: Apache-2.0
"""Bad data, checkpoints and models are named, with row or file, before a run starts; and how the cluster is chosen."""

import json
import re

import pandas as pd
import pytest
from support.configs import composed

from recipe.bapo.preflight import CheckWarning, reward
from recipe.bapo.preflight.data import check_checkpoint, check_files
from recipe.bapo.preflight.model import check_model
from recipe.bapo.preflight.reward import as_written
from recipe.bapo.run.train import configure_ray


def check_train_data(config):
    """Check the data with a batch of one prompt, so that one row is enough. Returns what the check says."""
    config.data.train_batch_size = 1
    return check_files(config)


def row(**changes):
    """Make a usable row, then change some of its columns."""
    return {
        "data_source": "bapo/guess",
        "prompt": [{"role": "user", "content": "1+2="}],
        "reward_model": {"style": "rule", "ground_truth": "03"},
        **changes,
    }


OWN_SCORER = "reward.custom_reward_function.path=null"  # verl's scorers
PROMPT = "row 2: prompt .data.prompt_key. has to be a list of messages, each with role and content"
TRUTH = "row 2: reward_model has no ground_truth, with which a rule compares responses"
REJECTED = "verl's scorer gives the answer {!r} no more than an empty response (0) where the ground_truth is {!r}"


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"data_source": None}, "row 2: data_source has to be a name"),
        ({"prompt": []}, PROMPT),
        ({"prompt": [{"role": "", "content": "1+2="}]}, PROMPT),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, TRUTH),
    ],
)
def test_a_bad_row_is_named(task, tmp_path, bad, message):
    path = tmp_path / "data.parquet"
    pd.DataFrame([row(), row(), row(**bad)]).to_parquet(path)
    files = (f"data.train_files={path}", f"data.val_files={path}")
    with pytest.raises(ValueError, match=message):
        check_train_data(composed(task, *files, OWN_SCORER))


def test_what_verl_renders_is_a_prompt(task, tmp_path):
    path = tmp_path / "data.parquet"
    rows = [row(prompt=[{"role": "system", "content": ""}, {"role": "user", "content": "1+2="}])]
    pd.DataFrame(rows).to_parquet(path)
    assert check_train_data(composed(task, f"data.train_files={path}")).startswith("rows: 1 for training")


@pytest.mark.parametrize("column, value", [("prompt", "1+2="), ("reward_model", "03")])
def test_a_column_of_the_wrong_type_is_named(task, tmp_path, column, value):
    path = tmp_path / "data.parquet"
    pd.DataFrame([row(**{column: value})] * 2).to_parquet(path)
    with pytest.raises(ValueError, match=f"row 0: {column} .*has to"):
        check_train_data(composed(task, f"data.train_files={path}"))


def with_truths(task, tmp_path, source, truths):
    """Write rows with these right answers. Returns the config of a run on them with verl's scorers."""
    path = tmp_path / "data.parquet"
    rows = [row(data_source=source, reward_model={"style": "rule", "ground_truth": truth}) for truth in truths]
    pd.DataFrame(rows).to_parquet(path)
    return composed(task, f"data.train_files={path}", f"data.val_files={path}", OWN_SCORER)


@pytest.mark.parametrize(
    "source, truth",
    [("openai/gsm8k", one) for one in ("1,234", "$18", "50%", "#### 42")] + [("lighteval/MATH", "\\boxed{5}")],
)
def test_one_answer_of_each_form_is_tried(task, tmp_path, source, truth):
    config = with_truths(task, tmp_path, source, ["72"] * 60 + [truth] * 10)
    with pytest.raises(CheckWarning) as warning:
        check_train_data(config)
    assert f"where the ground_truth is {truth!r}" in str(warning.value) and "is '72'" not in str(warning.value)


def test_every_answer_of_a_file_can_be_right(task, tmp_path):
    assert (
        check_train_data(with_truths(task, tmp_path, "openai/gsm8k", ["72"]))
        == "rows: 1 for training and 1 for validation"
    )
    for truth in (72, ""):
        with pytest.raises(CheckWarning, match=re.escape(REJECTED.format(str(truth), truth))):
            check_train_data(with_truths(task, tmp_path, "openai/gsm8k", [truth]))
    with pytest.raises(ValueError, match="data_source=nobody/knows: NotImplementedError"):
        check_train_data(with_truths(task, tmp_path, "nobody/knows", ["72"]))


@pytest.mark.parametrize(
    "source, truth, answer",
    [
        ("openai/gsm8k", "5.0", "5"),
        ("openai/gsm8k", '["5"]', "5"),
        ("openai/gsm8k", ["1", "1.0"], "1"),
        ("openai/gsm8k", '["1", "1.0"]', "1"),
        ("openai/gsm8k", "72.50", "72.5"),
        ("aime_2024", "007", "7"),
    ],
)
def test_an_answer_that_no_model_writes_is_a_warning(task, tmp_path, source, truth, answer):
    truths = [truth] if isinstance(truth, list) else ["72", truth]  # the first row of another kind hides none
    config = with_truths(task, tmp_path, source, truths)
    with pytest.raises(CheckWarning) as warning:
        check_train_data(config)
    said = str(warning.value)
    assert f"gives the answer {answer!r} no more" in said and f"is {truth!r}, in" in said and "is '72'" not in said
    config = with_truths(task, tmp_path, source, [answer for _ in truths])  # the fix
    assert check_train_data(config).startswith("rows: ")


@pytest.mark.parametrize(
    "source, truth",
    [
        ("lighteval/MATH", "\\frac{1}{2}"),
        ("openai/gsm8k", "1000"),
        ("lighteval/MATH", "[-3, -1]"),  # an interval
        ("taco", json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})),
        ("taco", json.dumps([{"input": "1", "output": "2"}])),
        ("taco", json.dumps([["1"], ["2"]])),
    ],
)
def test_what_a_scorer_accepts_or_runs_is_no_warning(task, tmp_path, source, truth):
    config = with_truths(task, tmp_path, source, [truth])
    said = check_train_data(config)
    unasked = f"; no answer was tried of data_source={source}, whose ground_truth is no short answer"
    assert said == "rows: 1 for training and 1 for validation" + (unasked if source == "taco" else "")


def test_a_scorer_is_asked_once_for_the_tests_of_programs_and_for_few_forms(task, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(reward, "default_compute_score", lambda solution_str, **_: asked.append(solution_str) or 1.0)
    programs = [json.dumps({"inputs": [f"{'x' * number}\n"], "outputs": ["2\n"]}) for number in range(50)]
    assert check_train_data(with_truths(task, tmp_path, "taco", programs)) and asked == ["", ""]  # of each file
    asked.clear()
    with pytest.raises(CheckWarning):
        check_train_data(
            with_truths(task, tmp_path, "openai/gsm8k", [f"{'+' * (n % 20)}1{'-' * (n // 20)}" for n in range(400)])
        )
    assert asked.count("") == 2 * reward.MOST_FORMS


def test_a_large_number_is_written_digit_by_digit():
    assert as_written("1267650600228229401496703205376") == "1267650600228229401496703205376"
    assert as_written("-0012.50") == "-12.5"


def test_pictures_for_a_model_of_text_are_named_as_such(task, tmp_path):
    path = tmp_path / "data.parquet"
    prompt = [{"role": "user", "content": "<image>What is this?"}]
    pd.DataFrame([row(prompt=prompt, images=[{"path": "a.png"}])]).to_parquet(path)
    with pytest.raises(ValueError, match="processor is needed to process multimodal data; give rows that verl can"):
        check_train_data(composed(task, f"data.train_files={path}", f"data.val_files={path}"))


@pytest.mark.parametrize(
    "reward_model, overrides",
    [
        ({"style": "model", "ground_truth": None}, [OWN_SCORER]),
        ({"style": "rule", "ground_truth": None}, []),  # the example's own reward function gets it
        (None, [OWN_SCORER, "actor_rollout_ref.rollout.agent.agent_loop_config_path=/my/loops.yaml"]),
    ],
)
def test_a_row_that_no_rule_of_verl_scores_needs_no_right_answer(task, tmp_path, reward_model, overrides):
    path = tmp_path / "data.parquet"
    pd.DataFrame([row(data_source="openai/gsm8k", reward_model=reward_model)]).to_parquet(path)
    config = composed(task, f"data.train_files={path}", f"data.val_files={path}", *overrides)
    assert check_train_data(config).startswith("rows: 1 for training")
    pd.DataFrame([row(reward_model=None)]).to_parquet(path)
    if reward_model is not None:  # verl's reward managers read the column
        with pytest.raises(ValueError, match="row 0: reward_model has to be a section with ground_truth"):
            check_train_data(config)


def test_the_prompts_column_is_the_configs(task, tmp_path):
    path = tmp_path / "data.parquet"
    pd.DataFrame([row()]).rename(columns={"prompt": "question"}).to_parquet(path)
    assert check_train_data(
        composed(task, f"data.train_files={path}", f"data.val_files={path}", "data.prompt_key=question")
    ).startswith("rows: 1 for training")
    with pytest.raises(ValueError, match="row 0: prompt .data.prompt_key. has to"):
        check_train_data(composed(task, f"data.train_files={path}"))


@pytest.fixture
def checkpoints(tmp_path):
    """Make a folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    return tmp_path


def resuming(task, checkpoints, *overrides):
    return composed(task, f"trainer.default_local_dir={checkpoints}", "trainer.resume_mode=auto", *overrides)


def test_the_checkpoint_to_resume_from_is_named(task, checkpoints, tmp_path):
    assert check_checkpoint(resuming(task, checkpoints)).endswith("global_step_2")
    path = f"trainer.resume_from_path={checkpoints}/global_step_1"
    config = resuming(task, checkpoints, "trainer.resume_mode=resume_path", path)
    assert check_checkpoint(config).endswith("global_step_1")
    assert "starts from scratch" in check_checkpoint(resuming(task, tmp_path / "none"))


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_checkpoint_that_the_mode_would_ignore_is_refused(task, checkpoints, mode):
    path = f"trainer.resume_from_path={checkpoints}/global_step_1"
    with pytest.raises(ValueError, match=f"has no effect with trainer.resume_mode={mode}: set .*=resume_path"):
        check_checkpoint(resuming(task, checkpoints, f"trainer.resume_mode={mode}", path))


@pytest.mark.parametrize("content", ["", "3"])
def test_a_tracker_that_names_nothing_does_not_start_from_scratch(task, checkpoints, content):
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(ValueError, match=f"latest_checkpointed_iteration.txt names the checkpoint '{content}'"):
        check_checkpoint(resuming(task, checkpoints))


def test_a_folder_that_is_no_checkpoint_is_named(task, tmp_path):
    config = resuming(task, tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    with pytest.raises(CheckWarning, match="trainer.resume_from_path=.*: name a checkpoint's folder"):
        check_checkpoint(config)
    (tmp_path / "global_step_2").mkdir()
    # verl would take what follows "global_step_" for a number, and 2/ is none.
    config.trainer.resume_from_path = f"{tmp_path}/global_step_2/"
    with pytest.raises(CheckWarning, match="global_step_N, with no slash behind it"):
        check_checkpoint(config)


def test_a_package_that_a_data_set_or_a_scorer_lacks_here_is_named(task, tmp_path):
    (tmp_path / "own.py").write_text("import no_such_package")
    own = (f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Own")
    with pytest.raises(CheckWarning, match="No module named 'no_such_package' on this machine: install it"):
        check_train_data(composed(task, *own))
    config = with_truths(task, tmp_path, "hiyouga/geometry3k", ["72"])  # verl's scorer imports mathruler
    with pytest.raises(CheckWarning, match="data_source=hiyouga/geometry3k: No module named 'mathruler' on this"):
        check_train_data(config)


OWN_DATA_SET = """
from torch.utils.data import Dataset
class Own(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.end = tokenizer.eos_token_id
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return {"prompt": self.end}
"""


def test_a_data_set_of_ones_own_is_made_and_its_rows_are_its_own(task, tmp_path):
    (tmp_path / "own.py").write_text(OWN_DATA_SET)
    own = (f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Own")
    assert check_files(composed(task, *own, "data.train_batch_size=3")) == "rows: 3 for training and 3 for validation"
    with pytest.raises(CheckWarning, match="has 3 usable rows, fewer than data.train_batch_size=4"):
        check_files(composed(task, *own, "data.train_batch_size=4"))
    assert check_files(composed(task, *own, "data.train_batch_size=4", "trainer.val_only=true"))  # it draws no batch


def test_the_cluster_is_chosen_by_address_and_nodes(task, monkeypatch):
    def chosen(*overrides):
        config = composed(task, *overrides)
        configure_ray(config)
        ray_init = config.ray_kwargs.ray_init
        return ray_init.get("address"), ray_init.num_cpus, ray_init.get("num_gpus")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert chosen() == ("local", 16, 16)
    # Ray is told of enough CPUs, also on a machine that has fewer.
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert chosen("ray_kwargs.ray_init.num_cpus=null") == ("local", 5, 16)
    monkeypatch.setattr("os.cpu_count", lambda: 99)
    assert chosen("ray_kwargs.ray_init.num_cpus=null") == ("local", 99, 16)
    assert chosen("trainer.nnodes=2") == ("auto", None, None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert chosen() == ("auto", None, None)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert chosen() == ("local", 16, 16)


def test_an_extended_context_is_believed(task):
    lengths = ("data.max_response_length=2000", "actor_rollout_ref.rollout.max_model_len=null")
    with pytest.raises(ValueError, match="max_model_len=None and .* has 1024 positions: vLLM would") as refused:
        check_model(composed(task, *lengths))
    for section in ("override_config", "engine_kwargs.vllm.hf_overrides"):
        assert section in str(refused.value)
    check_model(composed(task, *lengths, "++actor_rollout_ref.model.override_config.max_position_embeddings=8192"))
    check_model(composed(task, *lengths, "actor_rollout_ref.rollout.name=sglang"))
