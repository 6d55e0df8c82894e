# SPDX-License-Identifier: Apache-2.0
"""What a run gets where its variables leave something open, and what is refused in one line."""

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import LIMIT, ROOT

from recipe.bapo.host.files import output_folder
from recipe.bapo.language_model import __main__ as language_model
from recipe.bapo.run import choose as choices
from recipe.bapo.run import start

ASYNC = {"experiment": "separate_async"}
TRAIN, SAMPLE = choices.TRAIN_GPUS, choices.ROLLOUT_GPUS
MODEL_MISSING = "MODEL_PATH is not set: give a Hugging Face folder or hub name"


@pytest.fixture
def files(task):
    return {name: str(task / file) for name, file in choices.FILES.items()}


def choose(given, gpus, arguments=(), **options):
    """Choose for what a command gives: variables, whose names are in capitals, and settings."""
    settings = [f"{key}={value}" for key, value in given.items() if not key.isupper()]
    variables = {key: value for key, value in given.items() if key.isupper()}
    choice = choices.choose(variables, gpus, [*settings, *arguments], **options)
    choice.arguments += [*settings, *arguments]
    return choice


@pytest.mark.parametrize(
    "gpus, given, message",
    [
        (0, {"TRAIN_FILE": __file__}, "TRAIN_FILE is set, and TEST_FILE is not: give both"),
        (0, {"experiment": "table_1_gpu"}, "experiment=table_1_gpu is for GPUs"),
        (8, {"experiment": "paper_7b", "size": "cpu_long"}, "experiment=paper_7b is for GPUs and size=cpu_long for a"),
        (0, {"experiment": "paper_7b"}, "experiment=paper_7b is for GPUs"),
        (0, {TRAIN: "x[$(touch /tmp/ran)]"}, ": give a whole number of 1 or more"),
        (0, {"OUTPUT_DIR": "/tmp/${x}"}, "run_dir (OUTPUT_DIR)=/tmp/${x}: name a folder, without ${"),
        # The CPU path does not use other machines. On a machine with AMD GPUs it has to be asked for.
        (0, {"NNODES": "2"}, "NNODES=2 but this machine has no GPU"),
        (0, {"RAY_ADDRESS": "http://h:1"}, "RAY_ADDRESS=http://h:1 but this machine has no GPU"),
        ("AMD", {}, "this machine has AMD GPUs, which are not supported"),
        (0, {"VERL_PLATFORM": "huawei"}, "VERL_PLATFORM=huawei: leave it unset"),
        (8, {"VERL_PLATFORM": "nvidia", "experiment": "evaluate"}, MODEL_MISSING),  # verl's name for CUDA
        (0, {"VERL_PLATFORM": "nvidia"}, "VERL_PLATFORM=nvidia, but no GPU is visible"),
        # On a GPU the language model is the default only if no input is given, on one node, and not for these configs.
        (1, {"TEST_FILE": __file__}, MODEL_MISSING),
        (8, {"NNODES": "2"}, MODEL_MISSING),
        (8, {"experiment": "paper_7b"}, MODEL_MISSING),
        (
            1,
            {"experiment": "language_model", "TEST_FILE": __file__},
            "experiment=language_model makes its own model and",
        ),
        (
            8,
            {"experiment": "language_model", "NNODES": "2"},
            "experiment=language_model makes its own model and data, on this",
        ),
        (1, ASYNC, "rollout.n_gpus_per_node=0 on this node's 1 GPUs: give both as 1"),
        (2, {**ASYNC, SAMPLE: "2"}, "would train with trainer.n_gpus_per_node=0 and"),
        # The GPUs of a cluster are not checked here.
        (8, {**ASYNC, TRAIN: "8", SAMPLE: "8", "RAY_ADDRESS": "http://h:1"}, MODEL_MISSING),
    ],
)
def test_what_is_missing_or_wrong_is_named(gpus, given, message):
    with pytest.raises(ValueError) as error:
        choose(given, 0 if gpus == "AMD" else gpus, amd=gpus == "AMD")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "gpus, given, own, size, train, sample",
    [
        (0, {}, False, "cpu_example", 1, 1),
        (8, {"VERL_PLATFORM": "cpu"}, False, "cpu_example", 1, 1),
        (0, {"experiment": "partial_rollout"}, False, "cpu_long", 1, 1),
        (0, {"experiment": "replay", TRAIN: "2"}, False, "cpu", 2, 1),
        (0, {}, True, "cpu_own_data", 1, 1),
        (0, {"experiment": "language_model"}, False, "language_model_cpu", 1, 1),
        (1, {}, True, "gpu_few", 1, 1),
        (2, ASYNC, True, "gpu_few", 1, 1),
        (3, ASYNC, True, "gpu", 2, 1),
        (8, ASYNC, True, "gpu", 4, 4),
        (8, {**ASYNC, SAMPLE: "3"}, True, "gpu", 5, 3),
        (8, {TRAIN: "2"}, True, "gpu_few", 2, 1),
        (1, {"NNODES": "2"}, True, "gpu", 1, 1),
        (1, {"size": "gpu"}, True, "gpu", 1, 1),
        (1, {}, False, "language_model_gpu", 1, 1),
        (3, {}, False, "language_model_gpu", 2, 1),  # batches can be divided among two, and not among three
        (7, {}, False, "language_model_node", 4, 1),
        (8, {"experiment": "replay"}, False, "language_model_node", 8, 1),
        (8, ASYNC, False, "language_model_node", 4, 4),
        (3, ASYNC, False, "language_model_node", 2, 1),  # three are used
        (5, ASYNC, False, "language_model_node", 2, 2),  # four are used
    ],
)
def test_config_size_and_gpus_are_chosen(files, gpus, given, own, size, train, sample):
    choice = choose({**(files if own else {}), **given}, gpus)
    assert f"size={size}" in choice.arguments and f"trainer.n_gpus_per_node={train}" in choice.arguments
    sampling = [argument for argument in choice.arguments if argument.startswith("actor_rollout_ref.rollout.n_gpus")]
    assert sampling == [f"{SAMPLE}={sample}"] * (given.get("experiment") == "separate_async")
    assert choice.language_model == size.startswith("language_model")


