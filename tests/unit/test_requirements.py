# SPDX-License-Identifier: Apache-2.0
"""The locked lists, and how scripts/setup.sh installs them. Python, uv and a GPU machine's tools are stand-ins."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.commands import LIMIT

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "scripts" / "requirements"
LOCKS = {"cpu": "requirements.txt", "cuda": "requirements-cuda.txt"}


def lines(path):
    return [line for raw in path.read_text().splitlines() if (line := raw.split("#")[0].strip())]


def locked(kind):
    return dict(line.split("==") for line in lines(ROOT / LOCKS[kind]))


@pytest.mark.parametrize("kind", LOCKS)
def test_a_list_pins_every_package_once_for_every_python_and_has_what_was_asked_for(kind):
    pinned = lines(ROOT / LOCKS[kind])
    for line in pinned:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.!]*", line), (
            line
        )  # without markers, because both Pythons use one list
    assert len(locked(kind)) == len(pinned) > 200
    asked_for = [line for name in (kind, "common") for line in lines(SOURCES / f"{name}.in") if "==" in line]
    assert {re.sub(r"\[.*\]", "", line).lower() for line in asked_for} <= set(pinned)


def test_the_cpu_list_has_nothing_of_cuda():
    unwanted = {name for name in locked("cpu") if name.startswith(("nvidia", "cuda", "cupy", "triton", "flash"))}
    assert not unwanted | (locked("cpu").keys() & set(lines(SOURCES / "cpu-excludes.txt")))


STAND_INS = {
    "python": r"""echo "python $*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$STAND_INS/python" "$STAND_INS/uv" "$3/bin"
        [ -z "${TOOLKIT:-}" ] || (cd "$3"; sh "$STAND_INS/nvcc_of_the_list") ;;
    *"import venv"*) exit "${NO_VENV:-0}" ;;
    *get_paths*) echo "${INCLUDE:-$STAND_INS}" ;;
    *version_info*) case "$*" in *cp%d%d*) echo torch-2-cp312 ;; *%d.%d*) echo 3.12 ;; esac ;;
    *" download "*)
        folder=$(echo "$*" | sed 's/.*--dest \([^ ]*\) .*/\1/')
        mkdir -p "$folder/made/flash_attn-2.8.3"
        touch "$folder/made/flash_attn-2.8.3/setup.py"
        tar -czf "$folder/flash_attn-2.8.3.tar.gz" -C "$folder/made" flash_attn-2.8.3
        rm -r "$folder/made" ;;
    *" wheel "*)
        echo "build archs=$FLASH_ATTN_CUDA_ARCHS force=$FLASH_ATTENTION_FORCE_BUILD" \
            "home=${CUDA_HOME:-} flags=${NVCC_APPEND_FLAGS:-}" >>"$CALLS"
        [ -z "${BUILD_FAILS:-}" ] || { echo "the compiler's own words"; exit 1; }
        folder=$(echo "$*" | sed 's/.*--wheel-dir \([^ ]*\) .*/\1/')
        mkdir -p "$folder"
        touch "$folder/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl" ;;
    *flash_attn_2_cuda*) exit "${IMPORT_FAILS:-0}" ;;
esac""",
    "uv": """echo "uv $*" >>"$CALLS" """,
    "nvcc_of_the_list": """cu=lib/python3.12/site-packages/nvidia/cu13
mkdir -p $cu/bin $cu/include $cu/nvvm $cu/lib
cp "$STAND_INS/nvcc" $cu/bin
touch $cu/lib/libcudart.so.13""",
    "nvidia-smi": """case "$*" in
    -L) [ -z "${DRIVER:-}" ] || echo "GPU 0: NVIDIA H100" ;;
    *driver_version*) echo "$DRIVER" ;;
    *index,compute_cap*) number=0
        for capability in $CAPABILITIES; do echo "$number, $capability, a GPU"; number=$((number + 1)); done ;;
    *compute_cap*) printf "%s\\n" $CAPABILITIES ;;
    *) echo "| NVIDIA-SMI $DRIVER   Driver Version: $DRIVER   CUDA Version: ${CUDA_VERSION:-12.4} |" ;;
