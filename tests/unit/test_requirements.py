# SPDX-License-Identifier: Apache-2.0
"""The locked lists, and how scripts/setup.sh installs them. Python, uv and a GPU machine's tools are stand-ins."""

import os
import re
import shutil
import subprocess

import pytest
from support.commands import LIMIT, ROOT

SOURCES = ROOT / "scripts" / "requirements"
LOCKS = {"cpu": "requirements.txt", "cuda": "requirements-cuda.txt"}


def lines(path):
    return [line for raw in path.read_text().splitlines() if (line := raw.split("#")[0].strip())]


def locked(kind):
    return dict(line.split("==") for line in lines(ROOT / LOCKS[kind]))


@pytest.mark.parametrize("kind", LOCKS)
def test_a_list_pins_every_package_once_for_every_python_and_has_what_was_asked_for(kind):
    pinned = lines(ROOT / LOCKS[kind])
    for line in pinned:  # without markers, because both Pythons use one list
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.!]*", line), line
    assert len(locked(kind)) == len(pinned) > 200
    asked_for = [line for name in (kind, "common") for line in lines(SOURCES / f"{name}.in") if "==" in line]
    assert {re.sub(r"\[.*\]", "", line).lower() for line in asked_for} <= set(pinned)


def test_the_cpu_list_has_nothing_of_cuda():
    unwanted = {name for name in locked("cpu") if name.startswith(("nvidia", "cuda", "cupy", "triton", "flash"))}
    assert not unwanted | (locked("cpu").keys() & set(lines(SOURCES / "cpu-excludes.txt")))


STAND_INS = {
    "python": r"""echo "python $*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$STAND_INS/python" "$STAND_INS/uv" "$3/bin" ;;
    *"import venv"*) exit "${NO_VENV:-0}" ;;
    *get_paths*) echo "${INCLUDE:-$STAND_INS}" ;;
    *version_info*) case "$*" in *%d.%d*) echo 3.12 ;; esac ;;
esac""",
    "uv": """echo "uv $*" >>"$CALLS" """,
    "nvidia-smi": """case "$*" in
    -L) [ -z "${DRIVER:-}" ] || echo "GPU 0: NVIDIA H100" ;;
    *driver_version*) echo "$DRIVER" ;;
    *index,compute_cap*) number=0
        for capability in $CAPABILITIES; do echo "$number, $capability, a GPU"; number=$((number + 1)); done ;;
    *) echo "| NVIDIA-SMI $DRIVER   Driver Version: $DRIVER   CUDA Version: ${CUDA_VERSION:-12.4} |" ;;
esac""",
    "gcc": "exit 1",  # it is only looked for
    "getconf": """echo "${GLIBC:-glibc 2.31}" """,
    "flock": """exit "${FLOCK:-0}" """,
    "df": """echo Avail; echo "${SHARED_MEMORY:-4096}" """,
}


