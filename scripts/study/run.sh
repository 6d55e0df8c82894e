#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the third study (docs/dev/plan.md) on a CPU, in about three hours on 2 idle cores. If it was stopped, it continues.
# `run.sh --help` lists its parts.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
bash scripts/setup.sh
exec .venv/bin/python -m scripts.study.run "$@"
