#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up what is missing and run tests.
#
#   bash scripts/test.sh           style, unit tests, updates of the real worker, and the example on the real stack
#   bash scripts/test.sh all       all of the above, and stale data, resume, cluster and faults on the real stack
#   bash scripts/test.sh rest      only what `all` adds
#   bash scripts/test.sh slow      what is in none of the above: faults, two ranks, Slurm, more random examples, and a
#                                  rehearsal of the GPU tests on the CPU
#   bash scripts/test.sh ARGUMENTS pytest with these arguments, such as tests/unit -k search
set -euo pipefail
cd "$(dirname "$0")/.."
export VERL_PLATFORM=cpu  # the tests run the CPU stack, on any machine
bash scripts/setup.sh
pytest() { .venv/bin/python -m pytest "$@"; }

first() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    pytest -n 2 tests/unit
    pytest -n 2 --dist loadfile tests/actor  # loadfile, because the tests of a file share an actor
    pytest tests/stack/test_example.py
}
rest() {
    pytest tests/stack --ignore tests/stack/test_example.py
}
case ${1:-} in
"") first ;;
all) first; rest ;;
rest) rest ;;
slow)
    HYPOTHESIS_PROFILE=ci pytest -n 2 tests/unit -m hypothesis  # with more examples
    pytest -m slow -rP
    bash scripts/gpu_check.sh --rehearse --out runs/gpu_check_rehearsed
    ;;
*) pytest "$@" ;;
esac