esac""",
    "gcc": "exit 1",  # it is only looked for
    "g++": "exit 1",
    "nvcc": """echo "Cuda compilation tools, release ${NVCC:-13.0}, V${NVCC:-13.0}.88" """,
    "getconf": """echo "${GLIBC:-glibc 2.31}" """,
    "flock": """exit "${FLOCK:-0}" """,
    "df": """echo Avail; echo "${SHARED_MEMORY:-4096}" """,
}


@pytest.fixture
def set_up(tmp_path):
    """Run a script in a copy without installing anything. Returns its output and the commands that it ran."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/gpus.sh", "scripts/flash_attn.sh", "pyproject.toml", *LOCKS.values()):
        shutil.copy(ROOT / name, tmp_path / name)
    stand_ins = tmp_path / "stand-ins"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text("#!/bin/sh\n" + text + "\n")
        (stand_ins / name).chmod(0o755)
    (stand_ins / "Python.h").touch()

    def run(*command, code=0, **variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            "PATH": f"{stand_ins}:{os.environ['PATH']}",
            "BAPO_PYTHON": str(stand_ins / "python"),
            "STAND_INS": str(stand_ins),
            "CALLS": str(calls),
            "BAPO_DEVICE_ROOT": str(tmp_path),
        }
        done = subprocess.run(
            ["bash", *(command or ("scripts/setup.sh",))],
            cwd=tmp_path,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == code, done.stdout
        # Without the commands that ask for the version of Python, for venv, and for its headers.
        questions = ("ensurepip", "get_paths", "version_info")
        return done.stdout, [call for call in calls.read_text().splitlines() if not any(q in call for q in questions)]

    return run


GPUS = {"DRIVER": "580.65.06", "CUDA_VERSION": "13.0", "CAPABILITIES": "9.0 9.0"}
WHEEL = {"BAPO_FLASH_ATTN_WHEEL": "/wheels/flash_attn.whl"}


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


def test_a_driver_that_is_too_old_ends_it_before_anything_is_made(set_up, tmp_path):
    output, calls = set_up(code=1, DRIVER="550.54.15")
    assert "driver here is 550.54.15" in output and "CUDA 13.0" in output and "580 or newer" in output
    assert calls == [] and not list(tmp_path.glob(".venv*"))
    set_up(DRIVER="550.54.15", CUDA_VERSION="13.0")  # a compatibility package replaces the driver's libraries


FLASH_ATTN = "scripts/flash_attn.sh"
BUILT = "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"


def test_the_set_up_builds_no_flash_attn_but_installs_a_ready_wheel(set_up, tmp_path):
    output, calls = set_up(**GPUS)
    assert "To build it, perhaps for two hours: bash scripts/flash_attn.sh" in output
    assert not any("flash" in call for call in calls)
    output, calls = set_up(FLASH_ATTN, **GPUS, NVCC="12.8", CXX="no-such-c++", **WHEEL)
    assert any(call.endswith(" --no-deps /wheels/flash_attn.whl") for call in calls)
    shutil.rmtree(tmp_path / ".venv-cuda")
    assert any(call.endswith(" --no-deps /wheels/flash_attn.whl") for call in set_up(**GPUS, **WHEEL)[1])


@pytest.mark.parametrize(
    "capabilities, given, archs",
    [("10.3 8.6 8.0", None, "80;100"), ("9.0", "80", "80")],
)
def test_flash_attn_is_built_for_the_gpus_that_are_here_and_kept(set_up, tmp_path, capabilities, given, archs):
    gpus = GPUS | {"CAPABILITIES": capabilities} | ({"FLASH_ATTN_CUDA_ARCHS": given} if given else {})
    output, calls = set_up(FLASH_ATTN, **gpus)
    (seen,) = [call for call in calls if call.startswith("build ")]
    assert re.fullmatch(rf"build archs={archs} force=TRUE home= flags=", seen)
    wheel = f"{tmp_path}/.venv-wheels/torch-2-cp312-sm_{archs.replace(';', '_')}/{BUILT}"
    assert f"BAPO_FLASH_ATTN_WHEEL={wheel}\n" in output and any(f"--no-deps {wheel}" in call for call in calls)
    # The wheel is kept, so a new environment needs no other build.
    shutil.rmtree(tmp_path / ".venv-cuda")
    assert any(f"--no-deps {wheel}" in call for call in set_up(**gpus, BUILD_FAILS="1")[1])


def test_without_an_nvcc_of_cuda_13_that_of_the_list_builds_flash_attn(set_up, tmp_path):
    _, calls = set_up(FLASH_ATTN, **GPUS, NVCC="12.8", TOOLKIT="1", NVCC_APPEND_FLAGS="-lineinfo")
    home, flags = f"{tmp_path}/.venv-cuda/cuda", "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK -lineinfo"
    assert [call for call in calls if call.endswith(f" force=TRUE home={home} flags={flags}")]
    for name in ("bin/nvcc", "include", "nvvm", "lib64/libcudart.so.13", "lib64/libcudart.so"):
        assert Path(home, name).exists(), name  # the link is not broken


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"BUILD_FAILS": "1"}, "the compiler's own words"),
        ({"NVCC": "12.8"}, "the build needs nvcc of CUDA 13, for which torch is built; here: "),
        ({"CXX": "no-such-c++"}, "no C++ compiler (no-such-c++)"),
        ({"IMPORT_FAILS": "1"}, "is for another torch, Python or GPU"),
        ({"CAPABILITIES": "11.0"}, "has no kernels for this machine's GPUs"),
    ],
)
def test_a_build_that_fails_says_why_and_is_tried_again(set_up, variables, reason):
    output, calls = set_up(FLASH_ATTN, code=1, **GPUS | variables)
    assert reason in output
    # A package that cannot be imported is removed, because transformers and verl would use it.
    assert any("uninstall" in call for call in calls) == ("IMPORT_FAILS" in variables)
    assert set_up(**GPUS)[0] == ""  # the set-up was complete without it


