#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train with BAPO. With MODEL_PATH, TRAIN_FILE and TEST_FILE this trains your model on your data. Without any variable it
# runs an example. On a machine without a GPU, a tiny model learns to guess the sum of two dice on the real stack, in about
# six minutes on 2 cores. With GPUs, a small language model learns to sort three numbers; the first run makes it from the
# package registry.
#
#   bash recipe/bapo/run_bapo_example.sh [key=value ...]        Hydra overrides, as in config/bapo_trainer.yaml
#   bash recipe/bapo/run_bapo_example.sh --preflight            only check machine, files and config; exit code 0 or 1
#
# Environment variables, with their defaults in parentheses:
#   MODEL_PATH      Hugging Face folder or hub name    GPU: the language model   CPU: the example's own model
#   TRAIN_FILE      parquet in verl's schema           GPU: the language model's data   CPU: the example's own data
#   TEST_FILE       the same, for validation           GPU: the language model's data   CPU: the example's own data
#                   (on a GPU give all three, or none)
#   NNODES          number of nodes (1)
#   GPUS_PER_NODE   GPUs per node (all of the machine), or on a CPU logical slots (1)
#   ROLLOUT_GPUS_PER_NODE   with CONFIG=separate_async, GPUS_PER_NODE train and these sample (half each; 1 on a CPU)
#   OUTPUT_DIR      folder for the run's files (runs/<config>-<date>-<time>)
#   CONFIG          a file of configs/experiment without .yaml (example; language_model on a GPU without a MODEL_PATH).
#                   CONFIG=language_model trains the language model on a CPU, too
#   SIZE            a file of configs/size without .yaml (gpu, or gpu_few on one or two GPUs; on a CPU chosen by CONFIG, or
#                   cpu_own_data with your own files; for the language model chosen by the number of GPUs)
#   BAPO_CACHE      folder in which the language model is kept (.cache in this repository)
#   VERL_PLATFORM=cpu  train on the CPU even if there are GPUs
#   RAY_ADDRESS     http://HEAD:8265: submit as a job to the Ray cluster there and follow it (scripts/cluster/ray.sh)
#   BAPO_VENV       an existing virtual environment to use, instead of setting one up
set -euo pipefail
for name in MODEL_PATH TRAIN_FILE TEST_FILE OUTPUT_DIR BAPO_VENV BAPO_CACHE; do  # relative to where the command was given
    value=${!name:-}
    if [[ -n $value && $value != /* && ( $name != MODEL_PATH || -e $value ) ]]; then export "$name=$PWD/$value"; fi
done
script=$(realpath "$0")
cd "$(dirname "$script")/../.."

preflight=''
for argument in "$@"; do
    case $argument in
    --preflight) preflight=1 ;;
    -h | --help) sed -n '3,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$script"; exit 0 ;;
    esac
done
fail() { echo "Error: $*" >&2; exit 1; }
# Check numbers before any arithmetic with them, because bash would run a command inside a value.
positive() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || fail "$1=$2 is not usable: give a whole number of 1 or more."; }
for name in NNODES GPUS_PER_NODE ROLLOUT_GPUS_PER_NODE; do
    [ -z "${!name:-}" ] || positive "$name" "${!name}"
done
[[ ${OUTPUT_DIR:-} != *'${'* ]] || fail "OUTPUT_DIR=$OUTPUT_DIR is not usable: name a folder without \${."

source scripts/gpus.sh
count_gpus
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # nvidia-smi lists all GPUs, whatever this variable says
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -vc -e '^ *$' -e '^ *-' || true)
    gpus=$((visible < gpus ? visible : gpus))
fi
case ${VERL_PLATFORM:-} in
'' | cpu) ;;
nvidia)
    [ "$gpus" != 0 ] || fail "VERL_PLATFORM=nvidia, but no GPU is visible here: leave it unset, or set cpu."
    unset VERL_PLATFORM  # verl finds it by itself
    ;;
*) fail "VERL_PLATFORM=$VERL_PLATFORM is not usable: leave it unset on NVIDIA GPUs, or set cpu." ;;
esac
if [ "$gpus" = 0 ] && [ -z "${VERL_PLATFORM:-}" ] && { [ -e /dev/kfd ] || type rocm-smi >/dev/null 2>&1 || type amd-smi >/dev/null 2>&1; }; then
    fail "this machine has AMD GPUs, which are not supported: set VERL_PLATFORM=cpu to train on its CPU."
fi
if [ "$gpus" = 0 ] && [ -z "${VERL_PLATFORM:-}" ]; then
    # The CPU path is for this machine: nobody should find a cluster of GPUs training on its CPUs.
    where="but this machine has no GPU: submit from a node with GPUs, or set VERL_PLATFORM=cpu."
    [ "${NNODES:-1}" = 1 ] || fail "NNODES=$NNODES $where"
    [[ ${RAY_ADDRESS:-} != http* ]] || fail "RAY_ADDRESS=$RAY_ADDRESS $where"
    export VERL_PLATFORM=cpu
fi
# Train the language model if CONFIG asks for it, or on one machine's GPUs if neither model nor data are given.
language_model=
own="${MODEL_PATH:-}${TRAIN_FILE:-}${TEST_FILE:-}"
several=
if [[ ${NNODES:-1} != 1 || ${RAY_ADDRESS:-} == http* ]]; then several=1; fi
if [ "${CONFIG:-}" = language_model ]; then
    [ -z "$own" ] || fail "CONFIG=language_model makes its own model and data: leave MODEL_PATH, TRAIN_FILE and TEST_FILE unset, or set another CONFIG."
    [ -z "$several" ] || fail "CONFIG=language_model is for this machine alone: leave NNODES and RAY_ADDRESS unset, or set MODEL_PATH, TRAIN_FILE and TEST_FILE and another CONFIG."
    language_model=1
elif [[ -z $own$several && ${VERL_PLATFORM:-} != cpu && ${CONFIG:-} != @(paper_*|gsm8k|evaluate) ]]; then
    language_model=1
    CONFIG=${CONFIG:-language_model}
fi
CONFIG=${CONFIG:-example}
if [ "$CONFIG" = evaluate ] && [ -n "${TEST_FILE:-}" ]; then export TRAIN_FILE=${TRAIN_FILE:-$TEST_FILE}; fi
if [ "${VERL_PLATFORM:-}" = cpu ]; then
    gpus=1
    unset CUDA_VISIBLE_DEVICES  # Ray would compare it with its logical slots, which it calls GPUs
fi
rollout_gpus=1
if [ "$CONFIG" = separate_async ] && [ "${VERL_PLATFORM:-}" != cpu ]; then
    train_gpus=${GPUS_PER_NODE:-$((gpus - ${ROLLOUT_GPUS_PER_NODE:-$((gpus / 2))}))}
    rollout_gpus=${ROLLOUT_GPUS_PER_NODE:-$((gpus - train_gpus))}
    [ "$train_gpus" -ge 1 ] && [ "$rollout_gpus" -ge 1 ] || fail \
        "CONFIG=separate_async would train on GPUS_PER_NODE=$train_gpus and sample on ROLLOUT_GPUS_PER_NODE=$rollout_gpus of this node's $gpus GPUs: set both to 1 or more, or choose CONFIG=partial_rollout."
    gpus=$train_gpus
fi
if [ -n "$language_model" ] && [ -z "${GPUS_PER_NODE:-}" ] && [ "$CONFIG" != separate_async ]; then
    for least in 8 4 2 1; do  # numbers of GPUs that divide its batches
        if [ "$gpus" -ge $least ]; then gpus=$least; break; fi
    done
fi
export NNODES=${NNODES:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-$gpus} ROLLOUT_GPUS_PER_NODE=${ROLLOUT_GPUS_PER_NODE:-$rollout_gpus}
positive GPUS_PER_NODE "$GPUS_PER_NODE"
case $CONFIG in example) default=cpu_example ;; partial_rollout) default=cpu_long ;; *) default=cpu ;; esac
[ -z "${TRAIN_FILE:-}${TEST_FILE:-}" ] || default=cpu_own_data
if [ "${VERL_PLATFORM:-}" != cpu ]; then
    default=gpu
    all=$GPUS_PER_NODE
    [ "$CONFIG" != separate_async ] || all=$((all + ROLLOUT_GPUS_PER_NODE))
    [[ -n $several || $all -gt 2 ]] || default=gpu_few
fi
if [ -n "$language_model" ]; then
    case ${VERL_PLATFORM:-}$GPUS_PER_NODE in
    cpu*) default=language_model_cpu ;;
    1 | 2) default=language_model_gpu ;;
    *) default=language_model_8gpus ;;
    esac
fi
SIZE=${SIZE:-$default}
choose() { [[ $2 =~ ^[A-Za-z0-9_]+$ && -f $3/$2.yaml ]] || fail "$1=$2 is not usable: choose from $(cd "$3"; ls *.yaml | sed 's/\.yaml//' | tr '\n' ' ')"; }
choose CONFIG "$CONFIG" configs/experiment
choose SIZE "$SIZE" configs/size
[[ $CONFIG != @(paper_*|gsm8k) || $SIZE = gpu* ]] || fail "CONFIG=$CONFIG is for GPUs: choose another, or SIZE=gpu to check it."
if [ "${VERL_PLATFORM:-}" != cpu ] && [ -z "$language_model" ]; then
    for name in MODEL_PATH TRAIN_FILE TEST_FILE; do
        [ -n "${!name:-}" ] || fail "$name is not set: $(sed -n "s/^#   $name  *\(.*[^ ]\)  *GPU: .*/\1/p" "$script")."
    done
fi
for name in TRAIN_FILE TEST_FILE; do
    [ ! -d "${!name:-}" ] || fail "$name=${!name} is a folder: give a parquet file in verl's schema."
    [ -z "${!name:-}" ] || [ -f "${!name}" ] || fail "$name=${!name} does not exist: give a parquet file in verl's schema."
done
[[ $CONFIG = evaluate || -z ${TRAIN_FILE:-}${TEST_FILE:-} || ( -n ${TRAIN_FILE:-} && -n ${TEST_FILE:-} ) || " $*" = *" data."*_files=* ]] || fail \
    "TRAIN_FILE=${TRAIN_FILE:-} and TEST_FILE=${TEST_FILE:-} are not usable together: give both, or neither for the example's own."

[[ ${MODEL_PATH:-} != /* || -d $MODEL_PATH ]] || fail "MODEL_PATH=$MODEL_PATH is not a folder: give a Hugging Face model folder or a hub name."

task=$PWD/recipe/bapo/example/files  # model and data of the example
if [[ ${VERL_PLATFORM:-} = cpu && -z $language_model && ( -z ${MODEL_PATH:-} || -z ${TRAIN_FILE:-} || -z ${TEST_FILE:-} ) ]]; then
    changed=$(cd "$task" && sha256sum --check --quiet SHA256SUMS 2>&1) || fail \
        "recipe/bapo/example/files is not as it was published (${changed%%$'\n'*}): git restore recipe/bapo/example/files"
fi

[ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh >&2
venv=$PWD/.venv
[ "${VERL_PLATFORM:-}" = cpu ] || venv=$PWD/.venv-cuda
python=${BAPO_VENV:-$venv}/bin/python
[ -x "$python" ] || fail "$python does not exist: set BAPO_VENV to a virtual environment with the requirements."
if [ "${VERL_PLATFORM:-}" = cpu ] && [ -z "$language_model" ]; then
    export MODEL_PATH=${MODEL_PATH:-$task/model} TRAIN_FILE=${TRAIN_FILE:-$task/train.parquet} \
        TEST_FILE=${TEST_FILE:-$task/test.parquet}
fi
# On one machine, have Ray, its dashboard and vLLM's servers listen only on the loopback interface. (Ray does
# this by default on Windows and macOS, where it cannot form clusters; this variable makes it do the same here.)
[ "$NNODES" != 1 ] || [[ -n ${RAY_ADDRESS:-} && $RAY_ADDRESS != local ]] || export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
export OUTPUT_DIR=${OUTPUT_DIR:-$PWD/runs/$CONFIG-$(date +%Y%m%d-%H%M%S)}
arguments=(--config-dir configs experiment="$CONFIG" size="$SIZE"
    trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$GPUS_PER_NODE")
if [ "${VERL_PLATFORM:-}" != cpu ] && [[ " $* " != *" platform="* ]] &&
    ! "$python" -c 'import torch, flash_attn_2_cuda' 2>/dev/null; then  # flash-attn-4 alone is a package flash_attn, too
    echo "flash-attn is not installed, or cannot be imported: platform=gpu_without_flash_attn (sdpa attention, one sequence at a time)." >&2
    arguments+=(platform=gpu_without_flash_attn)
    # Its answers are short, so a micro-batch can hold many of them and sdpa's mask is still small.
    [ -z "$language_model" ] || arguments+=(actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096)
fi
if [ -n "$language_model" ] && [ "${VERL_PLATFORM:-}" = cpu ]; then
    # Trainer and vLLM take turns, so each can use all cores. (The example's tiny model is faster with one.)
    threads=$(($(nproc) / GPUS_PER_NODE))
    threads=$((threads > 16 ? 16 : threads > 0 ? threads : 1))
    arguments+=("ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='$threads'")
fi
given=()
for argument in "$@"; do [ "$argument" = --preflight ] || given+=("$argument"); done
checks=("$python" -m recipe.bapo.run.preflight "${arguments[@]}" "${given[@]}")
use() { export MODEL_PATH=$1/model TRAIN_FILE=$1/train.parquet TEST_FILE=$1/test.parquet; }
if [ -n "$language_model" ]; then
    make=("$python" -m recipe.bapo.language_model)
    folder=$("${make[@]}" --where)
    if [ -z "$folder" ]; then
        converted=$("${make[@]}" --converted)  # fetched and converted, so that errors appear before the warm-up
        use "$converted"
        [ -z "$preflight" ] || exec "${checks[@]}"
        table=$("${checks[@]}") || { sed -n 's/^failed.\{20\}/Error: /p' <<<"$table" >&2; exit 1; }
        folder=$("${make[@]}")
    fi
    use "$folder"
fi
[ -z "$preflight" ] || exec "${checks[@]}"
train=("$python" -m recipe.bapo.run "${arguments[@]}" "${given[@]}")
if [[ ${RAY_ADDRESS:-} == http* ]]; then
    [ ! -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] || export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    exec "$python" scripts/cluster/job.py submit "$(basename "$OUTPUT_DIR")-$(date +%H%M%S)" "${train[@]}"
fi
exec "${train[@]}"
