#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run Ray on several nodes, for jobs of recipe/bapo/run_bapo_example.sh (docs/clusters.md). The repository must be at the
# same path on every node.
#
#   bash scripts/cluster/ray.sh head [OPTIONS]           on the first node; prints what the others need
#   bash scripts/cluster/ray.sh join IP:PORT [OPTIONS]   on every other node
#   bash scripts/cluster/ray.sh wait N                   wait until N nodes have joined
#   bash scripts/cluster/ray.sh follow JOB               print a job's output; the exit code is the job's
#   bash scripts/cluster/ray.sh stop JOB                 end a job
#
# head and join set up the environment and run until you end them (Ctrl-C or SIGTERM), which ends Ray on their node.
# OPTIONS go to `ray start`. Environment variables:
#   RAY_ADDRESS           address of the head's dashboard (http://127.0.0.1:8265), for wait, follow and stop
#   RAY_AUTH_TOKEN_PATH   file with the secret that all nodes share (~/.ray/auth_token). head makes it if it is missing;
#                         head and join make it readable by its owner only
#   WAIT_SECONDS          how long `wait` waits at most (600)
#   BAPO_VENV, VERL_PLATFORM   as for the run script
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "Error: $*" >&2; exit 1; }
usage() { sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 2; }

platform=()
source scripts/gpus.sh
choose_device
if [ $device = cpu ]; then
    venv=.venv
    [ "${VERL_PLATFORM:-}" != cpu ] || platform=(--num-cpus=16 --num-gpus=1)  # logical slots; OPTIONS may say more
else
    venv=.venv-cuda
fi
venv=${BAPO_VENV:-$PWD/$venv}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-${HOME:?set HOME or RAY_AUTH_TOKEN_PATH}/.ray/auth_token}
export RAY_JOB_STOP_WAIT_TIME_S=60  # time for a stopped job to clean up
export RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}
ray=$venv/bin/ray

need_venv() {
    [ -n "${BAPO_VENV:-}" ] || bash scripts/setup.sh
    [ -x "$ray" ] || fail "$ray does not exist: set BAPO_VENV to a virtual environment with the requirements, or run scripts/setup.sh."
}

start() {  # start OPTIONS...: run Ray on this node until it is ended
    unset RAY_ADDRESS
    "$ray" start --block --disable-usage-stats "${platform[@]}" "$@" &
    local pid=$! status=0 ended=
    trap 'ended=1; kill $pid 2>/dev/null' INT TERM
    wait $pid || status=$?
    while kill -0 $pid 2>/dev/null; do wait $pid || status=$?; done  # a signal ends the first wait
    # Ray leaves its address behind, and the next ray.init() on this machine would try to connect to it.
    local file=/tmp/ray/ray_current_cluster
    [ ! -s $file ] || "$ray" health-check --address "$(cat $file)" >/dev/null 2>&1 || rm -f $file
    [ -z "$ended" ] || status=0  # we were asked to end
    exit "$status"
}

close_token() {  # needed because a Ray that starts on a single machine makes this file readable by everybody
    local mode
    mode=$(stat -Lc %a "$RAY_AUTH_TOKEN_PATH")
    [[ $mode != *00 ]] || return 0
    chmod go-rwx "$RAY_AUTH_TOKEN_PATH" 2>/dev/null || fail \
        "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH can be used by others (mode $mode), who could submit jobs: chmod 600 it, or give another file."
    echo "$RAY_AUTH_TOKEN_PATH could be used by others (mode $mode); now only its owner can use it. If someone may have read it, remove it on every node and start the head again." >&2
}

need_token() {
    [ -s "$RAY_AUTH_TOKEN_PATH" ] || fail "$RAY_AUTH_TOKEN_PATH does not exist: copy it from the head, or set RAY_AUTH_TOKEN_PATH."
}

command=${1:-}
shift || true
case $command in
head)
    need_venv
    if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
        mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
        (umask 077; "$venv/bin/python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
    fi
    close_token
    echo "Other nodes need the file $RAY_AUTH_TOKEN_PATH and: bash scripts/cluster/ray.sh join IP:6379 (or the port you gave)"
    start --head "$@"
    ;;
join)
    [[ ${1:-} == *:* ]] || fail "invalid address ${1:-}: give the head's address as IP:PORT."
    need_token
    close_token
    need_venv
    address=$1; shift
    start --address="$address" "$@"
    ;;
wait)
    [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || fail "invalid number ${1:-}: give the number of nodes."
    [[ ${WAIT_SECONDS:-600} =~ ^[1-9][0-9]*$ ]] || fail "invalid WAIT_SECONDS=$WAIT_SECONDS: give a whole number of 1 or more."
    need_venv
    end=$((SECONDS + ${WAIT_SECONDS:-600}))
    while :; do
        found=$("$venv/bin/python" - 2>/dev/null <<'PYTHON' || true
import os
from ray.util.state import list_nodes
print(sum(node.state == "ALIVE" for node in list_nodes(address=os.environ["RAY_ADDRESS"])))
PYTHON
        )
        [ "${found:-0}" -lt "$1" ] || break
        [ "$SECONDS" -lt "$end" ] || fail "${found:-0} of $1 nodes are at $RAY_ADDRESS after ${WAIT_SECONDS:-600} seconds: look at the output of head and join, or raise WAIT_SECONDS."
        sleep 2
    done
    echo "$found nodes"
    ;;
follow | stop) need_venv; exec "$venv/bin/python" scripts/cluster/job.py "$command" "${1:?which job?}" ;;
*) usage ;;
esac
