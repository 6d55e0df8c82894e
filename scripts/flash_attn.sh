# SPDX-License-Identifier: Apache-2.0
# Install flash-attn 2. scripts/setup.sh sources this file and defines venv, log, uv and pin. If installing fails,
# setup.sh shows the end of $log.
flash_attn=flash-attn==2.8.3
kernels=72  # source files of 2.8.3, each compiled for every architecture

install_flash_attn() {
    local wheel=${BAPO_FLASH_ATTN_WHEEL:-} folder
    if [ -z "$wheel" ]; then
        choose_architectures || return
        # A wheel works for one torch, one Python and the architectures that it was built for. Keep it outside $venv, which
        # is removed when the list changes. (The name starts with .venv, so job.py does not send it to a cluster.)
        folder=$PWD/.venv-wheels/$(pin torch)-$("$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
        folder+=-sm_${FLASH_ATTN_CUDA_ARCHS//;/_}
        wheel=$(compgen -G "$folder/flash_attn-${flash_attn#*==}-*.whl" || true)
        if [ -z "$wheel" ]; then
            build_flash_attn "$folder" || return
            wheel=$(compgen -G "$folder/flash_attn-${flash_attn#*==}-*.whl" || true)
            echo "  Kept flash-attn's wheel. On other machines with the same GPUs and Python set BAPO_FLASH_ATTN_WHEEL=$wheel"
        fi
    fi
    echo "  flash-attn ($wheel)"
    "${uv[@]}" --no-deps "$wheel" >>"$log" 2>&1 || return
    # A wheel for another torch or CUDA installs without an error, and transformers and verl would use it.
    "$venv/bin/python" -c 'import torch, flash_attn_2_cuda' >>"$log" 2>&1 || {
        "$venv/bin/uv" pip uninstall -q --python "$venv/bin/python" flash-attn >>"$log" 2>&1
        [ -n "${BAPO_FLASH_ATTN_WHEEL:-}" ] || rm -f "$wheel"  # so that the next set-up does not use it again
        return 1
    }
}

choose_architectures() {  # a GPU runs the kernels of its major version (one of 8.6 runs those of 8.0)
    local here
    here=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sed 's/\..*/0/' |
        grep -xE '80|90|100|120' | sort -un | paste -sd ';' || true)
    export FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS:-$here}
    [ -n "$FLASH_ATTN_CUDA_ARCHS" ] || {
        echo "$flash_attn has no kernels for GPUs of compute capability below 8.0, nor for 11.0" >>"$log"
        return 1
    }
}

build_flash_attn() {  # build_flash_attn FOLDER: leaves a wheel there
    local nvcc release toolkit=() architectures=${FLASH_ATTN_CUDA_ARCHS//[^;]/}
    type "${CXX:-g++}" >/dev/null 2>&1 || {
        echo "no C++ compiler (${CXX:-g++}), which the build needs besides the C compiler: install g++, or set CXX" >>"$log"
        return 1
    }
    nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v nvcc || true)
    release=$("${nvcc:-false}" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)
    if [ "$release" != 13 ]; then
        link_toolkit || {
            echo "the build needs nvcc of CUDA 13, for which torch is built; here: ${nvcc:-none}${release:+ of CUDA $release}" >>"$log"
            return 1
        }
        # This nvcc is of CUDA 13.2, but the headers of CUDA's runtime came with torch and are of 13.0. CCCL would refuse that.
        toolkit=(CUDA_HOME="$PWD/$venv/cuda" NVCC_APPEND_FLAGS="-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK ${NVCC_APPEND_FLAGS:-}")
    fi
    export MAX_JOBS=${MAX_JOBS:-$(compile_jobs)}
    echo "  flash-attn from source: $kernels files for sm_$FLASH_ATTN_CUDA_ARCHS, $MAX_JOBS at a time, two minutes and more each:" \
        "about $((kernels * 2 * (${#architectures} + 1) / MAX_JOBS + 2)) minutes"
    # FORCE_BUILD, because it may otherwise use a ready wheel for CUDA 12. PATH, because torch looks for ninja there.
    env "${toolkit[@]}" PATH="$PWD/$venv/bin:$PATH" FLASH_ATTENTION_FORCE_BUILD=TRUE "$venv/bin/python" -m pip wheel -q \
        --disable-pip-version-check --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$1" $flash_attn >>"$log" 2>&1
}

link_toolkit() {  # make $venv/cuda, with CUDA's compiler and headers from the list, laid out as in a CUDA toolkit
    local installed
    installed=$(compgen -G "$PWD/$venv/lib/python3*/site-packages/nvidia/cu13" || true)
    [ -x "$installed/bin/nvcc" ] && [ -e "$installed/lib/libcudart.so.13" ] || return
    rm -rf "$venv/cuda"
    mkdir -p "$venv/cuda/lib64"
    ln -s "$installed"/{bin,include,nvvm} "$venv/cuda"
    ln -s "$installed"/lib/* "$venv/cuda/lib64"
    ln -s libcudart.so.13 "$venv/cuda/lib64/libcudart.so"  # the name that the linker looks for
}

compile_jobs() {  # one for each core, but at most one for each 9 GB of memory, which is flash-attn's own rule
    local cores bytes jobs
    cores=$(env -u OMP_NUM_THREADS nproc)
    bytes=$({ awk '/^MemAvailable/ {printf "%.0f\n", $2 * 1024}' /proc/meminfo
        cat /sys/fs/cgroup/memory.max 2>/dev/null || true; } | grep -x '[0-9]*' | sort -n | head -n 1)
    jobs=$((bytes / 9000000000))
    [ $jobs -lt $cores ] || jobs=$cores
    echo $((jobs > 0 ? jobs : 1))
}
