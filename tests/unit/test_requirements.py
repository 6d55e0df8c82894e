# SPDX-License-Identifier: Apache-2.0
"""The locked lists, and how scripts/setup.sh installs them. Python, uv and a GPU machine's tools are stand-ins."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
    *get_paths*) echo "${INCLUDE:-$STAND_INS}" ;;
    *cp%d%d*) echo cp312 ;;
    *" pip wheel "*)
        echo "build archs=$FLASH_ATTN_CUDA_ARCHS jobs=$MAX_JOBS force=$FLASH_ATTENTION_FORCE_BUILD" \
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
    *compute_cap*) printf "%s\\n" $CAPABILITIES ;;
    *) echo "| NVIDIA-SMI $DRIVER   Driver Version: $DRIVER   CUDA Version: ${CUDA_VERSION:-12.4} |" ;;
esac""",
    "nvcc": """echo "Cuda compilation tools, release ${NVCC:-13.0}, V${NVCC:-13.0}.88" """,
    "getconf": """echo "${GLIBC:-glibc 2.31}" """,
    "flock": """exit "${FLOCK:-0}" """,
}


@pytest.fixture
def set_up(tmp_path):
    """Run scripts/setup.sh in a copy without installing anything. Returns its output and the commands that it ran."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/gpus.sh", "scripts/flash_attn.sh", "pyproject.toml", *LOCKS.values()):
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
        done = subprocess.run(
            ["bash", "scripts/setup.sh"],
            cwd=tmp_path,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout
        # Without the commands that ask for the version of Python, for its name, and for its headers.
        questions = ("ensurepip", "get_paths", "cp%d%d")
        return done.stdout, [call for call in calls.read_text().splitlines() if not any(q in call for q in questions)]

    return run


GPUS = {"DRIVER": "580.65.06", "CUDA_VERSION": "13.0", "CAPABILITIES": "9.0 9.0"}
WHEEL = {"BAPO_FLASH_ATTN_WHEEL": "/wheels/flash_attn.whl"}


def test_the_cpu_set_up_and_none_where_it_is_up_to_date(set_up, tmp_path):
    _, calls = set_up()
    venv, uv, lock, torch, package = calls
    assert venv == "python -m venv .venv"
    assert f"uv=={locked('cpu')['uv']}" in uv and "--no-deps -r" in lock and "--no-deps -e ." in package
    assert torch.endswith(f"torch=={locked('cpu')['torch']}")
    assert set_up() == ("", [])
    (tmp_path / "requirements.txt").open("a").write("one-more==1.0\n")
    assert set_up()[1] == calls  # the list has changed, so it starts from scratch
    (tmp_path / "pyproject.toml").open("a").write("\n")
    torch += " --index-url https://cpu.example"
    assert set_up(BAPO_TORCH_INDEX="https://cpu.example")[1] == [uv, lock, torch, package]


def test_a_driver_that_is_too_old_ends_it_before_anything_is_made(set_up, tmp_path):
    output, calls = set_up(code=1, DRIVER="550.54.15")
    assert "driver here is 550.54.15" in output and "CUDA 13.0" in output and "580 or newer" in output
    assert calls == [] and not list(tmp_path.glob(".venv*"))
    set_up(DRIVER="550.54.15", CUDA_VERSION="13.0")  # a compatibility package replaces the driver's libraries


@pytest.mark.parametrize(
    "capabilities, given, archs",
    [("10.3 8.6 8.0 7.5", None, "80;100"), ("9.0", "80", "80")],
)
def test_flash_attn_is_built_for_the_gpus_that_are_here_and_kept(set_up, tmp_path, capabilities, given, archs):
    given = {"FLASH_ATTN_CUDA_ARCHS": given} if given else {}
    output, calls = set_up(**GPUS | {"CAPABILITIES": capabilities}, **given)
    (build,) = [call for call in calls if "flash-attn==" in call]
    assert "--no-build-isolation" in build
    (seen,) = [call for call in calls if call.startswith("build ")]
    assert re.fullmatch(rf"build archs={archs} jobs=[1-9]\d* force=TRUE home= flags=", seen)
    assert "WARNING" not in output and re.search(r"about [1-9]\d* minutes", output)
    folder = f"{tmp_path}/.venv-wheels/torch=={locked('cuda')['torch']}-cp312-sm_{archs.replace(';', '_')}"
    wheel = f"{folder}/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"
    assert f"BAPO_FLASH_ATTN_WHEEL={wheel}\n" in output and any(f"--no-deps {wheel}" in call for call in calls)
    # The wheel is kept, so a new environment needs no other build.
    shutil.rmtree(tmp_path / ".venv-cuda")
    output, calls = set_up(**GPUS | {"CAPABILITIES": capabilities, "BUILD_FAILS": "1"}, **given)
    assert "WARNING" not in output and any(f"--no-deps {wheel}" in call for call in calls)


def test_without_an_nvcc_of_cuda_13_that_of_the_list_builds_flash_attn(set_up, tmp_path):
    output, calls = set_up(**GPUS, NVCC="12.8", TOOLKIT="1", NVCC_APPEND_FLAGS="-lineinfo")
    assert "WARNING" not in output
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
        ({"IMPORT_FAILS": "1"}, ""),
        ({"CAPABILITIES": "7.5"}, "no kernels for GPUs"),
    ],
)
def test_without_flash_attn_it_says_why_and_what_follows(set_up, tmp_path, variables, reason):
    output, calls = set_up(**GPUS | variables)
    assert reason in output and "WARNING: flash-attn could not be installed" in output
    assert "platform=gpu_without_flash_attn" in output and "rm .venv-cuda/complete" in output
    # A package that cannot be imported is removed, because transformers and verl would use it.
    assert any("uninstall" in call and " flash-attn" in call for call in calls) == ("IMPORT_FAILS" in variables)
    assert set_up(**GPUS)[0] == ""  # so that not every start builds for an hour
    assert not list(tmp_path.glob(".venv-wheels/*/*"))  # a wheel that cannot be imported is not kept
    (tmp_path / ".venv-cuda" / "complete").unlink()
    assert "WARNING" not in set_up(**GPUS)[0]


def test_a_ready_wheel_of_flash_attn_needs_no_compiler(set_up):
    output, calls = set_up(**GPUS, NVCC="12.8", CXX="no-such-c++", **WHEEL)
    assert any(call.endswith(" --no-deps /wheels/flash_attn.whl") for call in calls) and "WARNING" not in output


@pytest.mark.parametrize("glibc", ["glibc 2.28", "musl"])
def test_a_c_library_for_which_there_are_no_wheels_ends_it_before_anything_is_made(set_up, tmp_path, glibc):
    output, calls = set_up(code=1, GLIBC=glibc)
    here = glibc.removeprefix("glibc ") if "glibc" in glibc else "another C library"
    assert f"Error: glibc here is {here}, and glibc 2.31 or newer is needed" in output
    assert calls == [] and not list(tmp_path.glob(".venv*"))
    set_up(GLIBC="glibc 2.31")


@pytest.mark.parametrize(
    "variables, said",
    [({"CC": "no-such-cc"}, "no C compiler (no-such-cc)"), ({"INCLUDE": "/none"}, "/none/Python.h does")],
)
def test_what_triton_compiles_with_is_looked_for_before_anything_is_made(set_up, tmp_path, variables, said):
    output, calls = set_up(code=1, **GPUS | variables)
    assert said in output and calls == [] and not (tmp_path / ".venv-cuda").exists()
    set_up(**variables)  # without a GPU no compiler is needed


def test_it_goes_on_where_files_cannot_be_locked(set_up):
    output, calls = set_up(FLOCK="71")
    assert "cannot be locked in this folder" in output and len(calls) == 5
