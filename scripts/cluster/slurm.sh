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
#
# This does not use `ray symmetric-run`, because in Ray 2.60 that exits with 0 when Ray does not start.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?Error: submit this with sbatch}"
[ -f scripts/cluster/ray.sh ] || { echo "Error: $PWD is not the repository's root: call sbatch there." >&2; exit 1; }
nodes=$SLURM_JOB_NUM_NODES port=${PORT:-6379}
export RAY_ADDRESS=http://127.0.0.1:${DASHBOARD_PORT:-8265} NNODES=$nodes
[ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh  # once, before all nodes use it
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}
step=(srun --overlap --mem=0 --cpu-bind=none)
finish() {
    # On SIGINT each step's ray.sh ends its Ray and exits with 0. With SIGTERM, or by ending srun, Slurm would log the steps
    # as cancelled.
    scancel --quiet --signal=INT "$SLURM_JOB_ID" || true
    [ -z "${waiting:-}" ] || kill "$waiting" 2>/dev/null || true
    for _ in {1..60}; do
        [ -n "$(jobs -rp)" ] || break
        sleep 1
    done
    kill $(jobs -rp) 2>/dev/null || true
    wait
    # The address of a Ray that is gone.
    "${step[@]}" --nodes="$nodes" --ntasks="$nodes" rm -f /tmp/ray/ray_current_cluster || true
}
trap finish EXIT
"${step[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \
    bash scripts/cluster/ray.sh head --node-ip-address="$address" --port="$port" --dashboard-port="${RAY_ADDRESS##*:}" &
WAIT_SECONDS=600 bash scripts/cluster/ray.sh wait 1 &
waiting=$!
wait -n || { echo "Error: the head did not start." >&2; exit 1; }
if [ "$nodes" -gt 1 ]; then
    "${step[@]}" --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$SLURMD_NODENAME" \
        bash scripts/cluster/ray.sh join "$address:$port" &
fi
bash scripts/cluster/ray.sh wait "$nodes" &
waiting=$!
wait -n || { echo "Error: not all nodes joined." >&2; exit 1; }
waiting=
bash recipe/bapo/run_bapo_example.sh "$@"
