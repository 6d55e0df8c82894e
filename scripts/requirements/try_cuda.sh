#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Try the CUDA requirements on a machine without a GPU: install requirements-cuda.txt into a new environment, and run the
# unit and actor tests there on the CPU platform, with vLLM's CUDA package instead of the CPU one. The environment takes two minutes and about 12 GB.
#   bash scripts/requirements/try_cuda.sh FOLDER [ARGUMENTS of pytest]
#       FOLDER is created, or is an earlier trial's: one of the same list is used again, one of another list is replaced.
# Environment variable: BAPO_PYTHON, as for scripts/setup.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:?Error: give a folder for the environment, such as /tmp/cuda_env}"); shift
python=$folder/bin/python
pin() { grep "^$1==" requirements-cuda.txt; }

if ! cmp -s requirements-cuda.txt "$folder/requirements.txt"; then
    # Remove nothing that an earlier trial did not make: rmdir fails unless the folder is empty.
    [ -e "$folder/made_by_try_cuda" ] || [ ! -e "$folder" ] || rmdir "$folder"
    rm -rf "$folder"
    "${BAPO_PYTHON:-python3}" -m venv "$folder"
    touch "$folder/made_by_try_cuda"
    "$python" -m pip install -q "$(pin uv)"
    "$folder/bin/uv" pip install -q --no-deps --python "$python" --python-platform x86_64-manylinux_2_31 \
        -r requirements-cuda.txt  # the same platform as in scripts/lock.sh
    "$folder/bin/uv" pip check -q --python "$python"
    cp requirements-cuda.txt "$folder/requirements.txt"
fi
"$folder/bin/uv" pip install -q --no-deps --python "$python" -e .
"$python" -c 'import torch; print("torch", torch.__version__, "for CUDA", torch.version.cuda)'
export VERL_PLATFORM=cpu
[ $# -gt 0 ] || set -- tests/unit tests/actor
"$python" -m pytest "$@"
