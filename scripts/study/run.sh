#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The study behind docs/results.md; about two and a half hours on 2 cores, resumed where it was stopped. See scripts/study/run.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1
bash scripts/setup.sh
.venv/bin/python -m recipe.bapo.example.task runs/study/task --steps 2000 --right 0.02
exec .venv/bin/python -m scripts.study.run "$@"
