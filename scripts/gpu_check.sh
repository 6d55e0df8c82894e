#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests that need an NVIDIA GPU, tests/gpu (pytest -m gpu). They check results on a GPU, measure time and
# memory, and make runs of the whole stack.
#
#   bash scripts/gpu_check.sh [OPTIONS] [STAGE...]   all three stages, or some of:
#     1   compares search and loss with the CPU's; needs only torch and pytest; less than a minute
#     2   makes updates of verl's worker with the settings that larger models need, and measures their time and
#         memory; needs verl but no vLLM; ten minutes or more
#     3   makes runs with Ray and vLLM: three steps each of the example, of the example with a Llama, and of replay;
#         then a whole run of a language model that learns to sort; and two runs at once if there are two GPUs; about
#         half an hour
#   --rehearse     run on the CPU platform, to test this command itself; this says nothing about a GPU
#   --wheels DIR   for a machine without network: use the machine's Python (BAPO_PYTHON, or python3), and install the
#                  wheels that are in DIR to a temporary folder. This script's comments list the packages it needs.
#   --out DIR      folder for the report (runs/gpu_check)
#
# report.jsonl gets a line after each test, so that a run that is killed keeps its results; junit.xml is for tools. The
# times of stages 2 and 3 are guesses: on an H200 the example alone took four minutes. The exit code is pytest's (0, or 1
# if a test failed), 1 if the check cannot start, or 2 if there is no GPU that torch can use. Environment variable:
# BAPO_VENV, as for the run script.
set -euo pipefail
# Stage 1 needs only torch and pytest. Stage 2 needs the following packages, in the versions of requirements-cuda.txt, and
# others that PyTorch images have (numpy, pandas, pyarrow, psutil, peft, rich and others). Of Ray's wheel it does not
# need the jars, rllib, serve, data and tune. Stage 3 needs all of requirements-cuda.txt.
wheels_of_stage_2=(
    annotated-types antlr4-python3-runtime anyio attrs certifi charset-normalizer cloudpickle codetiming colorful
    datasets dill email-validator fastapi google-api-core google-auth googleapis-common-protos h11 httpcore httpx
    huggingface-hub hydra-core jmespath jsonschema jsonschema-specifications msgpack msgspec multiprocess omegaconf
    orjson pillow protobuf pydantic pydantic-core pydantic-extra-types python-multipart pyvers pyzmq ray referencing
    requests rpds-py starlette tensordict tokenizers transferqueue transformers typing-inspection urllib3 uvicorn
    verl watchfiles xxhash
)  # `pip wheel --no-deps` also makes those that are published as source alone, such as antlr4
fail() { echo "Error: $*" >&2; exit 1; }
stages=() rehearse=() wheels='' out=''
while [ $# -gt 0 ]; do
    case $1 in
    1 | 2 | 3) stages+=("$1") ;;
    --rehearse) rehearse=(--rehearse) ;;
    --wheels) wheels=$(realpath "${2:?Error: --wheels needs a folder}"); shift ;;
    --out) out=$(realpath -m "${2:?Error: --out needs a folder}"); shift ;;
    *) sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 1 ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || stages=(1 2 3)
cd "$(dirname "$0")/.."
out=${out:-$PWD/runs/gpu_check}
source scripts/gpus.sh
if [ ${#rehearse[@]} = 0 ]; then unset VERL_PLATFORM; else export VERL_PLATFORM=cpu OMP_NUM_THREADS=1; fi
choose_device
if [ ${#rehearse[@]} = 0 ] && [ $device = cpu ]; then
    echo "There is no GPU here, so nothing was checked. To try the check itself on a CPU: --rehearse." >&2
    exit 2
fi

if [ -n "${BAPO_VENV:-}" ]; then
    python=$BAPO_VENV/bin/python
elif [ -n "$wheels" ]; then
    python=${BAPO_PYTHON:-python3}
    site=$(mktemp -d)
    trap 'rm -r "$site"' EXIT
    for stage in "${stages[@]}"; do
        [ "$stage" = 1 ] || for name in "${wheels_of_stage_2[@]}"; do
            compgen -G "$wheels/${name//-/_}-*.whl" >/dev/null || echo "Not in $wheels: $name (fine if it is installed)" >&2
        done
    done
    # Install this package, too, because verl finds our plugin by its metadata.
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --upgrade --target "$site" \
        "$wheels"/*.whl .
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
else
    bash scripts/setup.sh >&2
    if [ ${#rehearse[@]} = 0 ]; then python=$PWD/.venv-cuda/bin/python; else python=$PWD/.venv/bin/python; fi
fi
"$python" -c 'import torch, pytest' || fail "$python has no torch or no pytest: set BAPO_VENV, or BAPO_PYTHON with --wheels."
[ ${#rehearse[@]} != 0 ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "nvidia-smi lists a GPU, but torch cannot use it: the driver is older than torch's CUDA, or torch is a CPU" \
        "build. Nothing was checked." >&2
    exit 2
}
mkdir -p "$out"
report=$out/report.jsonl
[ ! -e "$report" ] || mv "$report" "$out/report.before-$(date +%Y%m%d-%H%M%S).jsonl"
files=()
for stage in "${stages[@]}"; do files+=(tests/gpu/test_"$stage"_*.py); done
echo "Stages ${stages[*]}; a line after each test in $report"
status=0
# confcutdir skips tests/conftest.py, which imports packages that stage 1 does not need.
# A stage whose packages are missing is an error, and the other stages still run.
"$python" -m pytest --confcutdir tests/gpu -p no:cacheprovider -v -rs --rootdir . --continue-on-collection-errors \
    "${rehearse[@]}" \
    --report "$report" --junitxml "$out/junit.xml" "${files[@]}" || status=$?
echo "The report: $report"
exit $status
