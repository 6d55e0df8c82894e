#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up the environment in the repository's root: .venv for the CPU stack (without a GPU, or with VERL_PLATFORM=cpu),
# otherwise .venv-cuda. The packages are those of the locked requirements.txt or requirements-cuda.txt, which scripts/lock.sh
# writes. If the environment is up to date, nothing is done. It is safe to interrupt this, and to start it twice. If the
# list has changed, the old environment is removed, so make sure that no run uses it.
#   BAPO_PYTHON            the Python to use, 3.11 or 3.12 (default: the first found)
#   BAPO_TORCH_INDEX       a package index for torch, such as the one of the CPU builds (default: pip's configuration. If that
#                          has only the CUDA build, it is installed: it works on a CPU too, but takes several GB)
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "Error: $*" >&2; exit 1; }
find_python() {  # set python to the first with venv, or else to the first of a usable version
    local candidates=(python3.12 python3.11 python3) modules
    [ -z "${BAPO_PYTHON:-}" ] || candidates=("$BAPO_PYTHON")
    for modules in 'venv, ensurepip' sys; do
        for python in "${candidates[@]}"; do
            ! "$python" -c "import sys, $modules; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))" 2>/dev/null || return 0
        done
    done
    fail "no usable Python: install Python 3.11 or 3.12, or set BAPO_PYTHON. Nothing was installed."
}

cuda=
source scripts/gpus.sh
choose_device
[ $device = cpu ] || cuda=1
venv=.venv
requirements=requirements.txt
[ -z "$cuda" ] || { venv=.venv-cuda; requirements=requirements-cuda.txt; }
log=$venv/setup.log
wanted=$(cat $requirements pyproject.toml scripts/setup.sh | sha256sum)
commit=$(git rev-parse HEAD 2>/dev/null || true)  # part of this package's version, which is written as it is installed
pin() { grep "^$1==" $requirements; }
has_packages() { [ "$(head -n 1 $venv/complete 2>/dev/null)" = "$wanted" ]; }
is_complete() { has_packages && [ "$(tail -n +2 $venv/complete)" = "$commit" ]; }
if is_complete; then exit 0; fi

check_glibc() {  # vLLM needs llguidance, whose wheels require this version or a newer one
    local needed=2.31 here
    here=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p' || true)
    [ "$(printf '%s\n' "$needed" "${here:-0}" | sort -V | head -n 1)" = $needed ] || fail \
        "glibc here is ${here:-another C library}, and glibc $needed or newer is needed (Debian 11, Ubuntu 20.04, RHEL 9 or" \
        "newer): use a container with a newer system. Nothing was installed."
}
check_glibc
check_driver() {  # an old driver is fine if the CUDA libraries support 13, for example by a compatibility package
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    if [[ $driver =~ ^([0-9]+)\. ]] && [ "${BASH_REMATCH[1]}" -lt 580 ] &&
        ! nvidia-smi | grep 'CUDA Version: 1[3-9]' >/dev/null; then
        fail "the NVIDIA driver here is $driver. $(pin torch) is built for CUDA 13.0, which needs driver 580 or newer:" \
            "update the driver, or train the small CPU example with VERL_PLATFORM=cpu. Nothing was installed."
    fi
}
[ -z "$cuda" ] || check_driver
check_system() {  # what the set-up or a later run would miss: all of it in one message, before gigabytes are downloaded
    local lacks=() names=() version compiler=${CC:-gcc} header free
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import venv, ensurepip' 2>/dev/null || { lacks+=("venv for $python"); names+=("python$version-venv"); }
    if [ -n "$cuda" ]; then  # at its first kernel, minutes into a run, triton compiles C with Python's headers
        type "$compiler" >/dev/null 2>&1 || [ -n "${CC:-}" ] || compiler=clang
        type "$compiler" >/dev/null 2>&1 || { lacks+=("a C compiler (${CC:-gcc or clang})"); names+=(gcc); }
        header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
        [ -f "$header" ] || { lacks+=("$header"); names+=("python$version-dev"); }
        free=$(df -m --output=avail "${BAPO_DEVICE_ROOT:-}/dev/shm" 2>/dev/null | tail -n 1 || true)
        [ "${free:-0}" -ge 1024 ] || lacks+=("1 GB in /dev/shm, which has ${free:-0} MB (docker run --shm-size=16g)")
    fi
    [ ${#lacks[@]} = 0 ] || fail "this machine lacks $(printf '%s; ' "${lacks[@]}" | sed 's/; $//')." \
        "${names[*]:+Install with: apt-get install -y ${names[*]} (or what your system calls them). }Nothing was installed."
}
find_python
check_system

exec 9>$venv.lock  # somebody else may be setting it up, for example another node that shares this folder
locked=0
flock --nonblock 9 2>/dev/null || locked=$?
if [ $locked = 1 ]; then
    echo "Waiting for another set-up of $venv"
    flock 9
    if is_complete; then exit 0; fi
elif [ $locked != 0 ]; then  # for example, Lustre is mounted without flock
    echo "Files cannot be locked in this folder: do not start two set-ups of $venv at once."
fi

step() {  # step WHAT COMMAND...: run quietly; on failure show the end of the output
    local what=$1; shift
    echo "  $what"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail "setting up failed at: $what. The whole output: $log"
    fi
}

install_packages() {
    echo "Setting up $venv (a minute or two)"
    if ! cmp -s $requirements $venv/requirements.txt; then  # no environment, an interrupted one, or one of another list
        rm -rf $venv
        "$python" -m venv $venv
        cp $requirements $venv/requirements.txt
    fi
    rm -f $venv/complete
    : >"$log"
    local pip=($venv/bin/python -m pip install -q --disable-pip-version-check)
    step "$(pin uv)" "${pip[@]}" "$(pin uv)"
    step "$requirements" "${uv[@]}" --no-deps -r <(grep -v '^torch==' $requirements)
    # Install torch with pip, which finds a local CPU build. (no-warn-conflicts: the CUDA build needs libraries that the
    # CPU list does not have.)
    step "$(pin torch)" "${pip[@]}" --no-warn-conflicts "$(pin torch)" ${BAPO_TORCH_INDEX:+--index-url "$BAPO_TORCH_INDEX"}
}
uv=($venv/bin/uv pip install -q --compile-bytecode --python $venv/bin/python)
has_packages || install_packages
rm -rf bapo_verl.egg-info  # of an installation before 2026-11-28, whose version Python would find first in this folder
step "this package${commit:+ at commit ${commit:0:7}}" "${uv[@]}" --no-deps --no-build-isolation -e .
printf '%s\n' "$wanted" $commit >$venv/complete
