#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The study behind docs/results.md, on a CPU; resumed where it was stopped. `run.sh --help` lists its parts. The maps take
# about three hours on 2 cores, the anchors forty minutes more, the real stack two hours.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
bash scripts/setup.sh
exec .venv/bin/python -m scripts.study.run "$@"
