#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install flash-attn 2 into .venv-cuda. Without it runs use torch's own flash attention (platform=gpu_varlen), which is
# enough without sequence parallelism and without a critic. There is no ready wheel of it for our torch, and a build
# from source takes about two hours on a desktop by calculation: one of its 72 files took 218 s and 6.0 GB.
#
#   bash scripts/flash_attn.sh           install a ready wheel; if there is none, build it
#   bash scripts/flash_attn.sh --ready   only install a ready wheel; scripts/setup.sh calls this
#
# A ready wheel is BAPO_FLASH_ATTN_WHEEL (a path or URL), or one that was built here before and is kept in .venv-wheels.
# The build may be interrupted: the next one goes on with what is compiled. It needs g++, and nvcc of CUDA 13 from the
# machine or from our list. Environment variables: MAX_JOBS, files at a time (flash-attn chooses by cores and memory);
# FLASH_ATTN_CUDA_ARCHS (chosen by GPUs); BAPO_VENV, another environment.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "Error: $*" >&2; exit 1; }
pinned=flash-attn==2.8.3  # lock.sh and requirements/try_cuda.sh read it here
version=${pinned#*==}
kernels=72  # source files of this version, each compiled for every architecture
venv=${BAPO_VENV:-$PWD/.venv-cuda}
python=$venv/bin/python
[ "${1:-}" = --ready ] || [ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh
[ -x "$python" ] || fail "$python does not exist: this is for machines with NVIDIA GPUs; for another environment set BAPO_VENV."

install() {
    echo "  flash-attn ($1)"
    "$python" -m pip install -q --disable-pip-version-check --no-deps "$1"
    # A wheel for another torch or CUDA installs without an error, and transformers and verl would use it.
    "$python" -c 'import torch, flash_attn_2_cuda' || {
        "$python" -m pip uninstall -q -y flash-attn
        fail "$1 is for another torch, Python or GPU: it cannot be imported, and was removed again."
    }
}

architectures() {  # a GPU runs the kernels of its major version (one of 8.6 runs those of 8.0)
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sed 's/\..*/0/' |
        grep -xE '80|90|100|120' | sort -un | paste -sd ';' || true
}

find_nvcc() {  # set toolkit to what the build needs besides
    local nvcc release
    nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v nvcc || true)
    release=$("${nvcc:-false}" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)
    toolkit=()
    [ "$release" != 13 ] || return 0
    link_toolkit || fail "the build needs nvcc of CUDA 13, for which torch is built; here:" \
        "${nvcc:-none}${release:+ of CUDA $release}."
    # This nvcc is of CUDA 13.2, but the headers of CUDA's runtime came with torch and are of 13.0. CCCL would refuse that.
    toolkit=(CUDA_HOME="$venv/cuda" NVCC_APPEND_FLAGS="-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK ${NVCC_APPEND_FLAGS:-}")
}

link_toolkit() {  # make $venv/cuda, with CUDA's compiler and headers from our list, laid out as in a CUDA toolkit
    local installed
    installed=$(compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13" || true)
    [ -x "$installed/bin/nvcc" ] && [ -e "$installed/lib/libcudart.so.13" ] || return
    rm -rf "$venv/cuda"
    mkdir -p "$venv/cuda/lib64"
    ln -s "$installed"/{bin,include,nvvm} "$venv/cuda"
    ln -s "$installed"/lib/* "$venv/cuda/lib64"
    ln -s libcudart.so.13 "$venv/cuda/lib64/libcudart.so"  # the name that the linker looks for
}

build() {  # build a wheel in $folder, where the object files stay until it is done: an interrupted build goes on with them
    local pip=("$python" -m pip -q --disable-pip-version-check)
    type "${CXX:-g++}" >/dev/null 2>&1 || fail "no C++ compiler (${CXX:-g++}), which the build needs: install g++, or set CXX."
    find_nvcc
    echo "  flash-attn from source: $kernels files for sm_$FLASH_ATTN_CUDA_ARCHS, each about three minutes for an architecture" \
        "and up to 9 GB. flash-attn compiles as many at once as the machine's cores and memory allow; in a container or a" \
        "Slurm job with less, set MAX_JOBS. What is compiled stays, if it is interrupted. Output: $folder/build.log"
    mkdir -p "$folder"
    {
        [ -e "$folder/flash_attn-$version/setup.py" ] || {
            FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "${pip[@]}" download --no-deps --no-build-isolation --no-binary :all: \
                --dest "$folder" $pinned
            tar -xzf "$folder/flash_attn-$version.tar.gz" -C "$folder"
        }
        # FORCE_BUILD, because it may otherwise use a ready wheel for CUDA 12. PATH, because torch looks for ninja there.
        env "${toolkit[@]}" PATH="$venv/bin:$PATH" FLASH_ATTENTION_FORCE_BUILD=TRUE "${pip[@]}" wheel --no-deps \
            --no-build-isolation --no-cache-dir --wheel-dir "$folder" "$folder/flash_attn-$version"
    } >"$folder/build.log" 2>&1 || {
        tail -n 30 "$folder/build.log" >&2
        fail "flash-attn could not be built; above are the last lines of $folder/build.log. Runs go on without it."
    }
    rm -rf "$folder/flash_attn-$version" "$folder/flash_attn-$version.tar.gz"
}

if [ -n "${BAPO_FLASH_ATTN_WHEEL:-}" ]; then
    install "$BAPO_FLASH_ATTN_WHEEL"
    exit
fi
export FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS:-$(architectures)}
[ -n "$FLASH_ATTN_CUDA_ARCHS" ] || fail "flash-attn $version has no kernels for this machine's GPUs."
# A wheel works for one torch, one Python and the architectures that it was built for. (The name of the folder starts with
# .venv, so job.py does not send it to a cluster.)
folder=$PWD/.venv-wheels/$("$python" -c 'import sys; from importlib.metadata import version
print("torch-%s-cp%d%d" % (version("torch"), *sys.version_info[:2]))')-sm_${FLASH_ATTN_CUDA_ARCHS//;/_}
wheel=$(compgen -G "$folder/flash_attn-$version-*.whl" || true)
if [ -z "$wheel" ] && [ "${1:-}" = --ready ]; then
    echo "  without flash-attn: runs use torch's attention. To build it, perhaps for two hours: bash scripts/flash_attn.sh"
    exit
fi
if [ -z "$wheel" ]; then
    build
    wheel=$(compgen -G "$folder/flash_attn-$version-*.whl")
    echo "  Kept flash-attn's wheel. On other machines with the same GPUs and Python set BAPO_FLASH_ATTN_WHEEL=$wheel"
fi
install "$wheel"