@pytest.mark.parametrize(
    "arguments, given, folder",
    [
        ([], {}, "runs/example-[0-9]{8}-[0-9]{6}"),
        ([], {"OUTPUT_DIR": "/out"}, "/out"),
        (["run_dir=/mine"], {"OUTPUT_DIR": "/out"}, "/mine"),
        (["run_dir=mine"], {}, f"{Path.cwd()}/mine"),
        (["++run_dir=/mine"], {}, "/mine"),
        (["run_dir=/mine", "run_dir='/my own'"], {}, "/my own"),  # Hydra takes the last one, and takes the quotes away
    ],
)
def test_the_folder_of_a_run_is_decided_once(arguments, given, folder):
    chosen = choose(given, 0, arguments).environment["OUTPUT_DIR"]
    assert re.fullmatch(folder if folder.startswith("/") else f"{choices.ROOT}/{folder}", chosen)
    assert str(output_folder(arguments, {"OUTPUT_DIR": chosen}, "bapo")) == chosen  # in the parent


@pytest.mark.parametrize("given", [{"experiment": "paper_7b"}, {"VERL_PLATFORM": "nvidia"}])
def test_a_run_for_gpus_is_checked_where_there_are_none(files, given):
    with pytest.raises(ValueError, match="no GPU is visible here: to check a run of another node, add trainer.n_gpus_"):
        choose({**files, **given}, 0, only_checks=True)
    choice = choose({**files, **given, TRAIN: "8"}, 0, only_checks=True)
    assert {"size=gpu", "trainer.nnodes=1", f"{TRAIN}=8"} <= set(choice.arguments)
    assert not any(argument.startswith("platform=") for argument in choice.arguments)  # with flash-attn
    assert "CUDA_VISIBLE_DEVICES" not in choice.environment and choice.environment.get("VERL_PLATFORM") is None
    with pytest.raises(ValueError, match="is for GPUs and size=cpu.* and --preflight|no GPU is visible here: leave it"):
        choose({**files, **given, TRAIN: "8"}, 0)  # it does not train
    on_cpu = choose({**files, TRAIN: "2"}, 0, only_checks=True)  # two logical slots
    assert on_cpu.environment["VERL_PLATFORM"] == "cpu"


