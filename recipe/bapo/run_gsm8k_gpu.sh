#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# BAPO on GSM8K with Qwen2.5-0.5B-Instruct (or MODEL_PATH, TRAIN_FILE, TEST_FILE), on the GPUs of this machine or on one of 24 GB, by arithmetic; not
# run on a GPU. The first start sets up .venv-cuda and fetches data and model from the Hugging Face hub.
#
#   bash recipe/bapo/run_gsm8k_gpu.sh [key=value ...]
#   bash recipe/bapo/run_gsm8k_gpu.sh --preflight
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
nvidia-smi -L >/dev/null 2>&1 || { echo "Error: no GPU here: run_bapo_example.sh trains without one." >&2; exit 1; }
[ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh >&2
if [ -z "${TRAIN_FILE:-}" ] || [ -z "${TEST_FILE:-}" ]; then
    for split in train test; do
        [ -f data/gsm8k_$split.parquet ] || "${BAPO_VENV:-.venv-cuda}/bin/python" scripts/prepare_data.py gsm8k_$split
    done
fi
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
export TRAIN_FILE=${TRAIN_FILE:-$PWD/data/gsm8k_train.parquet} TEST_FILE=${TEST_FILE:-$PWD/data/gsm8k_test.parquet}
exec env CONFIG="${CONFIG:-replay}" bash recipe/bapo/run_bapo_example.sh \
    staleness=4 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    trainer.total_epochs=3 "$@"
