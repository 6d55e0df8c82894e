#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=bapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=bapo-%j.log
# Train on the nodes of a Slurm allocation: the first node starts a Ray head, the others join, and the run script submits
# its job. Call sbatch in the repository's root, with the environment and overrides of the run script. Options of sbatch
# win over those above.
#
#   MODEL_PATH=/models/mine TRAIN_FILE=/data/train.parquet TEST_FILE=/data/test.parquet \
#       sbatch --nodes=4 --gpus-per-node=8 scripts/cluster/slurm.sh [key=value ...]
#
#   HEAD_IP                the head's address in the nodes' network (default: its first address; set this if that one
#                          belongs to a container bridge)
#   PORT, DASHBOARD_PORT   ports of the head (6379, 8265)
#   WAIT_SECONDS           how long to wait for the head, and then for the other nodes (600)
#
# This does not use `ray symmetric-run`, because in Ray 2.60 that exits with 0 when Ray does not start, and ends with
# `ray stop`, which also ends other Rays of the same user on these nodes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?Error: submit this with sbatch}"
fail() { echo "Error: $*" >&2; exit 1; }
[ -f scripts/cluster/slurm.sh ] || fail "$PWD is not the repository's root: call sbatch there."
nodes=$SLURM_JOB_NUM_NODES port=${PORT:-6379}
source scripts/gpus.sh
choose_device
venv=.venv slots=()
[ $device = cpu ] || venv=.venv-cuda
[ "${VERL_PLATFORM:-}" != cpu ] || slots=(--num-cpus=16 --num-gpus=1)  # logical slots
[ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh  # once, before all nodes use it
ray=("${BAPO_VENV:-$PWD/$venv}/bin/python" -m ray.scripts.scripts)
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}
# The secret that the nodes of this allocation share: Ray reads it from the environment, so no file has it.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN NNODES=$nodes
step=(srun --overlap --mem=0 --cpu-bind=none)
# SIGINT ends Ray on a node, and is no failure of the step.
start=(bash -c 'unset RAY_ADDRESS; trap "exit 0" INT; "$@"' - "${ray[@]}" start --block --disable-usage-stats "${slots[@]}")
finish() {
    # On SIGINT Ray ends on each node. With SIGTERM, or by ending srun, Slurm would log the steps as cancelled.
    scancel --quiet --signal=INT "$SLURM_JOB_ID" || true
    for _ in {1..60}; do
        [ -n "$(jobs -rp)" ] || break
        sleep 1
    done
    kill $(jobs -rp) 2>/dev/null || true
    wait
    # Ray leaves its address behind, and the next ray.init() on these machines would try to connect to it.
    "${step[@]}" --nodes="$nodes" --ntasks="$nodes" rm -f /tmp/ray/ray_current_cluster || true
}
trap finish EXIT
wait_for() {  # wait_for WHAT COMMAND...: until the command succeeds
    local what=$1 end=$((SECONDS + ${WAIT_SECONDS:-600})); shift
    until "$@" >/dev/null 2>&1; do
        [ -n "$(jobs -rp)" ] || fail "Ray has ended before $what: see above."
        [ "$SECONDS" -lt "$end" ] || fail "$what: not after ${WAIT_SECONDS:-600} seconds. See above, or raise WAIT_SECONDS."
        sleep 2
    done
}
are_there() { [ "$("${ray[@]}" list nodes --filter state=ALIVE --format json | grep -o '"node_id"' | wc -l)" -ge "$1" ]; }

"${step[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \
    "${start[@]}" --head --node-ip-address="$address" --port="$port" --dashboard-port="${DASHBOARD_PORT:-8265}" &
export RAY_ADDRESS=http://127.0.0.1:${DASHBOARD_PORT:-8265}
wait_for "the head accepts jobs" "${ray[@]}" job submit -- true
if [ "$nodes" -gt 1 ]; then
    "${step[@]}" --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$SLURMD_NODENAME" \
        "${start[@]}" --address="$address:$port" &
fi
wait_for "$nodes nodes have joined" are_there "$nodes"
echo "$nodes nodes"
bash recipe/bapo/run_bapo_example.sh "$@"