def test_an_interrupted_build_goes_on_with_what_it_has_compiled(set_up, tmp_path):
    set_up(FLASH_ATTN, code=1, **GPUS, BUILD_FAILS="1")
    (source,) = tmp_path.glob(".venv-wheels/*/flash_attn-2.8.3")
    (source / "compiled.o").touch()
    _, calls = set_up(FLASH_ATTN, **GPUS)
    assert not any(" download " in call for call in calls)
    assert any(call.endswith(f" {source}") for call in calls) and not source.exists()


@pytest.mark.parametrize("glibc", ["glibc 2.28", "musl"])
def test_a_c_library_for_which_there_are_no_wheels_ends_it_before_anything_is_made(set_up, tmp_path, glibc):
    output, calls = set_up(code=1, GLIBC=glibc)
    here = glibc.removeprefix("glibc ") if "glibc" in glibc else "another C library"
    assert f"Error: glibc here is {here}, and glibc 2.31 or newer is needed" in output
    assert calls == [] and not list(tmp_path.glob(".venv*"))
    set_up(GLIBC="glibc 2.31")


def test_what_the_machine_lacks_is_said_at_once_before_anything_is_made(set_up, tmp_path):
    lacks = {"CC": "no-such-cc", "INCLUDE": "/none", "NO_VENV": "1", "SHARED_MEMORY": "64"}
    output, calls = set_up(code=1, **GPUS | lacks)
    assert calls == [] and not list(tmp_path.glob(".venv*"))
    assert re.fullmatch(
        r"Error: this machine lacks venv for \S+; a C compiler \(no-such-cc\); /none/Python.h; 1 GB in /dev/shm, which "
        r"has 64 MB \(docker run --shm-size=16g\)\. Install with: apt-get install -y python3.12-venv gcc "
        r"python3.12-dev \(or what your system calls them\)\. Nothing was installed\.\n",
        output,
    ), output
    assert "1 GB in /dev/shm" in set_up(code=1, **GPUS, SHARED_MEMORY="64")[0]
    set_up(CC="no-such-cc", INCLUDE="/none", SHARED_MEMORY="64")  # without a GPU these are not needed


@pytest.mark.parametrize(
    "capabilities, variables, said",
    [
        ("7.5", {}, "a compute capability below 8.0 (0, 7.5, a GPU), for which vLLM has no bfloat16"),
        ("7.5 7.0", {"CUDA_VISIBLE_DEVICES": "0"}, "below 8.0 (0, 7.5, a GPU;1, 7.0, a GPU)"),
        (
            "6.1 8.9 12.0",
            {},
            "(0, 6.1, a GPU). Use the others: export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2",
        ),
        ("6.1 8.9", {"CUDA_VISIBLE_DEVICES": "1"}, None),
        ("9.0 9.0", {}, None),
        ("[N/A]", {}, None),  # as some new machines answer
        ("6.1", {"VERL_PLATFORM": "cpu"}, None),
    ],
)
def test_gpus_that_are_too_old_are_refused_before_anything_is_made(set_up, capabilities, variables, said):
    output, calls = set_up(code=int(said is not None), **GPUS | {"CAPABILITIES": capabilities}, **variables)
    assert (said or "Setting up .venv") in output and bool(calls) == (said is None)


def test_it_goes_on_where_files_cannot_be_locked(set_up):
    output, calls = set_up(FLOCK="71")
    assert "cannot be locked in this folder" in output and len(calls) == 5