@pytest.fixture
def set_up(tmp_path):
    """Run a script in a copy without installing anything. Returns its output and the commands that it ran."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/gpus.sh", "pyproject.toml", *LOCKS.values()):
        shutil.copy(ROOT / name, tmp_path / name)
    stand_ins = tmp_path / "stand-ins"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text("#!/bin/sh\n" + text + "\n")
        (stand_ins / name).chmod(0o755)
    (stand_ins / "Python.h").touch()

    def run(code=0, **variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            "PATH": f"{stand_ins}:{os.environ['PATH']}",
            "BAPO_PYTHON": str(stand_ins / "python"),
            "STAND_INS": str(stand_ins),
            "CALLS": str(calls),
            "BAPO_DEVICE_ROOT": str(tmp_path),
        }
        command, options = ["bash", "scripts/setup.sh"], {"capture_output": True, "text": True, "timeout": LIMIT}
        done = subprocess.run(command, cwd=tmp_path, env=environment | variables, **options)
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        # Without the commands that ask for the version of Python, for venv, and for its headers.
        questions = ("ensurepip", "get_paths", "version_info")
        return output, [call for call in calls.read_text().splitlines() if not any(q in call for q in questions)]

    return run


GPUS = {"DRIVER": "580.65.06", "CUDA_VERSION": "13.0", "CAPABILITIES": "9.0 9.0"}


def test_the_cpu_set_up_and_none_where_it_is_up_to_date(set_up, tmp_path):
    _, calls = set_up()
    venv, uv, lock, torch, package = calls
    assert venv == "python -m venv .venv"
    assert f"uv=={locked('cpu')['uv']}" in uv and "--no-deps -r" in lock and package.endswith(" -e .")
    assert torch.endswith(f"torch=={locked('cpu')['torch']}")
    assert set_up() == ("", [])
    (tmp_path / "requirements.txt").open("a").write("one-more==1.0\n")
    assert set_up()[1] == calls  # the list has changed, so it starts from scratch
    (tmp_path / "pyproject.toml").open("a").write("\n")
    torch += " --index-url https://cpu.example"
    assert set_up(BAPO_TORCH_INDEX="https://cpu.example")[1] == [uv, lock, torch, package]
    as_somebody = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for command in (["init", "-q"], [*as_somebody, "commit", "-q", "--allow-empty", "-m", "a new commit"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert set_up()[1] == [package] and set_up() == ("", [])  # its commit is in the version


PACKAGES = {"CC": "no-such-cc", "INCLUDE": "/none", "NO_VENV": "1"}


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"GLIBC": "glibc 2.28"}, ["glibc here is 2.28, and glibc 2.31 or newer is needed"]),
        ({"DRIVER": "550.54.15"}, ["driver here is 550.54.15", "CUDA 13.0", "580 or newer"]),
        (GPUS | PACKAGES, ["apt-get install -y python3.12-venv gcc python3.12-dev ", "no-such-cc", "/none/Python.h"]),
        (GPUS | PACKAGES | {"SHARED_MEMORY": "64"}, ["venv for ", "1 GB in /dev/shm, which has 64 MB"]),
        (GPUS | {"SHARED_MEMORY": "64"}, ["1 GB in /dev/shm, which has 64 MB"]),
        (GPUS | {"CAPABILITIES": "7.5"}, ["a compute capability below 8.0 (0, 7.5, a GPU)"]),
        (GPUS | {"CAPABILITIES": "6.1 8.9 12.0"}, ["(0, 6.1, a GPU)", " CUDA_VISIBLE_DEVICES=1,2"]),
    ],
)
def test_what_the_machine_lacks_is_said_before_anything_is_made(set_up, tmp_path, variables, said):
    output, calls = set_up(code=1, **variables)
    assert calls == [] and not list(tmp_path.glob(".venv*")) and all(part in output for part in said), output


@pytest.mark.parametrize(
    "variables, venv",
    [
        ({"CC": "no-such-cc", "INCLUDE": "/none", "SHARED_MEMORY": "64"}, ".venv"),  # a GPU needs these
        (GPUS | {"CAPABILITIES": "6.1", "VERL_PLATFORM": "cpu"}, ".venv"),
        (GPUS | {"CUDA_VISIBLE_DEVICES": ""}, ".venv"),
        (GPUS | {"CUDA_VISIBLE_DEVICES": "-1"}, ".venv"),
        (GPUS | {"DRIVER": "550.54.15"}, ".venv-cuda"),  # a compatibility package replaces the driver's libraries
        (GPUS | {"CAPABILITIES": "6.1 8.9", "CUDA_VISIBLE_DEVICES": "1"}, ".venv-cuda"),
        (GPUS | {"CAPABILITIES": "[N/A]"}, ".venv-cuda"),  # as some new machines answer
    ],
)
def test_the_environment_fits_the_gpus(set_up, variables, venv):
    output, calls = set_up(**variables)
    assert f"Setting up {venv} (" in output and len(calls) == 5


def test_it_goes_on_where_files_cannot_be_locked(set_up):
    output, calls = set_up(FLOCK="71")
    assert "cannot be locked in this folder" in output and len(calls) == 5