def test_on_a_cpu_ray_hears_of_no_gpus_and_of_this_machine_alone():
    chosen = choose({"CUDA_VISIBLE_DEVICES": "0"}, 0).environment
    assert chosen["VERL_PLATFORM"] == "cpu" and chosen["CUDA_VISIBLE_DEVICES"] is None
    assert chosen["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert chosen["MODEL_PATH"] == str(choices.EXAMPLE / "model")


def test_on_gpus_the_platform_is_left_to_verl_and_a_cluster_may_listen(files):
    chosen = choose({**files, "VERL_PLATFORM": "nvidia", "NNODES": "2"}, 8).environment
    assert chosen["VERL_PLATFORM"] is None and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in chosen
    joined = choose({**files, "RAY_ADDRESS": "10.0.0.1:6379"}, 8).environment
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in joined and joined["MODEL_PATH"] == files["MODEL_PATH"]


def test_without_flash_attn_torchs_own_is_chosen(files):
    assert "platform=gpu_varlen" in choose(files, 1).arguments
    assert "platform=gpu_varlen" not in choose(files, 1, ["platform=gpu_without_flash_attn"]).arguments
    with_flash_attn = choose(files, 1, flash_attn=lambda: True).arguments
    assert not any(argument.startswith("platform=") for argument in with_flash_attn)


def test_threads_of_the_language_model_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.setattr(choices.os, "sched_getaffinity", lambda process: set(range(6)))
    chosen = choose({"experiment": "language_model", TRAIN: "2"}, 0).arguments
    assert "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3'" in chosen
    assert not any("OMP_NUM_THREADS" in argument for argument in choose({}, 0).arguments)


def test_flashinfers_sampler_is_off_on_gpus_unless_it_is_set(files):
    sampler = "VLLM_USE_FLASHINFER_SAMPLER"
    assert choose(files, 1).environment[sampler] == "0"
    assert choose({**files, sampler: "1"}, 1).environment[sampler] == "1"
    assert sampler not in choose({}, 0).environment


def test_an_evaluation_is_laid_on_its_experiment(files):
    """It is an evaluation: no language model is trained where no input is given, and TEST_FILE alone is enough."""
    for name in ("evaluate", "[paper_7b,evaluate]", "[paper_7b, evaluate]"):
        choice = choose({"experiment": name, **files, "TRAIN_FILE": ""}, 8)
        assert choice.arguments.count(f"experiment={name}") == 1 and not choice.language_model
        assert choice.environment["TRAIN_FILE"] == files["TEST_FILE"]


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/tokenizer.json", "train.parquet"])
def test_a_changed_file_of_the_example_is_refused(monkeypatch, tmp_path, files, name):
    folder = shutil.copytree(choices.EXAMPLE, tmp_path / "recipe/bapo/example/files")
    monkeypatch.setattr(choices, "EXAMPLE", folder)
    choose({}, 0)  # the copy is right
    right = (folder / name).read_bytes()
    (folder / name).write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{name} is not as it was published: git restore"):
        choose({}, 0)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is not as it was published"):
        choose({}, 0)
    choose(files, 0)  # no file of the example is used


@pytest.mark.parametrize("argument", ["run_dir=", "run_dir=null"])
def test_a_folder_without_a_name_is_refused(argument):
    with pytest.raises(ValueError, match=r"run_dir \(OUTPUT_DIR\)=(null)?: name a folder"):
        choose({}, 0, [argument])


def test_gpus_outside_cuda_visible_devices_are_not_counted(monkeypatch):
    monkeypatch.setattr(start.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="GPU 0: H100\n" * 8))
    counts = {None: 8, "": 0, "2,GPU-5a": 2, "-1": 0}
    for visible, count in counts.items():
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert start.visible_gpus(environment) == count


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Return a function: what ``main`` ends as. Python and the making of the language model are stand-ins."""

    def execv(program, command):
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(start.os, "execv", execv)
    monkeypatch.setattr(start.os, "chdir", lambda folder: None)
    monkeypatch.setattr(start, "visible_gpus", lambda environment: 1)
    monkeypatch.setattr(start, "has_flash_attn", lambda: False)
    made = {"made": None}

    def obtain(stage):
        stages.append(stage)
        if stage == "make":
            made["made"] = tmp_path / "made"
        return tmp_path / "converted" if stage == "convert" else made["made"]

    monkeypatch.setattr(language_model, "obtain", obtain)
    commands, stages = [], []

    def main(*arguments, checked=0, said=""):
        commands.clear(), stages.clear()
        main.commands = commands
        monkeypatch.setattr(start.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=checked, stdout=said))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start.os, "environ", {"OUTPUT_DIR": str(tmp_path / "run"), "HOME": str(tmp_path)})
            with suppress(SystemExit):
                start.main(list(arguments))
            return [command[2] for command in commands], stages.copy(), start.os.environ.get("MODEL_PATH")

    return main


def test_the_language_model_is_checked_before_its_warm_up_and_made_once(ended, tmp_path, capsys):
    wrong = "failed   batches          some.key=7: set it to 8."
    assert ended(checked=1, said=wrong)[:2] == ([], ["find", "convert"])
    assert capsys.readouterr().err == f"{wrong}\n"
    converted = (["recipe.bapo.preflight"], ["find", "convert"], f"{tmp_path}/converted/model")
    assert ended("--preflight") == converted
    unchecked = ended("preflight=false", checked=1)
    assert unchecked == (["recipe.bapo.run"], ["find", "convert", "make"], f"{tmp_path}/made/model")
    assert ended() == (["recipe.bapo.run"], ["find"], f"{tmp_path}/made/model")


def test_the_folder_on_the_command_line_is_handed_on_as_output_dir(ended, tmp_path):
    ended("run_dir=mine", "trainer.total_training_steps=2")
    (command,) = ended.commands
    assert command[-1] == "trainer.total_training_steps=2" and not any("run_dir" in word for word in command)


def test_a_user_without_a_name_a_read_only_home_and_wsl2_are_provided_for(monkeypatch, tmp_path):
    home, users = {"HOME": str(tmp_path)}, {1000: "a user"}
    monkeypatch.setattr(start.os, "uname", lambda: SimpleNamespace(release="6.1.0-amd64"))
    monkeypatch.setattr(start.os, "getuid", lambda: 1000)
    monkeypatch.setattr(start.pwd, "getpwuid", users.__getitem__)
    assert start.system_variables(home) == {}
    with pytest.raises(ValueError, match="HOME=/no/home cannot be written, .*: set HOME to a folder"):
        start.system_variables({"HOME": "/no/home"})
    monkeypatch.setattr(start.os, "getuid", lambda: 4_000_000)
    assert (
        start.system_variables(home) == {"USER": "uid4000000"} and start.system_variables({**home, "USER": "me"}) == {}
    )
    wsl = SimpleNamespace(release="5.15.167.4-microsoft-standard-WSL2")
    monkeypatch.setattr(start.os, "uname", lambda: wsl)
    assert start.system_variables({**home, "USER": "me"}) == {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}
    assert start.system_variables({**home, "USER": "me", "VLLM_WSL2_ENABLE_PIN_MEMORY": "0"}) == {
        "VLLM_WSL2_ENABLE_PIN_MEMORY": "0"
    }


def test_help_is_the_head_of_the_run_script():
    command = ["bash", "recipe/bapo/run_bapo_example.sh", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert not run.stderr  # it sets nothing up
    assert run.stdout.startswith("Train with BAPO.") and "BAPO_VENV" in run.stdout.splitlines()[-1]
