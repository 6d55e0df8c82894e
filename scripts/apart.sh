#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command with its own /tmp, /dev/shm and process namespace, as in a container, so that several runs can share a
# machine (docs/clusters.md). The command must not read or write anything in the machine's /tmp. This needs root, or a
# kernel that lets users create namespaces.
#
#   CUDA_VISIBLE_DEVICES=0,1 bash scripts/apart.sh bash recipe/bapo/run_bapo_example.sh [key=value ...]
#
# The exit code is the command's. SIGINT, SIGTERM and SIGHUP go to the command as SIGTERM.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 1; }
fail() { echo "Error: $*" >&2; exit 1; }
for path in "$PWD" "OUTPUT_DIR=${OUTPUT_DIR:-}" "MODEL_PATH=${MODEL_PATH:-}" "TRAIN_FILE=${TRAIN_FILE:-}" \
    "TEST_FILE=${TEST_FILE:-}" "BAPO_VENV=${BAPO_VENV:-}" "HF_HOME=${HF_HOME:-}" "BAPO_CACHE=${BAPO_CACHE:-}" \
    "$@"; do
    [[ $path =~ (^|[=,[])/tmp(/|$|[],]) ]] || continue
    fail "$path is in /tmp. The command would get another /tmp, whose files are lost at its end: use another folder."
done
apart=(unshare --mount --pid --fork --mount-proc)
[ "$(id -u)" = 0 ] || apart+=(--user --map-root-user)
"${apart[@]}" true ||
    fail "cannot create namespaces (see above): start this as root, or use a container with its own /tmp and /dev/shm."
folder=$(mktemp -d /var/tmp/apart.XXXXXX)
trap 'rm -rf "$folder"' EXIT
"${apart[@]}" bash -c \
    'mount --bind "$0" /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"' "$folder" "$@" &
pid=$! status=0
trap 'pkill -TERM -P $pid || true' INT TERM HUP
wait $pid || status=$?
while kill -0 $pid 2>/dev/null; do status=0; wait $pid || status=$?; done  # the first wait ends with the signal
exit "$status"
