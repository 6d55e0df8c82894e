#!/usr/bin/env bash
# Set up what is missing and run the style checks and all tests. Arguments go to pytest: scripts/test.sh -m "not stack"
set -euo pipefail
cd "$(dirname "$0")/.."
export VERL_PLATFORM=cpu  # the tests run the CPU stack, on any machine
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
